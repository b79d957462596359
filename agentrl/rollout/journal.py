"""Journal of the episodes since the last checkpoint, so that a killed run loses none of them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TextIO

from pydantic import ConfigDict, Field, TypeAdapter

from agentrl.data.files import numbered, parse, read_bytes, sealed, unsealed
from agentrl.errors import ConfigError
from agentrl.rollout.conversation import Partial, Task
from agentrl.types import Message, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A task of the training stream was started."""

    kind: Literal["begun"] = "begun"
    index: int
    """Its number in the stream."""
    version: int
    """Policy version at that time."""
    place: int | None = None
    """Position of its task in the order of the epochs, from the curriculum. None: its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode came to the end of a turn."""

    kind: Literal["played"] = "played"
    task: Task
    turn: Turn
    observation: tuple[Message, ...] | None
    """Messages of the environment after the turn."""
    shared: int = 0
    """Leading tokens of its context that are left out because they repeat earlier ones (`agentrl.types.shorten`)."""
    snapshot: str | None = None
    """Environment after the turn (`LiveEpisode.snapshot`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """An episode was interrupted, or has sampled its last action whole."""

    kind: Literal["held"] = "held"
    task: Task
    observation: tuple[Message, ...] | None
    """Last messages of the environment."""
    partials: tuple[Partial, ...]
    """Tokens sampled so far of the actions under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Fields of a turn that were known only after it: a program may say at its end what its calls earned."""

    reward: float
    next_state_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An episode ended."""

    kind: Literal["ended"] = "ended"
    trajectory: Trajectory
    """Without its first `played` turns."""
    played: int
    """Number of its turns that have events of their own."""
    shared: int = 0
    """Tokens left out of the first turn's context, as in `Played`."""
    late: tuple[Late, ...] = ()
    """Fields of each of the `played` turns. Empty: as their events have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A group was not trainable, and is replaced by a later one."""

    kind: Literal["dropped"] = "dropped"
    group: str
    counts: dict[str, int]
    """The pool's counts at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """Groups were handed out to a step."""

    kind: Literal["handed_out"] = "handed_out"
    groups: tuple[str, ...]
    counts: dict[str, int]
    """The pool's counts at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """Every group that was started and not trained on is restarted under another recipe."""

    settings: str
    """Hash of that recipe, with which all that follows was sampled."""
    kind: Literal["restarted"] = "restarted"


_NAME = "{}.jsonl"

Event = Started | Played | Interrupted | Ended | Dropped | HandedOut | Restarted
_EVENT: TypeAdapter[Event] = TypeAdapter(
    Annotated[Event, Field(discriminator="kind")], config=ConfigDict(ser_json_inf_nan="constants")
)


class Journal:
    """A folder of numbered files with one event per line.

    Lines are flushed to the operating system in order, all lines of one round of the event loop at once: a kill loses at most
    that round's events, and the rest is a state that the run was in. Call `flush` before acting on an event that must not be
    lost.

    Each checkpoint starts a new file and names it: its state and the events from that file on restore the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: TextIO | None = None
        self._lines: list[str] = []
        """Lines that are not written yet."""
        self._flushed_by: asyncio.AbstractEventLoop | None = None
        """Event loop on which a flush is scheduled."""
        self._failure: OSError | None = None
        """Error of the first write that failed."""
        self.number = 0
        """Number of the current file."""

    def begin(self, *, at_least: int = 1) -> int:
        """Start a new file; return its number: one more than the last, or `at_least`."""
        self.flush()
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max([at_least, *(1 + number for number, _ in numbered(self._folder, _NAME))])
        self.number = number
        self._file = (self._folder / _NAME.format(f"{number:06d}")).open("x", encoding="utf-8")
        return number

    def write(self, event: Event) -> None:
        """Append an event; before `begin`, drop it.

        Raises:
            OSError: if an earlier write failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._file is None:
            return
        fields = _EVENT.dump_json(event, exclude_defaults=True).decode()  # without the kind, which is a default
        content = ",".join(filter(None, (f'"kind":"{event.kind}"', fields[1:-1])))
        self._lines.append(sealed(f"{{{content}}}") + "\n")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if self._flushed_by is not loop:
            self._flushed_by = loop
            loop.call_soon(self._flush_soon)

    def flush(self) -> None:
        """Flush all events to the operating system.

        Raises:
            OSError: if a write fails, and at every later event: it would follow half a line.
        """
        if self._failure is not None:
            raise self._failure
        lines, self._lines = self._lines, []
        if lines and self._file is not None:
            try:
                self._file.write("".join(lines))
                self._file.flush()
            except OSError as error:
                self._failure = error
                self.close()
                raise

    def _flush_soon(self) -> None:
        self._flushed_by = None
        with suppress(OSError):  # raised again by the next event or flush
            self.flush()

    def read_events(self, since: int) -> Iterator[Event]:
        """Yield the events from file `since` on, without a line that a kill cut short.

        Raises:
            ConfigError: for a line that is no event.
        """
        for _, event in self._read(since):
            yield event

    def settings(self, since: int) -> str:
        """Return the hash of the recipe of all events from file `since` on. Empty: the recipe has not changed."""
        first = next(self.read_events(since), None)
        return first.settings if isinstance(first, Restarted) else ""

    def replay(self, since: int, apply: Callable[[Event], object]) -> None:
        """Apply the events from file `since` on.

        Raises:
            ConfigError: for a line that is no event, or that cannot follow the events before it.
        """
        for where, event in self._read(since):
            try:
                apply(event)
            except (LookupError, ValueError) as error:
                raise ConfigError(
                    f"{where}: it does not follow on what was noted before ({error}); {self._fix}"
                ) from error

    def _read(self, since: int) -> Iterator[tuple[str, Event]]:
        """Yield file and line with each event."""
        paths = {number: path for number, path in numbered(self._folder, _NAME) if number >= since}
        for path in paths.values() if since in paths else ():
            for count, line in enumerate(read_bytes(path, fix=self._fix).split(b"\n")[:-1], start=1):
                where = f"{path}, line {count}"
                content = unsealed(line, where=where, fix=self._fix)
                yield where, parse(content, _EVENT, where=where, fix=self._fix)

    @property
    def _fix(self) -> str:
        return f"if {self._folder} is deleted, what was sampled since the last checkpoint is sampled again"

    def has(self, number: int) -> bool:
        """Return whether there is a file with that number."""
        return any(found == number for found, _ in numbered(self._folder, _NAME))

    def drop(self, *, before: int | None = None) -> None:
        """Delete the files with numbers below `before`; by default all."""
        for number, path in numbered(self._folder, _NAME):
            if before is None or number < before:
                path.unlink()

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            with suppress(OSError):
                self.flush()
        if self._file is not None:
            with suppress(OSError):  # a full disk
                self._file.close()
            self._file = None
