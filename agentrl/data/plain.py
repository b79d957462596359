"""Plain data, made where strangers' code and models hand something in: every file, report and chat template can hold it.

Plain data is None, bool, int, finite float, str without lone surrogates, list, and dict with str keys. It comes out of JSON
equal to what went in. Inside the boundary nothing checks it again.
"""

import json
import math
import re
import reprlib
import sys
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import islice
from numbers import Integral, Real
from pathlib import PurePath
from types import EllipsisType
from typing import Any, TypeGuard
from uuid import UUID

MAX_DEPTH = 64
"""Containers within containers. pydantic reads 200 levels and writes 255, and records add a dozen of their own."""
MAX_VALUES = 250_000
"""Values in one piece of data, 100 characters of text counted as one: lists that hold one another twice grow without end."""
MAX_WORDS = 2_000
"""Characters of what an exception says."""

_PIECE = 2**16
"""Characters that are looked at without a break: meanwhile no other thread runs."""

_AS_TEXT = (date, time, timedelta, Decimal, Enum, PurePath, UUID)
"""Types whose values have one text."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Repr(reprlib.Repr):
    """Bounds the repr of whatever holds much, or itself; dicts keep their order."""

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        items = [
            f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(value.items(), self.maxdict)
        ]
        return f"{{{', '.join(items + ['...'] * (len(value) > self.maxdict))}}}"


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = 80


class PlainDataError(ValueError):
    """A value that is no data, in a line that names the place inside it."""


def plain_data(value: object, place: str = "the value", *, max_depth: int = MAX_DEPTH) -> Any:
    """Return a value as plain data that shares nothing with it.

    Tuples, sets (sorted) and whatever has a `tolist()` become lists; numpy's scalars become numbers; dates, paths, enums,
    decimals, UUIDs and keys that are integers become text; NaN and infinities become "NaN", "Infinity" and "-Infinity"; a lone
    surrogate becomes "?".

    Args:
        value: whatever a stranger's code returned.
        place: what the error message calls it.
        max_depth: containers within containers, at most.

    Raises:
        PlainDataError: for anything else, for what nests too deep, and for what raises while it is looked at.
    """
    copier = _Copier(max_depth)
    try:
        return copier.copy(value)
    except _NotPlain as error:
        raise PlainDataError(f"{place}{copier.where()} {error}") from None
    except Exception as error:
        raise PlainDataError(f"{place}{copier.where()} cannot be read: {_line(words_of(error))}") from error


def well_formed(text: str) -> str:
    """Return a str of no subclass, in which each lone surrogate is a `?`."""
    if type(text) is str and text.isascii():
        return text
    if (length := str.__len__(text)) <= _PIECE:
        return str.encode(text, errors="replace").decode()
    return "".join(well_formed(str.__getitem__(text, slice(at, at + _PIECE))) for at in range(0, length, _PIECE))


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of plain data is a number."""
    return isinstance(value, int | float)


def words_of(error: BaseException) -> str:
    """Return the type and the words of an exception, whatever its `__str__` does, fit for a terminal and a file."""
    try:
        words = str(error)
    except BaseException as failure:  # noqa: BLE001 - it says nothing, and that is all there is to say
        words = f"(its __str__ raised {type(failure).__name__})"
    return printable(f"{type(error).__name__}: {words}" if words else type(error).__name__)


def line_of(error: BaseException) -> str:
    """Return the type and the words of an exception as one line, for a message that is one."""
    return " ".join(words_of(error).split())


def printable(text: str) -> str:
    """Return text of bounded length, without what a terminal would carry out and without lone surrogates."""
    kept = text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}... ({len(text):,} characters)"
    return well_formed(_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", kept))


def abbreviated(value: object) -> str:
    """Describe a value in a line by its type and the beginning of its repr, whatever that does."""
    try:
        text = _REPR.repr(value)
    except Exception as error:  # noqa: BLE001 - a value that cannot be shown
        text = f"(its repr raised {type(error).__name__})"
    text = _line(text)
    return printable(f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`; mappings that both have are merged in turn."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


class _NotPlain(Exception):  # noqa: N818 - says what is wrong; the place comes to it
    pass


class _Copier:
    """Copies one value; `path` leads to what it is looking at, also after an exception."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._path: list[str | int | EllipsisType] = []
        self._num_values = 0

    def where(self) -> str:
        """Return the place as subscripts."""
        keys = ["[...]" if key is ... else f"[{abbreviated(key).partition(' ')[2]}]" for key in self._path]
        return "".join(keys if len(keys) <= 8 else [*keys[:4], "...", *keys[-4:]])

    def copy(self, value: Any) -> Any:
        """Return one value of the tree as plain data."""
        self._num_values += 1 + (len(value) // 100 if isinstance(value, str) else 0)
        if self._num_values > MAX_VALUES:
            self._path.clear()
            raise _NotPlain(f"is too large: more than {MAX_VALUES:,} values or {MAX_VALUES * 100:,} characters")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return well_formed(value)
        if isinstance(value, int | float):
            return _number(value)
        if len(self._path) >= self._max_depth:
            raise _NotPlain(f"nests more than {self._max_depth} deep")
        if isinstance(value, list | tuple | range):
            return [self._member(index, item) for index, item in enumerate(value)]
        if isinstance(value, dict | Mapping):
            return self._mapping(value)
        if isinstance(value, set | frozenset):  # in an order that does not depend on how this process hashes text
            return sorted((self._member(..., item) for item in value), key=json.dumps)
        if isinstance(value, Real):
            return _number(value)
        if isinstance(value, _AS_TEXT):
            return well_formed(str(value))
        if callable(getattr(value, "tolist", None)):
            return self._member(..., value.tolist())
        raise _NotPlain(f"is {abbreviated(value)}; give plain data: text, numbers, lists and dicts")

    def _mapping(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, str | Integral):
                raise _NotPlain(f"has the key {abbreviated(key)}; its keys must be strings")
            name = well_formed(key) if isinstance(key, str) else str(int(key))
            if name in copied:
                raise _NotPlain(f"has the key {abbreviated(name)} twice, once as text and once as a number")
            copied[name] = self._member(name, item)
        return copied

    def _member(self, key: str | int | EllipsisType, item: Any) -> Any:
        self._path.append(key)
        copied = self.copy(item)
        self._path.pop()  # not in a `finally`: after an exception it leads to what raised
        return copied


def _number(value: Any) -> int | float | str:
    if isinstance(value, Integral):
        integer = int(value)
        if abs(integer) > sys.float_info.max:
            raise _NotPlain("is an integer beyond what a float can hold (1.8e308); give it as text")
        return integer
    real = float(value)
    return real if math.isfinite(real) else _NOT_FINITE[str(real)]


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)
