"""A run's folder: config.yaml, metrics.jsonl, warnings.jsonl, rollouts/, faults/, checkpoints/, journal/, and so on."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any

from filelock import FileLock, Timeout
from psutil import pid_exists
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from agentrl.data.files import (
    check_folder,
    check_links,
    check_name,
    dump_yaml,
    numbered,
    parse,
    parse_yaml,
    read_bytes,
    read_json,
    typed,
    write_whole,
)
from agentrl.errors import ConfigError
from agentrl.report.records import TrajectoryRecord
from agentrl.types import MAX_NUMBER, AmountOrZero, Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A warning of a step."""

    step: int
    name: str
    """The metric `health/NAME` says how long it held."""
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Marker of a process that trains a run: in its folder until the process ends it."""

    pid: int
    host: str
    since: str
    """Local time of its start."""

    @classmethod
    def now(cls) -> "Training":
        """Return the marker of this process."""
        return cls(pid=os.getpid(), host=gethostname(), since=datetime.now().isoformat(sep=" ", timespec="seconds"))

    @property
    def may_live(self) -> bool:
        """Whether the process may still run: it is on another machine, or there is one of its number."""
        return self.host != gethostname() or pid_exists(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationNote:
    """Note beside the rollouts of an evaluation."""

    step: int
    """Step of the weights that played."""
    settings: dict[str, Any]
    """Fields of the recipe that decided the outcome, by name."""


_WARNING = TypeAdapter(Told)
_NOTE = TypeAdapter(EvaluationNote)
_TRAINING = TypeAdapter(Training)
_ROLLOUTS, _EVALUATION = "step-{}.jsonl", "evaluation-{}.jsonl"
_BEGUN = "config.begun.yaml"
_FIX = "mend that line, or delete it"
_TAIL = 1 << 18
"""Bytes at the end of metrics.jsonl that hold its last line."""
_CONFIG: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, JsonValue])
_ROW: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, float], config=ConfigDict(strict=True))


class ReportConfig(BaseModel):
    """Files that are written while a run trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollouts_every: AmountOrZero = 10
    """Steps between recorded rollout files (the first step always has one); 0: none."""
    keep_rollouts: Count = 100
    """Rollout files that are kept beside the first step's: the newest ones; older ones are deleted."""
    trackers: tuple[str, ...] = ()
    """Trackers that get metrics, the recipe and tables of rollouts, by name: trackio, tensorboard, wandb, mlflow. Others of
    accelerate get metrics and the recipe."""
    project: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "agentrl"
    """Project (MLflow: experiment) of the run in trackers; the run's name is that of its folder."""


class RunFolder:
    """The files of one run. Every file but metrics.jsonl appears whole; that one grows by whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.reference = path / "reference"
        self.journal = path / "journal"
        """Events of episodes since the newest checkpoint; the pool's."""
        self.faults = path / "faults"
        """A folder for each kind of fault of the environment, with a file for each episode of it that was kept."""
        self.evaluations = path / "evaluations"
        """Rollouts of `agentrl eval`, a file for each time, with a note beside it."""
        self.tasks = path / "tasks.json"
        """Hashes of the tasks with which the run began, if its environment gives some."""
        self.panel = path / "panel.json"
        """Hashes of the evaluation tasks."""
        self.sources = path / "sources.json"
        """Hashes of the files of code that its recipe named as it began."""
        self.going_back = path / "going_back.json"
        """There while the run goes back to before a collapse (`train.on_collapse: rewind`)."""
        self.trackers = path / "trackers.json"
        """By what each tracker finds the run again."""
        self._training = path / "training.json"
        self._metrics = path / "metrics.jsonl"
        self._warnings = path / "warnings.jsonl"
        self._rollouts = path / "rollouts"

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunFolder":
        """Begin a run.

        Raises:
            ConfigError: when the folder already holds something, or is none.
        """
        cls.check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder.write_config(config)
        return folder

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise ConfigError if a run cannot begin in this folder."""
        check_name(path, field="run_dir: ")
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run_dir: {path} is a file; name a folder")
        if path.exists() and any(not file.name.endswith(".partial") for file in path.iterdir()):
            raise ConfigError(f"run_dir: {path} is not empty; choose another, or resume that run: agentrl train {path}")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of a run, to continue or to read it.

        Raises:
            ConfigError: when the folder is not one of a run, or an entry of it is a symbolic link out of it.
        """
        check_name(path)
        check_links(
            path, what="the run's folder", left_out="wandb"
        )  # which links to its own logs, and is not read here
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is not the folder of a run: it has no config.yaml")
        return cls(path)

    def lock(self, *, timeout_s: float = 0.0) -> AbstractContextManager[object]:
        """Keep other processes from training in this folder until what is returned is left, or this process ends.

        Args:
            timeout_s: seconds to wait until no other one does.

        Raises:
            ConfigError: when another one does.
        """
        try:
            return FileLock(self.path / ".lock").acquire(timeout=timeout_s)
        except Timeout as error:
            raise ConfigError(
                f"{self.path}: another process is training this run; end it, or wait for its end"
            ) from error

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Mark the run as being trained by this process, until it ends with an error or without one."""
        write_whole(self._training, _TRAINING.dump_json(Training.now()))
        try:
            yield
        finally:
            self._training.unlink(missing_ok=True)

    def death(self, *, is_locked: bool = False) -> str | None:
        """Return a warning if the last process that trained this run ended without one: it was killed, or ended itself.

        Args:
            is_locked: whether the run is locked, so that no other process trains it. Without, one that may still run does.

        Raises:
            ConfigError: if the marker is damaged.
        """
        if not os.path.lexists(self._training):
            return None
        last = read_json(self._training, _TRAINING, fix="delete it, and nothing is known of the last process")
        if last.may_live and not is_locked:
            return None
        return (
            f"process {last.pid}, which trained {self.path} since {last.since}, ended without a word: it was killed (perhaps "
            "for its memory), or an environment or a library ended it (os._exit)"
        )

    @property
    def config_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "config.yaml"

    @property
    def begun_config_file(self) -> Path:
        """The recipe that it began with, where the run itself has changed it since (`train.on_collapse: rewind`)."""
        begun = self.path / _BEGUN
        return begun if begun.is_file() else self.config_file

    def keep_begun_config(self) -> None:
        """Keep the recipe as it is beside the one with which the run continues."""
        if self.begun_config_file == self.config_file:
            write_whole(self.path / _BEGUN, self.config_file.read_bytes())

    def config(self, *, begun: bool = False) -> dict[str, Any]:
        """Read the resolved recipe; `begun`: that with which it began.

        Raises:
            ConfigError: if it is not what `write_config` writes: a mapping, with text as keys throughout.
        """
        path = self.begun_config_file if begun else self.config_file
        fix = "put it back, or begin a new run"
        found = parse_yaml(read_bytes(path, fix=fix), where=str(path))
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: expected a recipe, with a section for each part of a run; {fix}")
        return typed(found, _CONFIG, where=str(path), fix=fix)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved recipe; resuming with other settings replaces it."""
        write_whole(self.config_file, dump_yaml(dict(config)))

    def add_metrics(self, row: Mapping[str, float]) -> None:
        """Append one row; it is in the file when this returns.

        A metric beyond `MAX_NUMBER`, such as a ratio that has overflowed, is left out: nobody could compute with it.
        """
        with self._metrics.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(_numbers(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())  # before the checkpoint that counts on it

    def metrics(self) -> list[dict[str, float]]:
        """Return the rows so far; a last line that a kill cut short is left out.

        Raises:
            ConfigError: for any other line that is no row of numbers with a step.
        """
        return [row for row, _ in self._rows()]

    def last_written(self) -> float | None:
        """Return when the last row was written, in seconds since 1970; None if there is none yet."""
        try:
            return self._metrics.stat().st_mtime
        except OSError:
            return None

    def last_step(self) -> int:
        """Return the step of the last row, for which the end of the file alone is read; 0 if there is none yet.

        Raises:
            ConfigError: as `metrics`, of that row.
        """
        if not self._metrics.is_file():
            return 0
        with self._metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
        return int(parse(lines[-1], _ROW, where=str(self._metrics), fix=_FIX).get("step", 0)) if lines else 0

    def _rows(self) -> Iterator[tuple[dict[str, float], bytes]]:
        """Yield each row with its line, without numbers beyond `MAX_NUMBER`."""
        for where, line in _lines(self._metrics):
            found = parse(line, _ROW, where=where, fix=_FIX)
            row = _numbers(found)
            if "step" not in row:
                raise ConfigError(f"{where}: it has no step; {_FIX}")
            yield row, line

    def add_rollouts(self, step: int, trajectories: Iterable[TrajectoryRecord], *, keep: int | None = None) -> None:
        """Write the rollouts of a step; of all, keep the first step's and the `keep` newest. None: all."""
        self._rollouts.mkdir(exist_ok=True)
        lines = (record.model_dump_json(exclude_defaults=True).encode() + b"\n" for record in trajectories)
        write_whole(self._rollouts / _ROLLOUTS.format(f"{step:06d}"), lines)
        for path in [] if keep is None else self.rollouts()[1:-keep]:
            path.unlink()

    def rollouts(self) -> list[Path]:
        """List the rollout files, oldest first."""
        return [path for _, path in numbered(self._rollouts, _ROLLOUTS)]

    def add_evaluation(self, trajectories: Iterable[TrajectoryRecord], note: EvaluationNote) -> Path:
        """Write the rollouts of an evaluation beside those of earlier ones; return the file."""
        self.evaluations.mkdir(exist_ok=True)
        path = self._new_evaluation()
        try:
            write_whole(_note_of(path), _NOTE.dump_json(note))
            write_whole(
                path, (record.model_dump_json(exclude_defaults=True).encode() + b"\n" for record in trajectories)
            )
        except OSError:
            _note_of(path).unlink()
            raise
        return path

    def _new_evaluation(self) -> Path:
        """Return a file that no other process takes for an evaluation of its own: its note is there, and empty."""
        first = max((number for number, _ in numbered(self.evaluations, _EVALUATION)), default=0) + 1
        for number in count(first):
            path = self.evaluations / _EVALUATION.format(f"{number:06d}")
            with suppress(FileExistsError):
                _note_of(path).touch(exist_ok=False)
                break
        return path

    def played_evaluations(self) -> list[tuple[Path, EvaluationNote | None]]:
        """List the files that `add_evaluation` wrote, oldest first, with their notes. None: the note was deleted.

        Raises:
            ConfigError: for a note that is damaged.
        """
        paths = [path for _, path in numbered(self.evaluations, _EVALUATION)]
        return [(path, _read_note(_note_of(path))) for path in paths]

    def fault_kinds(self) -> list[Path]:
        """List the folders of `faults`, in the order of their names."""
        return sorted(self.faults.iterdir()) if self.faults.is_dir() else []

    def kept_faults(self) -> list[Path]:
        """List the episodes whose environment failed, kind after kind."""
        return [path for kind in self.fault_kinds() for path in sorted(kind.glob("*.jsonl"))]

    def add_warning(self, warning: Told) -> None:
        """Append a warning to the folder's list."""
        with self._warnings.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(asdict(warning)) + "\n")

    def warnings(self) -> list[Told]:
        """Return the warnings so far; a last line that a kill cut short is left out.

        Raises:
            ConfigError: for any other line that is no warning.
        """
        return [parse(line, _WARNING, where=where, fix=_FIX) for where, line in _lines(self._warnings)]

    def check(self) -> None:
        """Read what resuming goes by, before it writes anything.

        Raises:
            ConfigError: if something of it is damaged.
        """
        for each in (self._rollouts, self.evaluations, self.faults, self.checkpoints, self.journal):
            check_folder(each)
        self.metrics()
        self.warnings()
        self.played_evaluations()
        for path in self.rollouts():
            if not path.is_file():
                raise ConfigError(f"{path} is no file; delete it")

    def rewind(self, step: int) -> None:
        """Drop what was written after `step`: it is going to be done again. -1 drops everything."""
        write_whole(self._metrics, [line + b"\n" for row, line in self._rows() if row["step"] <= step])
        for number, path in numbered(self._rollouts, _ROLLOUTS):
            if number > step:
                path.unlink()
        for path, note in self.played_evaluations():
            if note is not None and note.step > step:
                path.unlink()
                _note_of(path).unlink()
        if self._warnings.is_file():
            kept = [warning for warning in self.warnings() if warning.step <= step]
            write_whole(self._warnings, "".join(json.dumps(asdict(warning)) + "\n" for warning in kept))
        for partial in self.checkpoints.glob(".*.partial"):
            shutil.rmtree(partial)


def _numbers(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if abs(value) <= MAX_NUMBER}


def _note_of(evaluation: Path) -> Path:
    return evaluation.with_suffix(".json")


def _read_note(path: Path) -> EvaluationNote | None:
    if not os.path.lexists(path):
        return None
    return read_json(path, _NOTE, fix="delete it, and no card has that evaluation")


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield file and line number with each whole line of a file that grows by lines; there need be none."""
    *lines, last = (read_bytes(path, fix=_FIX) if os.path.lexists(path) else b"").split(b"\n")
    if last.endswith(b"}"):  # whole but for its end, or saved by an editor
        lines.append(last)
    for number, line in enumerate(lines, start=1):
        yield f"{path}, line {number}", line
