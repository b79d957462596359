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
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Of sampling. None: an earlier version did not note it."""
    samples: Count | None = None
    """Episodes for each task. None: as above."""

    def agrees(self, other: Self) -> bool:
        """Tell whether these are the same tasks, played alike, as far as both are known."""
        pairs: list[tuple[object, object]] = [
            (self.temperature, other.temperature),
            (self.samples, other.samples),
            *zip(self.tasks, other.tasks, strict=False),
        ]
        return len(self.tasks) == len(other.tasks) and all(a == b or None in (a, b) for a, b in pairs)

    def joined(self, other: Self) -> Self:
        """Return the same tasks, with what either knows of them."""
        tasks = tuple(a or b for a, b in zip(self.tasks, other.tasks, strict=True))
        return self.model_copy(update={"tasks": tasks, **other.played})

    @property
    def played(self) -> dict[str, float]:
        """How the tasks were played, as far as it is known."""
        return self.model_dump(include={"temperature", "samples"}, exclude_none=True)

    @property
    def name(self) -> str:
        """A hash of all tasks."""
        return hashlib.sha256(repr(self.tasks).encode()).hexdigest()[:12]


_PANELS = TypeAdapter(dict[str, Panel])


def read_panels(folder: RunFolder) -> dict[str, Panel]:
    """Return the panel of each environment that a run is evaluated in, by the prefix of its metrics; none of an earlier run."""
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
