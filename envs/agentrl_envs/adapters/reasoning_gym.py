"""Tasks of reasoning-gym: a question, an answer, and the score of the data set's own scorer."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from agentrl import EnvironmentFailure, Message, ToolEnv, UserError
from agentrl_envs.adapters.global_random import OwnRandom
from agentrl_envs.adapters.splits import draw
from agentrl_envs.options import whole_number

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ModuleNotFoundError as error:
    raise UserError(f"reasoning-gym is not installed ({error}); pip install 'agentrl[reasoning-gym]'") from error

_SIZE = 5
"""The least that all data sets can be made of."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(ToolEnv):
    """One question, one turn: what stands in the last `<answer>` is scored, or the whole turn where there is none.

    The score, from 0 to 1, is the reward; 1 is success. Some scorers raise on answers that they cannot read: such an answer is
    wrong, and counts in `info["scorer_errors"]`. A scorer that raises on the right answer too fails the episode.
    """

    turn_rewards = False

    def __init__(self, *, dataset: str, config: Mapping[str, Any] | None = None, max_chars: int = 4_000) -> None:
        """Make the data set.

        Args:
            dataset: its name in reasoning-gym, such as `chain_sum`.
            config: its fields, such as {min_terms: 2}; not `seed` and `size`.
            max_chars: longest question; a longer one fails the episode.

        Raises:
            UserError: for a name or a field that there is none of.
        """
        super().__init__()
        if dataset not in DATASETS:
            raise UserError(f"dataset: reasoning-gym has no {dataset!r}; it has {', '.join(sorted(DATASETS))}")
        self.dataset, self.config = dataset, dict(config or {})
        self.max_chars = whole_number("max_chars", max_chars, at_least=1)
        if taken := self.config.keys() & {"seed", "size"}:
            raise UserError(f"config: {min(taken)} follows from the task's seed; remove it")
        try:
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
        """Return the data set's answer, where it has one."""
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
        with OwnRandom(seed).in_use():  # some draw from the global generators
            entry = dict(self._data_set(seed)[0])
        if len(entry["question"]) > self.max_chars:
            raise EnvironmentFailure(
                f"a question of {self.dataset} has {len(entry['question'])} characters; make it easier, or set max_chars"
            )
        return entry

    def _score(self, answer: str) -> float:
        scorer = self._data_set(0)
        try:
            with OwnRandom().in_use():
                score = float(scorer.score_answer(answer, self.entry))
        except Exception as error:  # noqa: BLE001 - a stranger's scorer may raise anything
            try:
                scorer.score_answer(self.gold_answer(), self.entry)
            except Exception:  # noqa: BLE001 - it is not the answer
                raise EnvironmentFailure(
                    f"the scorer of {self.dataset} raises on the right answer too: {error!r}"
                ) from error
            self._info["scorer_errors"] = 1
            return 0.0
        return min(max(score, 0.0), 1.0)

    def _data_set(self, seed: int) -> Any:
        # One for each seed, of which the first entry is taken: sets of two seeds that lie close share most of their entries,
        # and some make all of their entries at once.
        return reasoning_gym.create_dataset(self.dataset, seed=seed, size=_SIZE, **self.config)
