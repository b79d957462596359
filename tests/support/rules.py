"""Checks of which each is made of every subject: one test for each subject, and a subtest for each check."""

from collections.abc import Callable
from typing import Generic, TypeVar

import pytest

T = TypeVar("T")


class Rules(Generic[T]):
    """Checks in the order of their definition; used as the decorator that adds one."""

    def __init__(self) -> None:
        self._checks: list[Callable[[T], None]] = []

    def __call__(self, check: Callable[[T], None]) -> Callable[[T], None]:
        self._checks.append(check)
        return check

    def check(self, subject: T, subtests: pytest.Subtests) -> None:
        """Make every check of a subject, each as a subtest under its own name."""
        assert self._checks
        for check in self._checks:
            with subtests.test(check.__name__):
                check(subject)
