"""Durations such as 1h30m, in whole seconds."""

import re

SECONDS = [3600, 60, 1]


def read(text):
    """Return the seconds of a duration of hours, minutes and seconds, each of which may be missing.

    Raises:
        ValueError: for what is none.
    """
    if not re.fullmatch(r"(\d+h)?(\d+m)?(\d+s)?", text) or not text:
        raise ValueError(f"no duration: {text!r}")
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    missing = [0] * (len(SECONDS) - len(numbers))
    if "h" in text:
        numbers = numbers + missing
    else:
        numbers = missing + numbers
    return sum(number * seconds for number, seconds in zip(numbers, SECONDS))


def write(seconds):
    """Return seconds as a duration."""
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}h{minutes}m{rest}s"
