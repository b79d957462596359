"""Checks of constructor options, in words for the person who wrote them."""

import math

from agentrl import UserError


def whole_number(name: str, value: object, *, at_least: int, at_most: int | None = None) -> int:
    """Return `value` where it is a whole number of the range.

    Raises:
        UserError: naming the option, what it was given and what it takes.
    """
    highest = float("inf") if at_most is None else at_most
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= highest:
        return value
    takes = f"of {at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
    raise UserError(f"{name}: give a whole number {takes}, got {value!r}")


def share(name: str, value: object, *, at_least: float = 0.0) -> float:
    """Return `value` where it is a number from `at_least` to 1.

    Raises:
        UserError: naming the option, what it was given and what it takes.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and at_least <= value <= 1:
        return float(value)
    raise UserError(f"{name}: give a number from {at_least:g} to 1, got {value!r}")


def finite_number(name: str, value: object) -> float:
    """Return `value` where it is a finite number.

    Raises:
        UserError: naming the option, what it was given and what it takes.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise UserError(f"{name}: give a number, got {value!r}")
