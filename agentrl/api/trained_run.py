"""A run, as Python sees it: everything is read from its folder, so that it is the same for one of yesterday."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.api.target import load
from agentrl.config import Recipe
from agentrl.errors import ConfigError, UserError
from agentrl.report.folder import RunFolder
from agentrl.report.records import groups_of, read_records
from agentrl.types import TrajectoryGroup

if TYPE_CHECKING:
    from agentrl.rollout.evaluation import Evaluation

_CURVES = ("reward/mean", "episode/success", "eval/success", "entropy", "clip/tokens")
"""What `plot` shows, where the run has it."""


class TrainedRun:
    """A run's folder: `agentrl.train` returns one, and `agentrl.TrainedRun(path)` opens any.

    Raises:
        ConfigError: where the folder is none of a run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = RunFolder.open(self.path)

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.path)!r})"

    @property
    def recipe(self) -> Recipe:
        """What was trained, every field."""
        return load(self.path)[0]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each finished step, oldest first; step 0 is what came before the first update."""
        return self._folder.metrics()

    def to_pandas(self) -> Any:
        """Return the metrics as a pandas data frame, a row for each step.

        Raises:
            UserError: where pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise UserError("to_pandas() needs pandas: pip install pandas") from error
        return pd.DataFrame(self.metrics).set_index("step")

    def trajectories(self, step: int | None = None) -> list[TrajectoryGroup]:
        """Return the recorded rollouts of a step, group by group (`report.rollouts_every` says which steps have some).

        Args:
            step: of the run; None: the newest that has rollouts.

        Raises:
            ConfigError: where there are none.
        """
        files = {int(path.stem.removeprefix("step-")): path for path in self._folder.rollouts()}
        if step is None and files:
            step = max(files)
        if step not in files:
            recorded = ", ".join(map(str, files)) or "no step"
            raise ConfigError(f"{self.path}: step {step} has no rollouts; recorded (report.rollouts_every): {recorded}")
        return groups_of(read_records(files[step]))

    def evaluate(self, *, overrides: Sequence[str] = (), **sections: Any) -> "Evaluation":
        """Play the evaluation tasks with the newest weights; see `agentrl.evaluate`."""
        from agentrl.api.evaluation import evaluate

        return evaluate(self.path, overrides=overrides, **sections)

    def export(self, folder: str | Path) -> Path:
        """Write the newest weights as a Hugging Face folder, adapters merged; return it.

        Raises:
            ConfigError: where the run has no checkpoint, or the folder is not free.
        """
        from agentrl.run.export import export

        export(self.recipe, self._folder, Path(folder))
        return Path(folder)

    def report(self, file: str | Path | None = None) -> Path:
        """Write curves and rollouts as one page of HTML, which opens offline; return its path, `RUN/report.html` by default."""
        from agentrl.report.html import write_report

        return write_report([self.path], self.path / "report.html" if file is None else Path(file))

    def plot(self, *names: str) -> Any:
        """Draw metrics over the steps; return the matplotlib figure, which a notebook shows.

        Args:
            *names: of metrics; none: reward, success, entropy and the clipped share.

        Raises:
            UserError: where matplotlib is not installed, or the run has no such metric.
        """
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise UserError("plot() needs matplotlib: pip install matplotlib") from error
        rows = self.metrics
        known = dict.fromkeys(name for row in rows for name in row)
        shown = list(names) or [name for name in _CURVES if name in known]
        if unknown := [name for name in shown if name not in known]:
            raise ConfigError(f"plot: {self.path} has no metric {unknown[0]!r}; it has {', '.join(sorted(known))}")
        figure = plt.figure(figsize=(3.2 * max(len(shown), 1), 2.6), layout="constrained")
        for place, name in enumerate(shown, start=1):
            points = [(row["step"], row[name]) for row in rows if name in row]
            axes = figure.add_subplot(1, len(shown), place, title=name, xlabel="step")
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 12 else None)
        plt.close(figure)  # a notebook shows what a cell returns, and would show an open one once more
        return figure
