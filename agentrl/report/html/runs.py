"""Runs, sorted into recipes: those that differ in nothing but their seed are repetitions of one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.files import dump_yaml
from agentrl.report.folder import RunFolder

_OF_ONE_RUN = ("seed", "run_dir", "report")
"""What may differ between repetitions."""
_MAX_DIFFERENCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's folder as it is now."""

    number: int
    """Among the runs of the page."""
    folder: RunFolder
    config: dict[str, Any]
    begun: dict[str, Any]
    """The recipe that it began with: a run that went back after a collapse has changed it since."""
    rows: list[dict[str, float]]
    """Its metrics."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.path.resolve().name

    @property
    def seed(self) -> Any:
        """Its seed."""
        return self.config.get("seed")

    def field(self, name: str) -> Any:
        """Return a field of its recipe, such as `train.steps`; None where it has none."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def described(self) -> dict[str, Any]:
        """Return what the page tells of it."""
        return {
            "name": self.name,
            "seed": self.seed,
            "path": str(self.folder.path),
            "step": int(self.rows[-1]["step"]) if self.rows else None,
            "steps": self.field("train.steps"),
            "config": dump_yaml(self.config),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRuns:
    """The runs of one recipe."""

    name: str
    runs: list[Run]


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the recipes and metrics of runs.

    Raises:
        ConfigError: for a folder that is no run, one that is named twice, or a file that is damaged.
    """
    runs = []
    resolved = [path.resolve() for path in folders]
    for number, path in enumerate(folders):
        if path.resolve() in resolved[:number]:
            raise ConfigError(f"{path} is named twice")
        if not path.is_dir():
            raise ConfigError(
                f"{path} is not the folder of a run: {'it is a file' if path.exists() else 'there is none'}"
            )
        folder = RunFolder.open(path)
        config, begun = folder.config(), folder.config(begun=True)
        runs.append(Run(number=number, folder=folder, config=config, begun=begun, rows=folder.metrics()))
    return runs


def by_recipe(runs: Sequence[Run]) -> list[RecipeRuns]:
    """Put the runs of one recipe together, and name each recipe by what sets it apart."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        common = {name: value for name, value in run.begun.items() if name not in _OF_ONE_RUN}
        found.setdefault(json.dumps(common, sort_keys=True, default=str), []).append(run)
    flat = [dict(_fields(of_recipe[0].begun)) for of_recipe in found.values()]
    names = sorted({name for fields in flat for name in fields if name.partition(".")[0] not in _OF_ONE_RUN})
    apart = [name for name in names if any(fields.get(name) != flat[0].get(name) for fields in flat)]
    apart.sort(key=lambda name: (not name.startswith("credit."), not name.startswith("loss.")))  # what is compared most
    recipes = []
    for fields, of_recipe in zip(flat, found.values(), strict=True):
        parts = [f"{name} {fields[name]}" for name in apart if name in fields][:_MAX_DIFFERENCES]
        recipes.append(RecipeRuns(name=", ".join(parts) or str(of_recipe[0].field("env.id")), runs=of_recipe))
    return recipes


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a recipe by their whole names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _fields(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, default=str) if isinstance(value, list) else str(value)
