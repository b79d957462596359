"""Runs, sorted into recipes: those that differ in nothing but their seed are repetitions of one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.data.files import dump_yaml
from agentrl.errors import ConfigError
from agentrl.report.folder import RunFolder
from agentrl.report.statistics import player_of

_OF_ONE_RUN = ("seed", "run_dir", "report")
"""Fields that may differ between repetitions."""
_NUM_DIFFERENCES = 3
"""Fields that name a recipe, if they distinguish all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's folder as it is now."""

    number: int
    """Among the runs of the page."""
    name: str
    """Name of its folder; if several have the same, of the one around it too."""
    folder: RunFolder
    config: dict[str, Any]
    begun: dict[str, Any]
    """The recipe that it began with: a run that went back after a collapse has changed it since."""
    rows: list[dict[str, float]]
    """Its metrics."""

    @property
    def seed(self) -> Any:
        """Its seed."""
        return self.config.get("seed")

    def field(self, name: str) -> Any:
        """Return a field of its recipe, such as `train.steps`; None if it has none."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @property
    def is_finished(self) -> bool:
        """Whether it has taken all of its steps."""
        steps = self.field("train.steps")
        return bool(self.rows) and isinstance(steps, int) and self.rows[-1]["step"] >= steps

    def described(self, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the page's data about it; `defaults` are the fields of a recipe that sets none."""
        return {
            "name": self.name,
            "seed": self.seed,
            "path": str(self.folder.path),
            "step": int(self.rows[-1]["step"]) if self.rows else None,
            "steps": self.field("train.steps"),
            "finished": self.is_finished,
            "written": self.folder.last_written(),
            "config": dump_yaml(self.config),
            "changed": None if defaults is None else dump_yaml(changed(self.config, defaults)),
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
    names = _short_names(resolved)
    for number, path in enumerate(folders):
        if path.resolve() in resolved[:number]:
            raise ConfigError(f"{path} is named twice")
        if not path.is_dir():
            raise ConfigError(
                f"{path} is not the folder of a run: {'it is a file' if path.exists() else 'there is none'}"
            )
        folder = RunFolder.open(path)
        config, begun = folder.config(), folder.config(begun=True)
        runs.append(
            Run(number=number, name=names[number], folder=folder, config=config, begun=begun, rows=folder.metrics())
        )
    return runs


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the ends of paths by which they differ: each as long as it must be."""
    longest = max((len(path.parts) for path in paths), default=1)
    ends = [["/".join(path.parts[-length:]) for path in paths] for length in range(1, longest + 1)]
    return [
        next((end[number] for end in ends if end.count(end[number]) == 1), str(path))
        for number, path in enumerate(paths)
    ]


def by_recipe(runs: Sequence[Run]) -> list[RecipeRuns]:
    """Put the runs of one recipe together, and name each recipe by what sets it apart."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        common = {name: value for name, value in run.begun.items() if name not in _OF_ONE_RUN}
        found.setdefault(json.dumps(common, sort_keys=True, default=str), []).append(run)
    flat = [dict(_fields(of_recipe[0].begun)) for of_recipe in found.values()]
    names = sorted({name for fields in flat for name in fields if name.partition(".")[0] not in _OF_ONE_RUN})
    apart = [name for name in names if any(fields.get(name) != flat[0].get(name) for fields in flat)]
    apart.sort(key=lambda name: (name != "credit.scheme", name.partition(".")[0] not in ("credit", "loss"), name))
    for num in range(_NUM_DIFFERENCES, max(_NUM_DIFFERENCES, len(apart)) + 1):
        told = [", ".join([f"{name} {fields[name]}" for name in apart if name in fields][:num]) for fields in flat]
        if len(set(told)) == len(told):
            break
    return [
        RecipeRuns(name=name or player_of(of_recipe[0].config), runs=of_recipe)
        for name, of_recipe in zip(told, found.values(), strict=True)
    ]


def changed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that differ from the defaults; `run_dir` names the run, and is left out."""
    found = {}
    for name, value in config.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = changed(value, default)
            is_default = not value
        else:
            is_default = name in defaults and value == default
        if not is_default and name != "run_dir":
            found[name] = value
    return found


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a recipe by their whole names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _fields(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, default=str) if isinstance(value, list) else str(value)
