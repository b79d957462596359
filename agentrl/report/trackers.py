"""Trackers by name, those of accelerate: metrics, the recipe and tables of rollouts. None of them can end a run.

Another tracker's tables are one more class here, of a few lines.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType
from pydantic import TypeAdapter

from agentrl.data.files import read_json, write_whole
from agentrl.data.plain import line_of, printable
from agentrl.errors import ConfigError
from agentrl.recipe.registry import suggest
from agentrl.report.folder import ReportConfig, RunFolder
from agentrl.report.public import flat, public
from agentrl.report.records import calls_of
from agentrl.types import Message, Trajectory, TrajectoryGroup

COLUMNS = ("step", "task", "reward", "ended by", "dialogue")
"""Columns of a table of rollouts."""
Rows = Sequence[tuple[int, str, float, str, str]]
"""A table of rollouts."""
_NUM_GROUPS, _OF_EACH = 4, 2
"""Groups in a table, and rollouts of each."""
_MAX_CHARACTERS = 20_000
"""Length of a dialogue."""
_KNOWN = TypeAdapter(dict[str, str | tuple[str, int]])
"""By a tracker's name, by what it finds the run again; with the last step that it got, where it lacks some."""
_PACKAGES = {"comet_ml": "comet-ml"}
"""Package to install, if that is not the name."""


def check_trackers(names: Iterable[str]) -> None:
    """Look whether each can be had.

    Raises:
        ConfigError: for one that is not installed, or that accelerate does not know.
    """
    missing = set(map(str, LoggerType)) - set(map(str, get_available_trackers()))
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
            raise ConfigError(
                f"report.trackers: {name!r} is no tracker; accelerate has {', '.join(known)}.{suggest(name, known)}"
            )
        if name in missing:
            raise ConfigError(f"report.trackers: {name!r} is not installed: pip install {_PACKAGES.get(name, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Facts about a run that a tracker gets when it starts."""

    project: str
    folder: Path
    """Its name is the run's name."""
    key: str | None
    """By which the tracker finds the run again. None: it begins."""
    next_step: int
    """The step that is about to come."""
    config: dict[str, Any]
    """Fields of the recipe by their whole names."""


class Tracker:
    """A tracker of which only what all of accelerate's have is used: no tables, and another run where one is resumed."""

    def __init__(self, name: str, run: TrackedRun, /, **options: Any) -> None:
        """Begin or resume a run in the tracker; `options` are those of accelerate's class."""
        self.name, self._run = name, run
        self.key = run.key or run.folder.name
        kind = LOGGER_TYPE_TO_CLASS[name]
        place = [run.folder] if kind.requires_logging_directory else []
        self._client = kind(run.project, *place, **options)
        self._client.start()

    def add_config(self) -> None:
        """Send the recipe."""
        self._client.store_init_configuration(self._run.config)

    def add_row(self, row: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._client.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def add_table(self, step: int, rows: Rows) -> None:
        """Send a few rollouts."""

    def finish(self) -> None:
        """Send what has not been sent."""
        self._client.finish()


class _TensorBoard(Tracker):
    """In the folder `tensorboard` of the run; steps that are done again replace those that were lost."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        purged = {} if run.key is None else {"purge_step": run.next_step}
        super().__init__(name, replace(run, project="tensorboard"), **purged)

    def add_config(self) -> None:
        from torch.utils.tensorboard.summary import hparams

        # What accelerate does instead shows as a second run beside this one.
        for summary in hparams(self._run.config, {"reward/mean": 0.0}):
            self._client.tracker.file_writer.add_summary(summary)

    def add_table(self, step: int, rows: Rows) -> None:
        text = "\n\n".join(_as_markdown(*row[1:]) for row in rows)
        self._client.tracker.add_text("rollouts", text, global_step=step)


class _WandB(Tracker):
    """Its own files are in the folder `wandb` of the run.

    It drops rows below its own count of steps, which only rises: a run that goes back would lose them. So the step is a
    metric, and the axis of the others.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        run = replace(run, key=run.key or uuid4().hex[:12])
        super().__init__(name, run, name=run.folder.name, id=run.key, resume="allow", dir=str(run.folder))
        self._client.tracker.define_metric("step")
        self._client.tracker.define_metric("*", step_metric="step")

    def add_row(self, row: Mapping[str, float]) -> None:
        self._client.log(dict(row))

    def add_table(self, step: int, rows: Rows) -> None:
        import wandb

        self._client.log({"rollouts": wandb.Table(columns=list(COLUMNS), data=list(map(list, rows))), "step": step})


class _Trackio(Tracker):
    """It finds runs by their names, which is why they end in what makes them unique."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        run = replace(run, key=run.key or f"{run.folder.name}-{uuid4().hex[:6]}")
        super().__init__(name, run, name=run.key, resume="allow", embed=False, config=run.config)

    def add_config(self) -> None:
        """It was sent at the start: accelerate's way does not reach trackio's database."""

    def add_table(self, step: int, rows: Rows) -> None:
        import trackio

        self._client.log({"rollouts": trackio.Table(columns=list(COLUMNS), data=list(map(list, rows)))}, step=step)


class _MLflow(Tracker):
    """Tracker at `MLFLOW_TRACKING_URI`; names of metrics are made such that it takes them."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        import pandas  # noqa: F401, ICN001 - its tables need it, which mlflow-skinny does not bring; better reported now

        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3"
        )  # with its 7, training waits 4 minutes for a dead server
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it draws one at each table
        super().__init__(name, run, run_name=run.folder.name, run_id=run.key)
        self.key = self._client.tracker.info.run_id

    def add_row(self, row: Mapping[str, float]) -> None:
        super().add_row({re.sub(r"[^\w\-. /]", "_", name): value for name, value in row.items()})

    def add_table(self, step: int, rows: Rows) -> None:  # noqa: ARG002 - a column of the table
        import mlflow

        columns = {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
        mlflow.log_table(columns, "rollouts.json", run_id=self.key)


_KINDS = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio, "mlflow": _MLflow}


class Trackers:
    """All trackers of a run, on the rank that writes its folder. One that fails is reported once and then left out."""

    def __init__(
        self,
        report: ReportConfig | None,
        folder: RunFolder,
        *,
        config: Mapping[str, Any],
        next_step: int,
        on_failure: Callable[[int, str, str], object],
    ) -> None:
        """Begin or resume the run in each.

        Args:
            report: names them. None: this process sends nothing.
            folder: of the run; it keeps by what each finds the run again.
            config: the recipe, which is sent where a tracker's run begins.
            next_step: the step that is about to come; what a tracker lacks of those before it is sent first.
            on_failure: gets the step, a warning's name and its words.

        Raises:
            ConfigError: if a tracker's run cannot begin. One that cannot be resumed is left out.
        """
        self._on_failure = on_failure
        self._step = next_step
        self._sent = next_step - 1
        self._live: list[Tracker] = []
        self._file = folder.trackers
        self._known: dict[str, str | tuple[str, int]] = {}
        if report is None:
            return
        if self._file.is_file():
            found = read_json(self._file, _KNOWN, fix="delete it")
            # A run that has gone back since does again what a tracker got before it fell behind.
            self._known = {
                name: (known[0], min(known[1], next_step - 1)) if isinstance(known, tuple) else known
                for name, known in found.items()
            }
            if self._known != found:
                self._write()
        for name in self._known.keys() - set(report.trackers):
            self._note_behind(name)
        for name in dict.fromkeys(report.trackers):
            known = self._known.get(name)
            key, sent = known if isinstance(known, tuple) else (known, -1 if known is None else next_step - 1)
            run = TrackedRun(
                project=report.project,
                folder=folder.path.resolve(),
                key=key,
                next_step=sent + 1,
                config=_config(config),
            )
            try:
                tracker = _KINDS.get(name, Tracker)(name, run)
                if known is None:
                    tracker.add_config()
                for row in folder.metrics():
                    if sent < row["step"] < next_step:
                        tracker.add_row(row)
            except Exception as error:
                if known is None:
                    self.finish()
                    raise ConfigError(_not_begun(name, error, folder.path)) from error
                self._fail(name, error)
            else:
                self._live.append(tracker)
                if known != tracker.key:
                    self._known[name] = tracker.key
                    self._write()

    def add_row(self, row: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._step = int(row["step"])
        self._each(lambda tracker: tracker.add_row(row))
        self._sent = self._step

    def add_rollouts(self, groups: Sequence[TrajectoryGroup], step: int) -> None:
        """Send a few rollouts of a step as a table, to those that have tables."""
        if self._live:
            trajectories = [t for group in groups[:_NUM_GROUPS] for t in group.trajectories[:_OF_EACH]]
            rows = [(step, t.group_id, t.reward, t.stop_reason.value, dialogue(t)) for t in trajectories]
            self._each(lambda tracker: tracker.add_table(step, rows))

    def finish(self) -> None:
        """Send what has not been sent."""
        self._each(Tracker.finish)

    def _each(self, send: Callable[[Tracker], object]) -> None:
        for tracker in list(self._live):
            try:
                send(tracker)
            except Exception as error:  # noqa: BLE001 - a stranger's client, its network and its server
                self._live.remove(tracker)
                self._fail(tracker.name, error)

    def _fail(self, name: str, error: Exception) -> None:
        words = f"report.trackers: {name} fails, and the run continues without it until it is resumed: {line_of(error)}"
        self._on_failure(self._step, f"tracker_{name}", words)
        self._note_behind(name)

    def _note_behind(self, name: str) -> None:
        """Note up to which step a tracker has got the rows: the others are sent when it is back."""
        if isinstance(key := self._known.get(name), str):
            self._known[name] = key, self._sent
            self._write()

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self._known))


def dialogue(trajectory: Trajectory) -> str:
    """Return what was said in an episode as text, a message after the other."""
    messages = [message for turn in trajectory.turns for message in (*turn.observation, turn.message)]
    text = "\n\n".join(map(_said, messages))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."


def _said(message: Message) -> str:
    words = filter(None, [str(message.get("content") or ""), *calls_of(message)])
    return f"{message.get('role')}: {printable(' '.join(words))}"


def _as_markdown(task: str, reward: float, ended_by: str, text: str) -> str:
    """Return a rollout for a page that shows Markdown; four spaces before a line let it show as it is."""
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    return f"**{task}, reward {reward:g}, {ended_by}**\n\n{lines}"


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe as all trackers take it."""
    fields = flat(public(config))
    return {name: value if isinstance(value, str | int | float) else json.dumps(value) for name, value in fields}


def _not_begun(name: str, error: Exception, folder: Path) -> str:
    again = f"agentrl train {folder}"
    return (
        f"report.trackers: {name} does not start: {line_of(error).rstrip('.')}. Mend that and run {again}, or leave it out: "
        f"{again} --report.trackers '[]'"
    )
