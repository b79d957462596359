"""Record of a run: metrics, rollouts and warnings in its folder, and the times of a step's parts."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from agentrl.credit import Credit, load_credit
from agentrl.distributed.processes import from_rank_zero, is_main
from agentrl.errors import TrainingError
from agentrl.learn.health import COLLAPSE_ADVICE, SIGNS, Sign, collapsed_since, newly_detected, signs
from agentrl.report.folder import RunFolder, Told
from agentrl.report.records import pieces_of, records
from agentrl.report.trackers import Trackers
from agentrl.run.build import Parts
from agentrl.run.checkpoint import CollapsedError, newest_checkpoint
from agentrl.types import TrajectoryGroup


class Stopwatch:
    """Measures the seconds from one lap to the next; started when it is made."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str | None = None) -> None:
        """Record the time since the last lap under a name. None: the time is not recorded."""
        now = time.perf_counter()
        if name is not None:
            self._seconds[name] = now - self._last
        self._last = now

    def metrics(self, groups: Sequence[TrajectoryGroup], *, sampling_s: float, is_async: bool) -> dict[str, float]:
        """Return the times of a step until its last lap, and its throughput.

        Args:
            groups: groups that were sampled in the step. If there are none, throughput is left out.
            sampling_s: time for which the engine was busy.
            is_async: whether the engine samples during the whole step.
        """
        collect_s, step_s = self._seconds["collect_s"], self._last - self._begin
        everyone = [t for group in groups for t in group.trajectories]
        sampled = sum(t.num_action_tokens + t.metrics.get("branch_tokens", 0.0) for t in everyone)
        throughput = {
            "time/sampled_tokens_per_s": sampled / (step_s if is_async else collect_s),
            "time/tokens_per_s": sampled / step_s,
        }
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()} | {
            "time/sampling_s": sampling_s,
            "time/environment_s": max(0.0, collect_s - sampling_s),
            "time/step_s": step_s,
            **(throughput if everyone else {}),
        }


OnProgress = Callable[[Literal["warm-up", "evaluation", "training"], int, int, dict[str, float]], None]
"""Callback that gets the phase, its steps done, its steps in all, and the latest metrics. `evaluation` is the one before the
first step."""


class RunRecord:
    """Metrics, rollouts and warnings of a run: on every rank; rank 0 writes them step by step."""

    def __init__(self, parts: Parts, folder: RunFolder, *, next_step: int, is_changed: bool = False) -> None:
        """Continue the record in a folder.

        Args:
            parts: parts of the run.
            folder: folder of the run.
            next_step: first step that is going to be added.
            is_changed: whether the recipe changes what is played in comparison with the steps before.

        Raises:
            ConfigError: if a tracker does not start.
        """
        self.folder = folder
        self._recipe, self._on_warning = parts.recipe, parts.on_warning
        self._is_fallback = parts.credit != load_credit(parts.recipe.credit)
        self._piece, self._learner = pieces_of(parts.tokenizer), parts.learner
        self._rows = [row for row in folder.metrics() if row["step"] > 0] if is_main() else []
        """Metrics of the finished steps."""
        before = self._rows[-1].get("recipe_changes", 0.0) if self._rows else 0.0
        self._num_changes = before + is_changed
        self.trackers = Trackers(
            parts.recipe.report if is_main() else None,
            folder,
            config=parts.recipe.model_dump(mode="json"),
            next_step=next_step,
            on_failure=self.warn,
        )

    def add_row(self, row: dict[str, float]) -> None:
        """Write the metrics of a step, or of the time before the first."""
        if is_main():
            self.folder.add_metrics(row)
            self.trackers.add_row(row)

    def add_step(
        self, row: dict[str, float], groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]]
    ) -> dict[str, float]:
        """Write the record of a step, and warn if the run does not learn; return its whole row of metrics.

        Args:
            row: metrics of the step.
            groups: groups that were trained on.
            credits: credit of each trajectory of each group.

        Raises:
            TrainingError: if a sign ends the run (`train.stop_on`, `train.on_collapse`): before a checkpoint, so that
                earlier ones stay.
            CollapsedError: if the run is to go back.
        """
        recipe, step = self._recipe, int(row["step"])
        if self._is_fallback:
            row = {**row, "credit/fallback": 1.0}
        if self._num_changes:
            row = {**row, "recipe_changes": self._num_changes}
        every = recipe.report.rollouts_every
        if every and (step == 1 or step % every == 0):
            notes_of = self._learner.diagnostics.gather()
            if is_main():
                trajectories = records(groups, credits, step=step, piece=self._piece, notes_of=notes_of)
                self.folder.add_rollouts(step, trajectories, keep=recipe.report.keep_rollouts)
                self.trackers.add_rollouts(groups, step)
        found, told = from_rank_zero(lambda: self._examine(row))
        row = row | {f"health/{sign}": float(sign in found) for sign in SIGNS}
        self._rows.append(row)
        self.add_row(row)
        if "collapse" in found and recipe.train.on_collapse == "rewind":
            first = from_rank_zero(lambda: collapsed_since(self._rows))
            raise CollapsedError(step, found["collapse"], first=first)
        is_last = step == recipe.train.steps
        ends: dict[Sign, tuple[str, str]] = {
            sign: (f"train.stop_on: {sign}", "--train.stop_on '[]'") for sign in recipe.train.stop_on
        }
        if recipe.train.on_collapse == "stop":
            ends["collapse"] = ("train.on_collapse: stop", "--train.on_collapse warn")
        stopping = [sign for sign in ends if sign in found and not is_last]
        for sign, words in told.items():
            advice = f"; {COLLAPSE_ADVICE}" if sign == "collapse" else ""
            self.warn(
                step, sign, words + advice, is_printed=sign not in stopping
            )  # else the error at the run's end has it
        if stopping:
            cause, option = ends[stopping[0]]
            raise TrainingError(
                f"step {step}, {cause}: {found[stopping[0]]}. The newest checkpoint is "
                f"{newest_checkpoint(self.folder).name}; resume from it nevertheless: agentrl train {self.folder.path} "
                f"{option}"
            )
        return row

    def warn(self, step: int, name: str, words: str, *, is_printed: bool = True) -> None:
        """Write a warning into the folder, and print it."""
        if is_main():
            self.folder.add_warning(Told(step=step, name=name, words=words))
            if is_printed:
                self._on_warning(words)

    def _examine(self, row: dict[str, float]) -> tuple[dict[Sign, str], dict[Sign, str]]:
        """Return a step's signs of a run that does not learn, and those to warn of."""
        found = signs([*self._rows, row])
        return found, newly_detected(found, self._rows)
