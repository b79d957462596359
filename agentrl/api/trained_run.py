"""A run, as Python sees it: everything is read from its folder, so that it is the same for one of yesterday."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.api.target import load, look_for_modules_here
from agentrl.errors import ConfigError, UserError
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.records import groups_of, read_records
from agentrl.report.statistics import draw, shown
from agentrl.types import TrajectoryGroup

if TYPE_CHECKING:
    from agentrl.rollout.evaluation import Evaluation


class TrainedRun:
    """A run's folder: `agentrl.train` returns one, and `agentrl.TrainedRun(path)` opens any.

    Raises:
        ConfigError: if the folder is none of a run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        look_for_modules_here(self.path)
        self._folder = RunFolder.open(self.path)

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return its folder and the main metrics, first and last, as a notebook shows them."""
        rows = self.metrics
        lines = ""
        for name in shown(rows):
            values = [row[name] for row in rows if name in row]
            lines += f"<tr><td>{escape(name)}</td><td>{values[0]:.3g}</td><td>{values[-1]:.3g}</td></tr>"
        head = f"<tr><th>{max(len(rows) - 1, 0)} steps</th><th>first</th><th>last</th></tr>"
        return f"<code>{escape(str(self.path))}</code><table>{head}{lines}</table>"

    @property
    def recipe(self) -> Recipe:
        """Return the recipe that was trained, every field."""
        return load(self.path)[0]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each finished step, oldest first; step 0 is what came before the first update."""
        return self._folder.metrics()

    def to_pandas(self) -> Any:
        """Return the metrics as a pandas data frame, a row for each step.

        Raises:
            UserError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise UserError("to_pandas() needs pandas: pip install pandas") from error
        return pd.DataFrame(self.metrics or {"step": []}).set_index("step")

    def trajectories(self, step: int | None = None) -> list[TrajectoryGroup]:
        """Return the recorded rollouts of a step, group by group (`report.rollouts_every` says which steps have some).

        Args:
            step: of the run; None: the newest that has rollouts.

        Raises:
            ConfigError: if there are none.
        """
        files = {int(path.stem.removeprefix("step-")): path for path in self._folder.rollouts()}
        if step is None and files:
            step = max(files)
        if step not in files:
            recorded = ", ".join(map(str, files)) or "no step"
            raise ConfigError(f"{self.path}: step {step} has no rollouts; recorded (report.rollouts_every): {recorded}")
        return groups_of(read_records(files[step]))

    def __fspath__(self) -> str:
        """Return its folder, so that it stands wherever one is asked for."""
        return str(self.path)

    def evaluate(self, *, overrides: Sequence[str] = (), **sections: Any) -> "Evaluation":
        """Play the evaluation tasks with the newest weights; see `agentrl.evaluate`."""
        from agentrl.api.evaluation import evaluate

        return evaluate(self.path, overrides=overrides, **sections)

    def export(
        self, folder: str | Path, *, step: int | None = None, push: str | None = None, private: bool = False
    ) -> Path:
        """Write weights as a Hugging Face folder with a model card, adapters merged; return it.

        Args:
            folder: to make.
            step: of the checkpoint; None: the newest.
            push: upload it to the Hugging Face Hub as well: `OWNER/NAME`.
            private: with `push`, if others do not see it.

        Raises:
            ConfigError: if the run has no such checkpoint, or the folder is not free; or it cannot be uploaded, and stays.
        """
        from agentrl.report import card as hub
        from agentrl.run.export import export

        if push is not None:
            hub.check_repo_id(push)
        export(self.recipe, self._folder, Path(folder), name=push, step=step)
        if push is not None:
            hub.push(Path(folder), push, private=private)
        return Path(folder)

    def report(self, file: str | Path | None = None) -> Path:
        """Write curves and rollouts as one page of HTML, which opens offline; return its path, `RUN/report.html` by default."""
        from agentrl.report.html import write_report

        out = self.path / "report.html" if file is None else Path(file)
        return write_report([self.path], out, defaults=Recipe().model_dump(mode="json"))

    def plot(self, *names: str) -> Any:
        """Draw metrics over the steps; return the matplotlib figure, which a notebook shows.

        Args:
            *names: of metrics; none: reward, success, entropy and the clipped share.

        Raises:
            UserError: if matplotlib is not installed, or the run has no such metric.
        """
        rows = self.metrics
        return draw(rows, list(names) or shown(rows))
