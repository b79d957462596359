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


def first_quick(cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`, of which the first stays in the default tier; the others are slow."""
    first, *others = cases
    several = [case if isinstance(case, tuple) else (case,) for case in others]
    return [first, *(pytest.param(*case, marks=pytest.mark.slow) for case in several)]


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], object]) -> list[Any]:
    """Return cases for `parametrize`: the first of each kind stays in the default tier, the others are slow."""
    found, kinds = [], set[object]()
    for case in cases:
        found.append(pytest.param(case, marks=pytest.mark.slow if kind(case) in kinds else ()))
        kinds.add(kind(case))
    return found
