"""Columns of numbers, one for each token, as short text: how journals and checkpoints hold them, exactly; and as arrays."""

import base64
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer


def to_array(column: Sequence[int]) -> "array[int]":
    """Return integers without an object for each."""
    try:
        return array("i", column)
    except OverflowError:
        return array("q", column)


def from_array(column: "array[int]") -> tuple[int, ...]:
    """Return the integers of `to_array`: equal ones, in the range of token ids, are one object in the whole process."""
    known = _integers()
    return tuple([known[value] if 0 <= value < _NUM_KNOWN else value for value in column])


_NUM_KNOWN = 2**18


@cache
def _integers() -> list[int]:
    return list(range(_NUM_KNOWN))


def pack_integers(column: Sequence[int]) -> str:
    """Return integers as text: the letter of a form of `struct`, and base64."""
    for form in "Hi":  # of 2 and 4 bytes
        with suppress(struct.error):  # out of range
            return _pack(form, column)
    return _pack("q", column)


def pack_floats(column: Sequence[float]) -> str:
    """Return numbers as text: in single precision where that is exact, as for log-probabilities that an engine computed so."""
    try:
        packed = struct.pack(f"<{len(column)}f", *column)
    except OverflowError:
        return _pack("d", column)
    is_exact = struct.unpack(f"<{len(column)}f", packed) == tuple(column)  # NaN is not equal to itself
    return _pack("f" if is_exact else "d", column)


def pack_runs(column: Sequence[int]) -> str:
    """Return runs of equal integers as text: `3x120 4x7`."""
    return " ".join(f"{value}x{len(list(run))}" for value, run in groupby(column))


def unpack(text: object) -> object:
    """Return the numbers of a packed column; what is no text is returned as it is.

    Raises:
        ValueError: for text that is no column.
    """
    if not isinstance(text, str):
        return text
    form, content = text[:1], text[1:]
    if form not in "Hiqfd" or not form:
        raise ValueError(f"not a column of numbers: {text[:20]!r}")
    data = base64.b64decode(content, validate=True)
    size = struct.calcsize(f"<{form}")
    if len(data) % size:
        raise ValueError(f"a column of {len(data)} bytes is none of numbers of {size} bytes")
    return struct.unpack(f"<{len(data) // size}{form}", data)


def unpack_runs(text: object) -> object:
    """Return the integers of `pack_runs`; what is no text is returned as it is.

    Raises:
        ValueError: for text that is no runs.
    """
    if not isinstance(text, str):
        return text
    found: list[int] = []
    for run in text.split():
        value, _, count = run.partition("x")
        if not 0 < int(count) < _MAX_RUN:
            raise ValueError(f"not a run of equal numbers: {run[:20]!r}")
        found += [int(value)] * int(count)
    return found


_MAX_RUN = 2**24
"""Longer than any context: a damaged number must not fill the memory."""


def _pack(form: str, column: Sequence[float]) -> str:
    return form + base64.b64encode(struct.pack(f"<{len(column)}{form}", *column)).decode()


def _token_ids(column: tuple[int, ...]) -> tuple[int, ...]:
    if column and not 0 <= min(column) <= max(column) < 2**31:
        raise ValueError(f"{min(column)} to {max(column)} are no token ids")
    return column


def _logprobs(column: tuple[float, ...]) -> tuple[float, ...]:
    if not all(-_MAX_NATS <= value <= _MAX_NATS for value in column):
        raise ValueError("these are no log-probabilities: some are not finite in single precision")
    return column


_MAX_NATS = 1e30

TokenIds = Annotated[
    tuple[int, ...],
    BeforeValidator(unpack),
    AfterValidator(_token_ids),
    PlainSerializer(pack_integers, when_used="json"),
]
Runs = Annotated[tuple[int, ...], BeforeValidator(unpack_runs), PlainSerializer(pack_runs, when_used="json")]
"""Integers that stay the same for long, such as policy versions."""
LogProbs = Annotated[
    tuple[float, ...],
    BeforeValidator(unpack),
    AfterValidator(_logprobs),
    PlainSerializer(pack_floats, when_used="json"),
]
InMemory = Annotated[bytes, Field(exclude=True), BeforeValidator(lambda _: b"")]
"""What no file holds, and is read from none."""
