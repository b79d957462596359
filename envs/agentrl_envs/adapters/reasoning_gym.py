"""Tasks of reasoning-gym: a question, an answer, and the score of the data set's own scorer."""

import base64
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl import EnvironmentFailure, Message, ToolEnv, UserError
from agentrl.env.subprocesses import WorkerPool
from agentrl_envs.adapters.common import OwnRandom, draw
from agentrl_envs.options import whole_number

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS
except ModuleNotFoundError as error:
    raise UserError(f"reasoning-gym is not installed ({error}); pip install 'agentrl[reasoning-gym]'") from error

_SIZE = 5
"""The least that all data sets can be made of."""
_DEADLINE_S = 5.0
"""Seconds that a score may take."""
_pool = WorkerPool(Path(__file__).with_name("reasoning_gym_worker.py"), purpose="reasoning_gym")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(ToolEnv):
    """One question, one turn: what stands in the last `<answer>` is scored, or the whole turn if there is none.

    The score, from 0 to 1, is the reward; 1 is success. Scorers run in processes of their own, which read answers and run none
    of them. Some raise on answers that they cannot read, or take more than five seconds or 2 GiB: such an answer is wrong, and
    counts in `info["scorer_errors"]`. A scorer that fails at the right answer too fails the episode.
    """

    turn_rewards = False

    def __init__(self, *, dataset: str, config: Mapping[str, Any] | None = None, max_chars: int = 4_000) -> None:
        """Make the data set.

        Args:
            dataset: its name in reasoning-gym, such as `chain_sum`.
            config: its fields, such as {min_terms: 2}; not `seed` and `size`. Of `composite`, which mixes others, {datasets:
                [{name: chain_sum, weight: 2, config: {min_terms: 2}}, ...]}, where weight is 1 by default.
            max_chars: longest question; a longer one fails the episode.

        Raises:
            UserError: for a name or a field that there is none of, and on Windows.
        """
        super().__init__()
        _pool.check_platform()
        if dataset not in DATASETS:
            raise UserError(f"dataset: reasoning-gym has no {dataset!r}; it has {', '.join(sorted(DATASETS))}")
        self.dataset, self.config = dataset, dict(config or {})
        self.max_chars = whole_number("max_chars", max_chars, at_least=1)
        if taken := self.config.keys() & {"seed", "size"}:
            raise UserError(f"config: {min(taken)} follows from the task's seed; remove it")
        try:
            if dataset == "composite":
                parts = self.config.get("datasets") or []
                self.config["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}} | dict(part)) for part in parts]
            self._entry(0)
        except (TypeError, ValueError, AssertionError) as error:  # what its fields are refused with
            raise UserError(f"config: {' '.join(str(error).split())}") from error
        self.entry: dict[str, Any] = {}
        self.is_answered = False

    def start(self, options: dict[str, Any]) -> str:
        """Make a question from a seed."""
        self.entry = draw(self.np_random, options, lambda seed: ((entry := self._entry(seed))["question"], entry))
        self.is_answered = False
        return str(self.entry["question"])

    def answer(self, text: str) -> None:
        """Score the answer."""
        found = _TAGGED.findall(text)
        score = self._score((found[-1] if found else text).strip())
        self.is_answered = True
        self.reward(score, "score")
        self.finish(success=score >= 1.0, score=score)

    def gold_answer(self) -> str | None:
        """Return the data set's answer, if it has one."""
        return None if self.entry.get("answer") is None else str(self.entry["answer"])

    def state_key(self) -> str:
        """Return whether there was an answer: there is one question."""
        return "answered" if self.is_answered else "asked"

    def oracle(self, *, skill: float = 1.0, rng: Any = None) -> Message:
        """Say the answer; or, with no skill, another question's."""
        if self.entry.get("answer") is None:
            raise NotImplementedError(
                f"{self.dataset} has no single right answer; train without warm-up (warmup.steps: 0)"
            )
        is_right = skill >= 1.0 or (rng is not None and rng.random() < skill)
        said = self.gold_answer() if is_right else str(self._entry(int(rng.integers(2**31)))["answer"])
        return {"role": "assistant", "content": f"<answer>{said}</answer>"}

    def _entry(self, seed: int) -> dict[str, Any]:
        with OwnRandom(seed).in_use(f"reasoning-gym's {self.dataset}"):  # some draw from the global generators
            entry = dict(self._data_set(seed)[0])
        if len(entry["question"]) > self.max_chars:
            raise EnvironmentFailure(
                f"a question of {self.dataset} has {len(entry['question'])} characters; make it easier, or set max_chars"
            )
        return entry

    def _score(self, answer: str) -> float:
        scored = self._scored(answer)
        if "score" not in scored:
            if "score" not in self._scored(self.gold_answer()):
                raise EnvironmentFailure(
                    f"the scorer of {self.dataset} fails at the right answer too: {scored['error']}"
                )
            self._info["scorer_errors"] = 1
            return 0.0
        return float(min(max(scored["score"], 0.0), 1.0))

    def _scored(self, answer: str | None) -> dict[str, Any]:
        """Return `{"score": ...}`, or the `error` of the scorer."""
        question = {
            "data_set": _pickled((self.dataset, _SIZE, self.config)),
            "entry": _pickled(self.entry),
            "answer": answer,
            "timeout_s": _DEADLINE_S,
        }
        error = f"its process has ended, as it does after {_DEADLINE_S:g} s or where it takes more than 2 GiB"
        return _pool.ask(question) or {"error": error}

    def _data_set(self, seed: int) -> Any:
        # One for each seed, of which the first entry is taken: sets of two seeds that lie close share most of their entries,
        # and some make all of their entries at once.
        return reasoning_gym.create_dataset(self.dataset, seed=seed, size=_SIZE, **self.config)


def _pickled(value: Any) -> str:
    # JSON would make tuples and numbered keys of an entry into something else.
    return base64.b64encode(pickle.dumps(value)).decode()
