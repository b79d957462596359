"""Which fields of the recipe may change when a run is resumed, and keep what was sampled: those that are marked so.

A change of any other is carried out as well, but episodes since the last checkpoint are sampled again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class MayChange:
    """Mark of a field, or of a whole section: `env_timeout_s: Annotated[Seconds, MayChange()] = 60.0`.

    It is what one changes to get over a fault, or to look at a run otherwise: deadlines, bounds, budgets. Nothing but rounding
    comes out otherwise by it, so that episodes recorded since the last checkpoint stay as good as they were.
    """

    when: Callable[[Any], bool] = lambda _: True
    """Told the section, returns whether the mark holds."""
    condition: str = ""
    """The same in words. Empty: it always holds."""


def fixed(section: BaseModel) -> dict[str, Any]:
    """Return the fields without a mark: what decides which weights come out of which episodes."""
    return _without_marked(section, section.model_dump(mode="json"))


def marked(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the names of the fields that may change, those of inner sections with dots."""
    for name, info in section.model_fields.items():
        if mark_of(info):
            yield prefix + name
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from marked(info.annotation, f"{prefix}{name}.")


def _without_marked(section: BaseModel, dumped: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        mark, value = mark_of(info), getattr(section, name)
        if mark is None or not mark.when(section):
            kept[name] = _without_marked(value, dumped[name]) if isinstance(value, BaseModel) else dumped[name]
    return kept


def mark_of(info: FieldInfo) -> MayChange | None:
    """Return the mark of a field. None: it has none."""
    return next((entry for entry in info.metadata if isinstance(entry, MayChange)), None)
