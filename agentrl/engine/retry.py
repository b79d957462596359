"""How long to wait before what failed is tried again."""

LONGEST_WAIT_S = 60.0
"""Waits double up to this."""


def retry_wait_s(number: int, *, first_s: float) -> float:
    """Return the wait number 0, 1, 2, ... of a row of retries, in seconds."""
    return min(first_s * 2.0 ** min(number, 60), LONGEST_WAIT_S)
