"""Other values of a pydantic field, told from its type, to see whether the field does anything."""

import enum
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin


def is_closed(annotation: Any) -> bool:
    """Tell whether a type has few values: bool, Literal, Enum, and what is composed of them."""
    annotation = _plain(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return all(is_closed(part) for part in get_args(annotation))
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    return annotation in (bool, types.NoneType) or get_origin(annotation) is Literal or is_enum


def other_values(annotation: Any, given: Any) -> Iterator[Any]:
    """Yield values of a type that are not the given one; nothing for types that tell none."""
    annotation = _plain(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from other_values(part, given)
        return
    found: list[Any] = []
    if get_origin(annotation) is Literal:
        found = list(get_args(annotation))
    elif annotation is bool:
        found = [False, True]
    elif annotation is types.NoneType:
        found = [None]
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        found = list(annotation)
    elif annotation in (int, float):
        start = given if isinstance(given, annotation) else annotation()
        steps = (start / 2, 2 * start, start + 0.25, start - 0.25) if annotation is float else (start + 1, start - 1)
        found = [*steps, *map(annotation, (0, 1, 2, 10))]
    yield from (value for value in found if value != given)


def _plain(annotation: Any) -> Any:
    """Return a type without what is said of it: the bounds of a number, which the field checks."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
