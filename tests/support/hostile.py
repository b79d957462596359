"""What the code of a stranger may return, and an environment that returns it."""

import datetime as dt
import uuid
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from hypothesis import strategies as st

from agentrl.env import MessageEnv
from agentrl.types import Message
from tests.support.threads import hang


class Rude:
    """Raises whatever it is asked."""

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("\ud800\x1b[31m no")

    __repr__ = __str__ = __bool__ = __len__ = __iter__ = __eq__ = __float__ = __index__ = __getattr__ = _raise
    __hash__ = None  # type: ignore[assignment]


class RudeDict(dict[str, Any]):
    """A dict that lets nobody look into it."""

    def items(self) -> Any:
        raise OSError("no items")


class SpeechlessError(Exception):
    """Raises when it is asked for its words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int) -> list[Any]:
    """Return lists within lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def ring() -> dict[str, Any]:
    """Return a dict that holds itself."""
    value: dict[str, Any] = {}
    value["self"] = value
    return value


_TEXT = st.text(st.characters(), max_size=20) | st.sampled_from(["\ud800", "\x1b[2J", "\x00", "</think>", "é" * 3000])
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(60, 20_000).map(lambda bits: 2**bits),
    st.floats(),
    _TEXT,
    st.binary(max_size=8),
    st.datetimes(),
    st.dates(),
    st.timedeltas(),
    st.complex_numbers(max_magnitude=10),
    st.sampled_from([np.float16(0.5), np.float64("nan"), np.int8(3), np.bool_(True), np.str_("a"), np.longdouble(1)]),
    st.sampled_from(
        [np.arange(6.0).reshape(2, 3), np.array(["a", None], dtype=object), np.array(b"x"), np.zeros((0, 2))]
    ),
    st.sampled_from([Decimal("1.5"), Fraction(1, 3), uuid.UUID(int=1), PurePosixPath("/a"), dt.UTC, int, len]),
    st.builds(Rude),
    st.builds(RudeDict, a=st.integers()),
    st.builds(SpeechlessError),
    st.builds(ring),
    st.integers(0, 1000).map(nested),
)
_KEYS = _TEXT | st.integers() | st.none() | st.tuples(st.integers(), st.integers()) | st.binary(max_size=2)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_TEXT, inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.frozensets(st.integers() | st.text(), max_size=3),
    ),
    max_leaves=8,
)
"""Anything at all."""

_ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
_MESSAGES = st.builds(
    lambda base, more: {**more, **base},
    st.fixed_dictionaries({"role": _ROLES, "content": _TEXT}),
    st.dictionaries(
        st.sampled_from(["name", "tool_calls", "tool_call_id", "reasoning_content", "at"]), VALUES, max_size=2
    ),
)
_ODD_MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "x"]), _ROLES | _TEXT | VALUES, max_size=4
)
OBSERVATIONS = st.one_of(
    st.lists(_MESSAGES, max_size=3).map(tuple),
    st.lists(_MESSAGES, max_size=3),
    st.lists(_MESSAGES | _ODD_MESSAGES, max_size=3).map(tuple),
    VALUES,
)
"""What stands for messages."""
INFOS = st.one_of(
    st.dictionaries(st.sampled_from(["tool_errors", "success", "score", "x"]), VALUES, max_size=3),
    st.dictionaries(_TEXT, st.floats() | st.integers(), max_size=3),
    VALUES,
)
"""What stands for an `info`."""
_REWARDS = st.floats(-10, 10) | st.floats() | VALUES
STEPS = st.one_of(
    st.tuples(OBSERVATIONS, st.floats(-10, 10), st.booleans(), st.booleans(), INFOS),
    st.tuples(OBSERVATIONS, _REWARDS, st.booleans() | VALUES, st.booleans() | VALUES, INFOS),
    VALUES,
)
"""What `step` returns."""
RESETS = st.tuples(OBSERVATIONS, st.just({}) | INFOS) | VALUES
"""What `reset` returns."""
_PROPERTIES = st.dictionaries(_TEXT, st.booleans() | st.just({"type": "string"}) | VALUES, max_size=3) | VALUES
_PARAMETERS = st.fixed_dictionaries({"type": st.just("object")}, optional={"properties": _PROPERTIES}) | VALUES
_FUNCTIONS = st.fixed_dictionaries(
    {"name": _TEXT | VALUES}, optional={"parameters": _PARAMETERS, "description": VALUES}
)
TOOLS = st.one_of(
    st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": _FUNCTIONS}), max_size=2),
    st.lists(_FUNCTIONS, max_size=2),
    VALUES,
)
"""What stands for an environment's `tools`."""
KEYS = st.none() | _TEXT | VALUES
"""What stands for a key."""


class ExitsInWordsError(Exception):
    """Ends whoever asks for its words."""

    def __str__(self) -> str:
        raise SystemExit(3)


class InterruptsInWordsError(Exception):
    """Interrupts whoever asks for its words."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class HangsInWordsError(Exception):
    """Has words that take for ever."""

    def __str__(self) -> str:
        hang()
        return ""


class CauselessError(Exception):
    """Has a cause that cannot be looked at."""

    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise RuntimeError("no cause")


class ExitsInSearch:
    """Ends whoever looks for a name that is like the one it has not."""

    def __dir__(self) -> list[str]:
        raise SystemExit(4)


HOSTILE_ERRORS: list[Exception] = [
    ExitsInWordsError(),
    InterruptsInWordsError(),
    CauselessError("x"),
    SyntaxError("bad", ("f", 1, "x", "text")),  # type: ignore[arg-type]
    SyntaxError("bad", ("f", 1, 10**9, "text\n" * 3)),
    AttributeError("x", name="aa", obj=ExitsInSearch()),
]
"""Exceptions whose description raises."""


class Says(MessageEnv):
    """Returns what it is given, or raises it where it is an exception."""

    def __init__(self, reset: Any, step: Any, *, tools: Any = (), key: Any = None, action_key: Any = "a") -> None:
        super().__init__()
        self.tools = tools
        self._reset, self._step, self._key, self._action_key = reset, step, key, action_key

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return _said(self._reset)

    def step(self, action: str | Message) -> Any:
        return _said(self._step)

    def state_key(self) -> Any:
        return _said(self._key)

    def gold_answer(self) -> Any:
        return _said(self._key)

    def action_key(self, action: str | Message) -> Any:
        return _said(self._action_key)


def _said(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value
