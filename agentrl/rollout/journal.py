"""What happened to the episodes since the last checkpoint, so that a run that is killed loses none of them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TextIO

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from agentrl.errors import ConfigError
from agentrl.rollout.episode import Task
from agentrl.rollout.moment import plain
from agentrl.types import Completion, Message, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A task of the training stream was begun."""

    kind: Literal["begun"] = "begun"
    index: int
    """Its number in the stream."""
    version: int
    """Policy version at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode came to the end of a turn."""

    kind: Literal["played"] = "played"
    task: Task
    turn: Turn
    observation: tuple[Message, ...] | None
    """What the environment said to it."""
    snapshot: str | None = None
    """The environment after it (`LiveEpisode.snapshot`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An episode was interrupted, or has sampled its last action."""

    kind: Literal["held"] = "held"
    task: Task
    observation: tuple[Message, ...] | None
    """What the environment said last."""
    partial: Completion
    """What was sampled so far of the next action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An episode ended."""

    kind: Literal["ended"] = "ended"
    trajectory: Trajectory
    """Without its first `played` turns."""
    played: int
    """Number of its turns that were noted as played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A group was of no use, and gave way to a later one."""

    kind: Literal["dropped"] = "dropped"
    group: str
    counts: dict[str, int]
    """The pool's counts at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """Groups were handed out, to be trained on."""

    kind: Literal["handed_out"] = "handed_out"
    groups: tuple[str, ...]
    counts: dict[str, int]
    """The pool's counts at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """Every group that was begun and not trained on was begun anew, under another recipe."""

    kind: Literal["restarted"] = "restarted"
    version: int
    """Policy version at that time."""


Event = Begun | Played | Held | Ended | Dropped | HandedOut | Restarted
_EVENT: TypeAdapter[Event] = TypeAdapter(
    Annotated[Event, Field(discriminator="kind")], config=ConfigDict(ser_json_inf_nan="constants")
)


class Journal:
    """A folder of numbered files, one event a line. A line is handed to the operating system before the run goes on.

    A checkpoint begins a new file and names it: state of the checkpoint and events from that file on are the whole.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: TextIO | None = None
        self._failure: OSError | None = None
        """Of the first write that the disk did not take."""
        self.number = 0
        """Of the file that is written into."""

    def begin(self, *, at_least: int = 1) -> int:
        """Write into a new file from now on; return its number: the one after the last, or `at_least`."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max([at_least, *(1 + number for number in self._numbers())])
        self.number = number
        self._file = self._path(number).open("x", encoding="utf-8", buffering=1)  # by lines
        return number

    def write(self, event: Event) -> None:
        """Append an event; nothing is written before `begin`.

        Raises:
            OSError: when the disk takes no more, and at every event after that: it would follow half a line, and nobody may
                go on as if it had been noted.
        """
        if self._failure is not None:
            raise self._failure
        if self._file is not None:
            data = _EVENT.dump_python(event, mode="json", exclude_defaults=True, fallback=plain)
            try:
                self._file.write(json.dumps({"kind": event.kind, **data}) + "\n")
            except OSError as error:
                self._failure = error
                self.close()
                raise

    def read(self, since: int) -> Iterator[Event]:
        """Yield the events from file `since` on. What a kill cut short at the end of a file has not happened.

        Raises:
            ConfigError: for a line that is no event.
        """
        numbers = [number for number in self._numbers() if number >= since]
        if since not in numbers:
            return
        for number in numbers:
            *lines, _ = self._path(number).read_bytes().split(b"\n")
            for count, line in enumerate(lines, start=1):
                try:
                    event = _EVENT.validate_python(json.loads(line))
                except ValueError as error:
                    words = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                    raise ConfigError(
                        f"line {count} of {self._path(number)} cannot be read: {words}. If {self._folder} is deleted, what "
                        "was sampled since the last checkpoint is sampled again"
                    ) from error
                yield event

    def drop(self, *, before: int | None = None) -> None:
        """Delete the files before a number; by default all."""
        for number in self._numbers():
            if before is None or number < before:
                self._path(number).unlink()

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            with suppress(OSError):  # of what a full disk has not taken yet
                self._file.close()
            self._file = None

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.jsonl"))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.jsonl"
