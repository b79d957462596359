"""Which tasks a run is evaluated on, and how: noted in the run's folder, so that runs can be compared."""

import hashlib
import os
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentrl.files import read_json, write_whole
from agentrl.report.folder import RunFolder
from agentrl.types import AmountOrZero, Count


class Panel(BaseModel):
    """The evaluation tasks of a run, in their order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: tuple[str | None, ...]
    """A hash of each, as it showed at its beginning. None: every episode of it failed before that."""
    since: AmountOrZero = 0
    """First step that was evaluated on them like this: a run may be resumed with others."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Temperature of sampling."""
    samples: Count
    """Episodes for each task."""

    def agrees(self, other: Self) -> bool:
        """Return whether these are the same tasks, played alike, as far as both know the tasks."""
        pairs = zip(self.tasks, other.tasks, strict=False)
        is_same_length = len(self.tasks) == len(other.tasks)
        return is_same_length and self.played == other.played and all(a == b or None in (a, b) for a, b in pairs)

    def joined(self, other: Self) -> Self:
        """Return the same tasks, with what either knows of them."""
        tasks = tuple(a or b for a, b in zip(self.tasks, other.tasks, strict=True))
        return self.model_copy(update={"tasks": tasks})

    @property
    def played(self) -> dict[str, float]:
        """Settings with which the tasks were played."""
        return {"temperature": self.temperature, "samples": self.samples}

    @property
    def name(self) -> str:
        """A hash of all tasks."""
        return hashlib.sha256(repr(self.tasks).encode()).hexdigest()[:12]


_PANELS = TypeAdapter(dict[str, Panel])


def read_panels(folder: RunFolder) -> dict[str, Panel]:
    """Return the panel of each environment that a run is evaluated in, by the prefix of its metrics; empty if none is noted."""
    if not os.path.lexists(folder.panel):
        return {}
    return read_json(folder.panel, _PANELS, fix="delete it, and nothing is known of the run's evaluation tasks")


def note_panels(folder: RunFolder, found: Mapping[str, Panel]) -> None:
    """Note the panels of an evaluation; where they are others than before, those before are forgotten."""
    known = read_panels(folder)
    noted = dict(known)
    for prefix, panel in found.items():
        before = known.get(prefix)
        noted[prefix] = before.joined(panel) if before is not None and before.agrees(panel) else panel
    if noted != known:
        write_whole(folder.panel, _PANELS.dump_json(noted, indent=1))
