"""Environments that break their contract in one way each, trained for a few steps and resumed."""

import copy
import datetime as dt
import enum
import json
import os
import random
import shutil
import sys
import threading
import time
import warnings
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal, Never

import numpy as np
import yaml

from agentrl import MessageEnv
from agentrl.rollout.tasks import task_seed
from benchmarks.hostile.cases import CaseCounts, agentrl, attempt
from benchmarks.hostile.recipes import TINY

HARMED = (1, 3)
"""Numbers of the training tasks that go wrong; the trial before the run and evaluation never do."""
STEPS = 3


class Hostile(MessageEnv):
    """A dialogue of three turns; `harm` names what goes wrong in it."""

    def __init__(self, harm: str, always: bool = False) -> None:
        super().__init__()
        self._name, self._always = harm, always
        self.shared: dict[str, Any] = {"role": "user", "content": "Well?"}
        self.action: Any = None
        self.num_turns = 0
        self.is_harmed = always
        if self._harm.method == "class":
            self._harm.do(self, None)

    @property
    def _harm(self) -> "Harm":
        return HARMS[self._name]  # which no snapshot could hold

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.num_turns, self.is_harmed = 0, self._always or seed in _harmed_seeds()
        said = {"role": "user", "content": f"Well? {int(self.np_random.integers(100))}"}
        return self._harmed("reset", ((said,), {}))

    def step(self, action: Any) -> Any:
        self.num_turns, self.action = self.num_turns + 1, action
        said = {"role": "user", "content": f"Go on. {self.num_turns}"}
        info = {"score": 0.5, "turn": self.num_turns}
        return self._harmed("step", ((said,), float(self.np_random.random()), self.num_turns == 3, False, info))

    def state_key(self) -> Any:
        return self._harmed("state_key", str(self.num_turns))

    def action_key(self, action: Any) -> Any:
        return self._harmed("action_key", super().action_key(action))

    def gold_answer(self) -> Any:
        return self._harmed("gold_answer", "gold")

    def fork(self) -> Any:
        return self._harmed("fork", copy.deepcopy(self))

    def close(self) -> None:
        self._harmed("close", None)

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        number = 0 if rng is None else int(rng.integers(3))
        return {"role": "assistant", "content": ("", "ok", "go on")[number]}

    def _harmed(self, method: str, whole: Any) -> Any:
        return self._harm.do(self, whole) if self.is_harmed and self._harm.method == method else whole


@cache
def _harmed_seeds() -> frozenset[int]:
    return frozenset(task_seed(0, number) for number in HARMED)


Expected = Literal["fault", "fine", "either", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """One way of breaking the contract."""

    method: str
    """Where it goes wrong; `class`: as soon as there is an environment."""
    do: Callable[[Any, Any], Any]
    """Given the environment and what it would have returned, what comes in its place."""
    expected: Expected = "fault"
    """`fault`: the episode fails and is counted. `fine`: it is trained on, and resumed without being begun again. `either`: one
    of these. `refused`: no run begins."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the recipe."""


class UnprintableError(Exception):
    """Cannot be turned into text."""

    def __str__(self) -> Never:
        raise RuntimeError("no words")


class Unspeakable:
    """Neither has a repr, nor can be compared, copied or pickled."""

    def __repr__(self) -> Never:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> Never:
        raise RuntimeError("no comparison")

    def __hash__(self) -> int:
        return 0

    def __deepcopy__(self, _: Any) -> Never:
        raise RuntimeError("no copy")

    def __reduce__(self) -> Never:
        raise RuntimeError("no pickle")


class Color(enum.Enum):
    """A value that JSON does not know."""

    RED = 1


class LyingDict(dict[str, Any]):
    """Says something else each time."""

    def get(self, key: str, default: Any = None) -> Any:
        return random.choice([default, None, 3, "user", "text"])


def _in(method: str, do: Callable[[Any, Any], Any], expected: Expected = "fault", **settings: Any) -> Harm:
    return Harm(method=method, do=do, expected=expected, settings=settings)


def _step(do: Callable[[Any, Any], Any], expected: Expected = "fault", **settings: Any) -> Harm:
    return _in("step", do, expected, **settings)


def _raise(error: BaseException) -> Callable[[Any, Any], Never]:
    def do(env: Any, whole: Any) -> Never:
        raise error

    return do


def _value(value: Any) -> Callable[[Any, Any], Any]:
    return lambda env, whole: value


def _call(function: Callable[[Any], object]) -> Callable[[Any, Any], Any]:
    """Do something, and continue as if nothing had happened."""

    def do(env: Any, whole: Any) -> Any:
        function(env)
        return whole

    return do


def _content(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return _message(lambda env: {"role": "user", "content": change(env)})


def _message(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda env, whole: ((make(env),), *whole[1:])


def _calls(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return _message(lambda env: {"role": "assistant", "content": None, "tool_calls": make(env)})


def _info(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda env, whole: (*whole[:-1], make(env))


def _reward(value: Any) -> Callable[[Any, Any], Any]:
    return lambda env, whole: (whole[0], value, *whole[2:])


def _nested(depth: int, kind: type = list) -> Any:
    at: Any = kind()
    for _ in range(depth):
        at = [at] if kind is list else {"a": at}
    return at


def _cyclic() -> dict[str, Any]:
    at: dict[str, Any] = {}
    at["self"] = at
    return at


def _rewrite(env: Any) -> None:
    if isinstance(env.action, dict):
        env.action["content"] = "It never said so."
        env.action["tool_calls"] = "gone"


def _reuse(env: Any) -> Any:
    env.shared["content"] = f"Go on. {env.num_turns}"
    return env.shared


def _threads(env: Any) -> None:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()


def _thread_raises(env: Any) -> None:
    threading.Thread(target=lambda: 1 / 0).start()


def _recurse(env: Any = None) -> None:
    _recurse()


def _print(env: Any) -> None:
    print("noise \x1b[31m" * 100)
    print("noise", file=sys.stderr)


def _extra(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    return _message(lambda env: {"role": "user", "content": "x", "extra": make()})


def _made_info(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    return _info(lambda env: make())


QUICK = {"env_timeout_s": 1.5}
EXTRAS: tuple[tuple[str, Callable[[], Any], Expected], ...] = (
    ("a tuple", lambda: (1, 2), "fine"),
    ("a date", lambda: dt.date(2026, 11, 22), "either"),
    ("an array", lambda: np.arange(3), "either"),
    ("bytes", lambda: b"\xff", "either"),
    ("a set", lambda: {1, 2}, "either"),
    ("NaN", lambda: float("nan"), "either"),
    ("a huge number", lambda: 10**400, "either"),
    ("5,000 digits", lambda: 10**5000, "either"),
    ("nesting of 300", lambda: _nested(300), "either"),
    ("nesting of 100,000", lambda: _nested(100_000), "either"),
    ("itself", _cyclic, "either"),
    ("a key of None", lambda: {None: 1}, "either"),
    ("keys of two types", lambda: {1: 1, "1": 2}, "either"),
    ("what has no repr", Unspeakable, "either"),
    ("an Enum", lambda: Color.RED, "either"),
    ("a Decimal", lambda: Decimal("1.1"), "either"),
    ("a lambda", lambda: lambda: 3, "either"),
    ("a lock", threading.Lock, "either"),
    ("a float of numpy", lambda: np.float32(0.1), "either"),
)
REWARDS: tuple[tuple[str, Any, Expected], ...] = (
    ("NaN", float("nan"), "fault"),
    ("infinite", float("inf"), "fault"),
    ("None", None, "fault"),
    ("text", "1", "fault"),
    ("10**400", 10**400, "fault"),
    ("1e308", 1e308, "either"),
    ("an array", np.ones(3), "fault"),
    ("an array of one", np.ones(1), "either"),
    ("a bool", True, "fine"),
    ("complex", 1j, "fault"),
    ("a Fraction", Fraction(1, 3), "fine"),
    ("a Decimal", Decimal(1), "either"),
    ("a number of numpy", np.float16(0.5), "fine"),
    ("what has no repr", Unspeakable(), "fault"),
)
INFOS: tuple[tuple[str, Callable[[], Any], Expected], ...] = (
    ("None", lambda: None, "fault"),
    ("a list", list, "fault"),
    ("text", lambda: "x", "fault"),
    ("keyed by a number", lambda: {1: 2}, "fine"),
    ("keyed by half a letter", lambda: {"\ud800": 1}, "either"),
    ("10**400", lambda: {"n": 10**400}, "either"),
    ("5,000 digits", lambda: {"n": 10**5000}, "either"),
    ("tool_errors None", lambda: {"tool_errors": None}, "either"),
    ("tool_errors text", lambda: {"tool_errors": "x"}, "either"),
    ("tool_errors NaN", lambda: {"tool_errors": float("nan")}, "either"),
    ("NaN", lambda: {"x": float("nan")}, "either"),
    ("score NaN", lambda: {"score": float("nan")}, "either"),
    ("score text", lambda: {"score": "best"}, "either"),
    ("score of 7", lambda: {"score": 7, "success": "yes"}, "either"),
    ("success an array", lambda: {"success": np.zeros(3)}, "either"),
    ("nested 300 deep", lambda: {"a": _nested(300)}, "fault"),
    ("nested 200 deep", lambda: {"a": _nested(200, dict)}, "either"),
    ("nested 100,000 deep", lambda: {"a": _nested(100_000)}, "fault"),
    ("itself", _cyclic, "fault"),
    ("an array", lambda: {"a": np.arange(5)}, "either"),
    ("bytes", lambda: {"a": b"\xff"}, "either"),
    ("a model", lambda: {"a": threading.Lock()}, "either"),
    ("what has no repr", lambda: {"a": Unspeakable()}, "fault"),
    ("ten megabytes", lambda: {"a": "x" * 10_000_000}, "either"),
    ("10,000 keys", lambda: {f"k{i}": i for i in range(10_000)}, "either"),
    ("reward_components text", lambda: {"reward_components": "x"}, "either"),
    ("reward_components NaN", lambda: {"reward_components": {"a": float("nan")}}, "either"),
    ("keyed like a metric", lambda: {"env_s": 3, "step": 9, "loss": 1}, "either"),
    ("keyed by an empty name", lambda: {"": 1, "a/b": 2, "\n": 3}, "either"),
    ("a complex number", lambda: {"a": 1j}, "either"),
    ("true", lambda: {"a": np.bool_(True)}, "fine"),
)
HARMS: dict[str, Harm] = {
    # What is raised.
    "step raises KeyError": _step(_raise(KeyError("answer"))),
    "reset raises": _in("reset", _raise(ValueError("no task"))),
    "step raises what has no words": _step(_raise(UnprintableError())),
    "reset raises what has no words": _in("reset", _raise(UnprintableError())),
    "raises megabytes of words": _step(_raise(ValueError("x" * 5_000_000))),
    "raises terminal escapes and half a letter": _step(_raise(ValueError("\x1b[2J\x07\n\ud800"))),
    "raises StopIteration": _step(_raise(StopIteration())),
    "raises StopAsyncIteration": _step(_raise(StopAsyncIteration())),
    "raises GeneratorExit": _step(_raise(GeneratorExit())),
    "raises SystemExit": _step(_raise(SystemExit(0))),
    "raises KeyboardInterrupt": _step(_raise(KeyboardInterrupt())),
    "raises CancelledError": _step(lambda env, whole: _cancelled()),
    "raises TimeoutError": _step(_raise(TimeoutError("mine"))),
    "raises MemoryError": _step(_raise(MemoryError())),
    "raises a group": _step(_raise(BaseExceptionGroup("all", [SystemExit(1), ValueError("x")]))),
    "raises UnicodeDecodeError": _step(lambda env, whole: b"\xff".decode()),
    "recurses without end": _step(_call(_recurse)),
    "asserts": _step(_raise(AssertionError())),
    "raises agentrl's own ConfigError": _step(lambda env, whole: _config_error()),
    "raises agentrl's own EngineError": _step(lambda env, whole: _engine_error()),
    "raises OSError of a full disk": _step(_raise(OSError(28, "No space left on device"))),
    "state_key raises": _in("state_key", _raise(UnprintableError())),
    "action_key raises": _in("action_key", _raise(RuntimeError("key"))),
    "gold_answer raises": _in("gold_answer", _raise(RuntimeError("gold"))),
    "close raises": _in("close", _raise(RuntimeError("close"))),
    "close exits": _in("close", _raise(SystemExit(5))),
    "close hangs": _in("close", _call(lambda env: time.sleep(1000)), rollout=QUICK),
    "sys.exit": _step(_call(lambda env: sys.exit(7))),
    "fork raises": _in("fork", _raise(RuntimeError("fork")), credit={"scheme": "tree"}),
    "fork returns None": _in("fork", _value(None), credit={"scheme": "tree"}),
    "fork returns itself": _in("fork", lambda env, whole: env, "either", credit={"scheme": "tree"}),
    # What hangs, or does something else meanwhile.
    "step hangs": _step(_call(lambda env: time.sleep(1000)), rollout=QUICK),
    "reset hangs": _in("reset", _call(lambda env: time.sleep(1000)), rollout=QUICK),
    "step comes back too late": _step(_call(lambda env: time.sleep(2)), rollout=QUICK),
    "step is slow": _step(_call(lambda env: time.sleep(0.3)), "fine"),
    "starts threads": _step(_call(_threads), "fine"),
    "starts a thread that raises": _step(_call(_thread_raises), "fine"),
    "prints": _step(_call(_print), "fine"),
    "warns": _step(_call(lambda env: warnings.warn("look", stacklevel=1)), "fine"),
    "changes the recursion limit": _step(_call(lambda env: sys.setrecursionlimit(400)), "either"),
    "changes the working directory": _step(_call(lambda env: os.chdir("/")), "fine"),
    "deletes the working directory": _step(_call(lambda env: Path.cwd().rmdir()), "either"),
    "seeds all generators": _step(_call(lambda env: _seed_all()), "fine"),
    "takes the environment variables away": _step(_call(lambda env: os.environ.clear()), "fine"),
    # What step and reset return.
    **{
        f"{method} returns {words}": Harm(method=method, do=_value(value))
        for method in ("step", "reset")
        for words, value in {
            "None": None,
            "nothing": (),
            "text": "Well?",
            "a pair of None": (None, None),
            "six things": (1, 2, 3, 4, 5, 6),
            "what has no repr": Unspeakable(),
            "a generator": iter(()),
        }.items()
    },
    "returns a list for the tuple of five": _step(lambda env, whole: list(whole), "either"),
    "messages are text": _step(lambda env, whole: ("Go on.", *whole[1:])),
    "messages are None": _step(lambda env, whole: (None, *whole[1:])),
    "messages are a dict": _step(lambda env, whole: ({"role": "user", "content": "x"}, *whole[1:])),
    "messages are a generator": _step(lambda env, whole: ((m for m in whole[0]), *whole[1:])),
    "messages are a deque": _step(lambda env, whole: (deque(whole[0]), *whole[1:]), "either"),
    "messages are a list": _step(lambda env, whole: (list(whole[0]), *whole[1:]), "fine"),
    "no message at all": _step(lambda env, whole: ((), *whole[1:]), "fine"),
    "10,000 messages": _step(lambda env, whole: (whole[0] * 10_000, *whole[1:]), "fine"),
    "a message is None": _step(_message(lambda env: None)),
    "a message without a role": _step(_message(lambda env: {"content": "x"})),
    "a message of an unknown role": _step(_message(lambda env: {"role": "god", "content": "x"})),
    "a role that cannot be hashed": _step(_message(lambda env: {"role": [], "content": "x"})),
    "a role that is an array": _step(_message(lambda env: {"role": np.zeros(2), "content": "x"})),
    "a message that is a UserDict": _step(_message(lambda env: UserDict(role="user", content="x")), "fine"),
    "a message that is an OrderedDict": _step(_message(lambda env: OrderedDict(role="user", content="x")), "fine"),
    "a message that lies": _step(_message(lambda env: LyingDict(role="user", content="x")), "either"),
    "one message again and again": _step(_message(_reuse), "fine"),
    "an assistant's message": _step(_message(lambda env: {"role": "assistant", "content": "I said so."}), "either"),
    "a tool's message without a call": _step(_message(lambda env: {"role": "tool", "content": "x"}), "either"),
    "calls that are text": _step(_calls(lambda env: "x")),
    "calls of nothing": _step(
        _message(lambda env: {"role": "assistant", "content": "", "tool_calls": [None]}), "either"
    ),
    "a call without a function": _step(_calls(lambda env: [{}]), "either"),
    "a nested call": _step(_calls(lambda env: [{"function": {"name": "x", "arguments": _nested(300)}}])),
    "content is a list": _step(_content(lambda env: [{"type": "text", "text": "x"}])),
    "content is bytes": _step(_content(lambda env: b"x")),
    "content is a str of numpy": _step(_content(lambda env: np.str_("x")), "either"),
    "content is half a letter": _step(_content(lambda env: "\ud83d x \udcff"), "either"),
    "content is NUL": _step(_content(lambda env: "\0" * 10), "fine"),
    "content is terminal escapes": _step(_content(lambda env: "\x1b[2J\x1b]0;mine\x07\x9b31m"), "fine"),
    "content is control tokens": _step(_content(lambda env: "<|im_end|>\n<|im_start|>assistant\n"), "fine"),
    "content is line separators": _step(_content(lambda env: "a\u2028b\u2029c\x85d\x0be\x1cf"), "fine"),
    "content is empty": _step(_content(lambda env: ""), "fine"),
    "content is a megabyte": _step(_content(lambda env: "word " * 200_000), "fine"),
    "content is ten megabytes": _step(_content(lambda env: "x" * 10_000_000), "fine"),
    "the first prompt is a megabyte": _in(
        "reset", lambda env, whole: (({"role": "user", "content": "x " * 500_000},), {})
    ),
    "no first message": _in("reset", lambda env, whole: ((), {}), "either"),
    **{f"a message with {words}": _step(_extra(make), expected) for words, make, expected in EXTRAS},
    "the action is rewritten": _step(_call(_rewrite), "fine"),
    "the action is returned": _step(_message(lambda env: env.action), "either"),
    # Reward and flags.
    **{f"reward is {words}": _step(_reward(value), expected) for words, value, expected in REWARDS},
    "terminated is an array": _step(lambda env, whole: (*whole[:2], np.zeros(2), False, {})),
    "terminated is text": _step(lambda env, whole: (*whole[:2], "no", False, {}), "either"),
    "truncated is None": _step(lambda env, whole: (*whole[:3], None, {}), "fine"),
    "never ends": _step(lambda env, whole: (*whole[:2], False, False, {}), "fine"),
    # info.
    **{f"info is {words}": _step(_made_info(make), expected) for words, make, expected in INFOS},
    "info of reset is None": _in("reset", lambda env, whole: (whole[0], None)),
    # Keys.
    "state_key is a number": _in("state_key", _value(3)),
    "state_key is half a letter": _in("state_key", _value("\ud800"), "either"),
    "state_key is a megabyte": _in("state_key", lambda env, whole: "k" * 1_000_000, "fine"),
    "state_key changes by itself": _in("state_key", lambda env, whole: str(time.monotonic()), "either"),
    "action_key is a list": _in("action_key", _value(["x"])),
    "gold_answer is a number": _in("gold_answer", _value(3)),
    "the dialogue follows a clock": _step(_content(lambda env: str(time.monotonic())), "either"),
    "rewards follow a clock": _step(lambda env, whole: (whole[0], time.monotonic(), *whole[2:]), "either"),
    # The environment as a whole.
    "cannot be pickled": _in(
        "class", lambda env, _: vars(env).update(can_snapshot=True, lock=threading.Lock()), "refused"
    ),
    "snapshots": _in("class", lambda env, _: vars(env).update(can_snapshot=True), "fine"),
    "tools are None": _in("class", lambda env, _: vars(env).update(tools=None), "refused"),
    "tools are nested": _in(
        "class",
        lambda env, _: vars(env).update(
            tools=[
                {
                    "type": "function",
                    "function": {"name": "x", "parameters": {"properties": {"a": {"x": _nested(500)}}}},
                }
            ]
        ),
        "refused",
    ),
    "a name that is half a letter": _in(
        "class",
        lambda env, _: vars(env).update(tools=[{"type": "function", "function": {"name": "\ud800", "parameters": {}}}]),
        "either",
    ),
}


def _cancelled() -> Never:
    import asyncio

    raise asyncio.CancelledError


def _config_error() -> Never:
    from agentrl.errors import ConfigError

    raise ConfigError("seed: not mine")


def _engine_error() -> Never:
    from agentrl.errors import EngineError

    raise EngineError("not mine")


def _seed_all() -> None:
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def try_environments(folder: Path, every: int) -> CaseCounts:
    """Train each in every mode and resume it: the run ends as asked with its faults counted, or is refused in one line."""
    tally = CaseCounts("an environment that breaks its contract: trained for 2 steps, resumed for a third")
    counts = {"faults": 0, "resumes": 0}
    model = _model_that_answers(folder)
    number = 0
    for harm in HARMS:
        for mode in ("sync", "partial", "async"):
            for always in (False, True) if mode == "partial" and HARMS[harm].expected == "fault" else (False,):
                if (number := number + 1) % every == 0:
                    _try(tally, counts, harm, mode, always, model, folder / f"env-{number}")
    tally.details |= counts
    return tally


def _model_that_answers(folder: Path) -> Path:
    """Return a model that ends its turns within a few tokens, which one with random weights does not."""
    folder.mkdir(exist_ok=True)
    recipe = {**TINY, "env": {"id": "benchmarks.hostile.environments:Hostile", "options": {"harm": "step is slow"}}}
    recipe["warmup"] = {"steps": 60, "batch_size": 8, "num_demonstrations": 64, "skill": 0.5, "learning_rate": 1e-2}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for command in (
        ("train", folder / "recipe.yaml", "--run_dir", folder / "run"),
        ("export", folder / "run", folder / "model"),
    ):
        ended = attempt(agentrl(*command), folder=folder / "cwd")
        assert ended.status == 0, ended
    return folder / "model"


def _try(
    tally: CaseCounts, counts: dict[str, int], name: str, mode: str, always: bool, model: Path, here: Path
) -> None:
    harm, case = HARMS[name], f"{name}, {mode}{', always' if always else ''}"
    recipe = {
        **TINY,
        "env": {"id": "benchmarks.hostile.environments:Hostile", "options": {"harm": name, "always": always}},
    }
    recipe["model"] = {"name_or_path": str(model)}
    rollout = {"mode": mode, "max_live_episodes": 3, "max_retries": 1, "max_consecutive_failures": 8}
    recipe["rollout"] = {**TINY["rollout"], **rollout, **harm.settings.get("rollout", {})}
    recipe["train"] = {**TINY["train"], "steps": STEPS - 1}
    recipe |= {key: value for key, value in harm.settings.items() if key != "rollout"}
    if mode != "sync":
        recipe["loss"] = {"unit": "version", "anchor": "behavior"}
    here.mkdir(parents=True)
    file, run = here / "recipe.yaml", here / "run"
    file.write_text(yaml.safe_dump(recipe))
    ended = attempt(agentrl("train", file, "--run_dir", run), folder=here / "first")
    may_refuse = always or harm.expected == "refused"
    if ended.status == 2 and may_refuse:
        tally.add(case, "refused in one line", wrong=ended.refusal())
        return
    if wrong := ended.harm() or (f"ended: {' / '.join(ended.lines)[:300]}" if ended.status else None):
        tally.add(case, "", wrong=wrong)
        return
    ended = attempt(agentrl("train", run, "--train.steps", STEPS), folder=here / "second")
    faults = 0
    wrong = ended.harm() or (f"resume ended: {' / '.join(ended.lines)[:300]}" if ended.status else None)
    if not wrong:
        counts["resumes"] += 1
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        faults = int(rows[-1]["pool/retries"] + rows[-1]["pool/failed_episodes"])
        counts["faults"] += faults
        if [row["step"] for row in rows] != list(range(STEPS + 1)):
            wrong = f"steps {[row['step'] for row in rows]}"
        elif harm.expected == "fault" and not faults:
            wrong = "no fault was counted"
        elif harm.expected == "fine" and faults:
            wrong = f"{faults} faults were counted"
        elif mode == "async":
            shown = attempt(agentrl("show", run, "-n", 4), folder=here / "third")
            wrong = f"show: {shown.harm() or shown.refusal()}" if shown.harm() or shown.status else None
    if not wrong:
        shutil.rmtree(here)
    tally.add(case, "ended as asked, faults counted" if faults else "ended as asked", wrong=wrong)
