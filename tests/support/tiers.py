"""The tiers of tests: which cases of a grid are slow, and the parts into which the slow tests are divided."""

import argparse
import zlib
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def read_part(text: str) -> tuple[int, int]:
    """Return part and number of parts of words such as `3/8`."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"a part is written as 3/8, from 1/8 to 8/8; got {text!r}")
    return int(part), int(parts)


def part_of(node_id: str, *, parts: int) -> int:
    """Return the part, from 1 on, of a test: the same on every machine, and for all parameter sets of a function."""
    return zlib.crc32(node_id.partition("[")[0].encode()) % parts + 1


def slow_unless(is_quick: Callable[..., bool], *values: Iterable[Any]) -> list[Any]:
    """Return a grid for `parametrize` whose quick cases are in the default tier; the others are slow."""
    return [pytest.param(*case, marks=() if is_quick(*case) else pytest.mark.slow) for case in product(*values)]


def first_quick(cases: Iterable[Any], *, num: int = 1) -> list[Any]:
    """Return cases for `parametrize`, of which so many stay in the default tier; the others are slow."""
    first, others = (found := list(cases))[:num], found[num:]
    return [*first, *(pytest.param(*_values(case), marks=pytest.mark.slow, id=_id(case)) for case in others)]


def _values(case: Any) -> tuple[Any, ...]:
    return tuple(getattr(case, "values", case)) if isinstance(case, tuple) else (case,)


def _id(case: Any) -> str | None:
    return getattr(case, "id", None) if isinstance(case, tuple) else None


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], object]) -> list[Any]:
    """Return cases for `parametrize`: the first of each kind stays in the default tier, the others are slow."""
    found, kinds = [], set[object]()
    for case in cases:
        found.append(pytest.param(case, marks=pytest.mark.slow if kind(case) in kinds else ()))
        kinds.add(kind(case))
    return found
