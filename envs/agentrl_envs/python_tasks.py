"""Functions to write: drawn from a seed, or of a bundled list."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call and what it returns."""

    arguments: list[Any]
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A function to write."""

    text: str
    """What it does."""
    signature: str
    """`solve(xs)`."""
    solution: str
    """Python that defines it."""
    tests: list[Example]
    """The first few may be shown."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a drawn function, in words, in Python, and carried out."""

    words: str
    code: str
    apply: Callable[[Any], Any]


def drawn(kind: str, split: str, *, num_steps: int, num_tests: int, rng: np.random.Generator) -> Problem:
    """Draw a problem of one half of all that there are: the checksum of its words says which half.

    Args:
        kind: `arithmetic`, of a number, or `lists`.
        split: `train` or `eval`.
        num_steps: what is to be done one after the other; `lists` have a last one beside them.
        num_tests: calls, among which at least three results differ.
        rng: source of both.
    """
    while True:
        steps = [_number_step(rng) if kind == "arithmetic" else _list_step(rng) for _ in range(num_steps)]
        steps += [] if kind == "arithmetic" else [_last_step(rng)]
        text = "; then ".join(step.words for step in steps)
        if zlib.crc32(text.encode()) % 2 != (split == "eval"):
            continue
        for _ in range(10):
            tests = [_test(kind, steps, rng) for _ in range(num_tests)]
            if len({json.dumps(test.expected) for test in tests}) >= min(3, num_tests):
                name = "n" if kind == "arithmetic" else "xs"
                lines = [
                    f"def solve({name}):",
                    *(f"    {name} = {step.code}" for step in steps),
                    f"    return {name}\n",
                ]
                what = "the number n" if kind == "arithmetic" else "the list xs of whole numbers"
                return Problem(
                    text=f"Take {what}: {text}. Return the result.",
                    signature=f"solve({name})",
                    solution="\n".join(lines),
                    tests=tests,
                )


@cache
def bundled(split: str) -> list[Problem]:
    """Return the bundled problems of a split: every fourth one is for evaluation."""
    text = (files("agentrl_envs") / "data" / "python_problems.json").read_text(encoding="utf-8")
    return [
        Problem(
            text=entry["text"],
            signature=entry["signature"],
            solution=entry["solution"],
            tests=[Example(arguments=arguments, expected=expected) for arguments, expected in entry["tests"]],
        )
        for number, entry in enumerate(json.loads(text))
        if (number % 4 == 3) == (split == "eval")
    ]


def _test(kind: str, steps: list[_Step], rng: np.random.Generator) -> Example:
    numbers = rng.integers(-20, 21, size=1 if kind == "arithmetic" else int(rng.integers(9))).tolist()
    value = given = numbers[0] if kind == "arithmetic" else numbers
    for step in steps:
        value = step.apply(value)
    return Example(arguments=[given], expected=value)


def _number_step(rng: np.random.Generator) -> _Step:
    k = int(rng.integers(2, 10))
    steps = (
        _Step(f"add {k}", f"n + {k}", lambda n: n + k),
        _Step(f"subtract {k}", f"n - {k}", lambda n: n - k),
        _Step(f"multiply by {k}", f"n * {k}", lambda n: n * k),
        _Step("square it", "n * n", lambda n: n * n),
    )
    return steps[int(rng.integers(len(steps)))]


def _list_step(rng: np.random.Generator) -> _Step:
    k = int(rng.integers(2, 10))
    steps = (
        _Step(f"add {k} to each", f"[x + {k} for x in xs]", lambda xs: [x + k for x in xs]),
        _Step(f"multiply each by {k}", f"[x * {k} for x in xs]", lambda xs: [x * k for x in xs]),
        _Step("square each", "[x * x for x in xs]", lambda xs: [x * x for x in xs]),
        _Step("keep the even ones", "[x for x in xs if x % 2 == 0]", lambda xs: [x for x in xs if x % 2 == 0]),
        _Step("keep the odd ones", "[x for x in xs if x % 2 == 1]", lambda xs: [x for x in xs if x % 2 == 1]),
        _Step(f"keep those above {k}", f"[x for x in xs if x > {k}]", lambda xs: [x for x in xs if x > k]),
        _Step(f"keep those below {k}", f"[x for x in xs if x < {k}]", lambda xs: [x for x in xs if x < k]),
        _Step("sort them", "sorted(xs)", sorted),
        _Step("reverse them", "xs[::-1]", lambda xs: xs[::-1]),
        _Step(f"take the first {k}", f"xs[:{k}]", lambda xs: xs[:k]),
        _Step("drop repeated ones", "list(dict.fromkeys(xs))", lambda xs: list(dict.fromkeys(xs))),
    )
    return steps[int(rng.integers(len(steps)))]


def _last_step(rng: np.random.Generator) -> _Step:
    steps = (
        _Step("add them all up", "sum(xs)", sum),
        _Step("count them", "len(xs)", len),
        _Step("take the largest, or 0 where there is none", "max(xs, default=0)", lambda xs: max(xs, default=0)),
        _Step("take the smallest, or 0 where there is none", "min(xs, default=0)", lambda xs: min(xs, default=0)),
        _Step("leave it at that", "xs", lambda xs: xs),
    )
    return steps[int(rng.integers(len(steps)))]
