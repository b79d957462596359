"""Our names for fields and values of other libraries (TRL, verl, verifiers), for error messages.

The names are in `foreign_names.yaml`.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml


class Tables(NamedTuple):
    """Our names by theirs."""

    fields: dict[str, str]
    """A field, what is to be set, or a sentence (which ends in a full stop)."""
    schemes: dict[str, str]
    """Fields that set an algorithm, by its name."""
    values: dict[str, dict[str, str]]
    """Values by field."""


@cache
def tables() -> Tables:
    """Read the tables."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    values = {field: _by_their_name(known) for field, known in found["values"].items()}
    return Tables(_by_their_name(found["fields"]), _by_their_name(found["schemes"]), values)


def _by_their_name(known: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: ours for ours, names in known.items() for name in names}


_ALGORITHMS = ("credit.scheme", "loss.algorithm")
"""Fields to which people give the name of an algorithm."""


def of_field(name: str, value: object = None) -> str | None:
    """Return what an unknown field is called here, as the end of an error; None: nothing is known of it."""
    key = name.lower().replace("-", "_")
    found = tables().fields.get(key) or tables().schemes.get(key)
    if found is None or found.endswith("."):
        return found and f" {found}"
    known = _value(found, value)
    is_whole = found in _ALGORITHMS
    return _meant(found if known is None else known if is_whole else f"{found}: {known}")


def of_path(path: str, value: object = None) -> str | None:
    """Return what a field is called here that has this name in this section alone, as `of_field`."""
    names = ".".join(path.split(".")[-2:])
    return of_field(names, value) if names in tables().fields else None


def of_value(field: str, value: object) -> str:
    """Return what a field's value is called here, as the end of an error; empty if nothing is known of it."""
    known = _value("loss.algorithm" if field in ("credit", "loss") else field, value)
    return "" if known is None else _meant(known)


def at_home(name: str, fields: Iterable[str]) -> str | None:
    """Return which fields have this very name, as the end of an error; None: none has."""
    found = [field for field in fields if field.removeprefix("--").rpartition(".")[2] == name]
    return _meant(*found) if found else None


def _value(field: str, value: object) -> str | None:
    known = tables().schemes if field in _ALGORITHMS else tables().values.get(field, {})
    return known.get(value.lower()) if isinstance(value, str) else None


def _meant(*known: str) -> str:
    return f" Did you mean {' or '.join(map(repr, known))}?"
