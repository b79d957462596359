"""Curves of one metric, read from the folders of runs."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder
from agentrl.report.sources import differing, read_sources
from agentrl.report.statistics import with_unreported
from agentrl.report.terminal import Panel, read_panels

_PREFERRED = ("success", "score", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run's folder, as far as it is compared."""

    path: Path
    recipe: Recipe
    rows: list[dict[str, float]]
    panels: dict[str, Panel]
    sources: dict[str, str]
    """Hashes of the code that it began with; see `agentrl.report.sources`."""

    @property
    def is_finished(self) -> bool:
        """Whether its last step is done."""
        return bool(self.rows) and self.rows[-1]["step"] >= self.recipe.train.steps

    @property
    def identity(self) -> str:
        """A hash of its recipe without the seed: runs of the same recipe share it."""
        return identity(self.recipe, without=("evaluation",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Metric of a run at each evaluation."""

    recipe: str
    """The name of its recipe in this comparison."""
    seed: int
    path: Path
    values: dict[int, float]
    """The metric, by step."""
    panel: Panel | None
    """The tasks that it was evaluated on, and how. None: not noted."""
    episodes: int
    """Episodes of a training step."""


def identity(recipe: Recipe, *, without: Sequence[str] = ()) -> str:
    """Return a hash of all that a recipe says but its seed and where and what it writes."""
    said = recipe.model_dump(mode="json", exclude={"seed", "run_dir", "report", *without})
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]


def read_run(path: Path) -> RecordedRun:
    """Read a run's folder.

    Raises:
        ConfigError: if it is none, or is damaged.
    """
    folder = RunFolder.open(path)
    return RecordedRun(
        path=path,
        recipe=load_recipe(folder.begun_config_file),
        rows=folder.metrics(),
        panels=read_panels(folder),
        sources=read_sources(folder),
    )


def code_notes(runs: Sequence[RecordedRun]) -> list[str]:
    """Return notes on runs that did not begin with the same code, as far as that is known."""
    changed = dict.fromkeys(
        module for one, other in combinations(runs, 2) for module in differing(one.sources, other.sources)
    )
    return [
        f"the file of the module {module!r} changed between these runs: they were not trained on the same code"
        for module in changed
    ]


def name_recipes(runs: Iterable[RecordedRun]) -> dict[str, str]:
    """Name each recipe, by its identity, after what tells it from the others: `gigpo`, or `gamma=0.5, seed_of=3`."""
    recipes = {
        run.identity: flat(run.recipe.model_dump(mode="json", exclude={"seed", "run_dir", "report", "evaluation"}))
        for run in runs
    }
    fields = dict.fromkeys(field for recipe in recipes.values() for field in recipe)
    differing = [
        field
        for field in fields
        if len({json.dumps(recipe.get(field), default=str) for recipe in recipes.values()}) > 1
    ]
    if "credit.scheme" in differing:  # whose fields are others as well
        differing = [
            field for field in differing if field == "credit.scheme" or not field.startswith("credit.")
        ] or differing
    names = {
        key: str(recipe.get(differing[0]))
        if len(differing) == 1
        else ", ".join(f"{field.rpartition('.')[2]}={recipe[field]}" for field in differing if field in recipe)
        for key, recipe in recipes.items()
    }
    twice = len(set(names.values())) < len(names)
    return {key: f"{name or 'recipe'} ({key})" if twice else name or "recipe" for key, name in names.items()}


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted names."""
    if not isinstance(data, dict) or not data:
        return {prefix.removesuffix("."): data}
    return {name: value for key, item in data.items() for name, value in flat(item, f"{prefix}{key}.").items()}


def is_gain(metric: str) -> bool:
    """Return whether more of a metric is better."""
    name = metric.rpartition("/")[2]
    return name in _PREFERRED or name.startswith("pass@") or "/reward/" in metric


def choose_metric(runs: Sequence[RecordedRun], asked: str | None) -> str:
    """Return the metric to compare by: the one that was asked for, else `eval/success`, `eval/score` or `eval/reward`.

    Raises:
        ConfigError: if no run has it.
    """
    there = list(dict.fromkeys(name for run in runs for row in run.rows for name in row if name.startswith("eval/")))
    if asked is not None:
        name = asked if asked.startswith("eval/") else f"eval/{asked}"
        if name not in there:
            raise ConfigError(f"--metric: no run has {name!r}; there are {', '.join(there) or 'no evaluations'}")
        return name
    prefixes = sorted({name.rpartition("/")[0] + "/" for name in there if name.endswith("/episodes")}, key=len)
    for prefix in prefixes:
        for name in _PREFERRED:
            if f"{prefix}{name}" in there:
                return f"{prefix}{name}"
    raise ConfigError("no run has been evaluated yet")


def curve_of(run: RecordedRun, *, metric: str, recipe: str) -> Curve:
    """Read the curve of a metric; an evaluation whose every episode failed is none."""
    prefix = metric.rpartition("/")[0]
    prefix = next((p for p in sorted(run.panels, key=len, reverse=True) if metric.startswith(p)), f"{prefix}/")
    panel = run.panels.get(prefix)
    values = {}
    for row in with_unreported(run.rows, [metric]):
        if metric in row and row.get(f"{prefix}episodes", 0) > 0 and row["step"] >= (panel.since if panel else 0):
            values[int(row["step"])] = row[metric]
    rollout = run.recipe.rollout
    return Curve(
        recipe=recipe,
        seed=run.recipe.seed,
        path=run.path,
        values=values,
        panel=panel,
        episodes=rollout.num_groups * rollout.group_size,
    )
