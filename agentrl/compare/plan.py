"""Which runs a comparison needs: recipes, times the fields that vary, times seeds; each in a folder named by its recipe."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from agentrl.compare.curves import RecordedRun, identity, read_run
from agentrl.config import Recipe, load_recipe
from agentrl.errors import ConfigError
from agentrl.files import dump_yaml
from agentrl.report.folder import RunFolder
from agentrl.report.sources import differing, read_sources, sources

_EVALUATIONS = 10
"""Evaluations of a run whose recipe asks for none on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A recipe of the comparison."""

    name: str
    recipe: Recipe
    """With the first of the seeds."""
    folder: Path
    """Of its runs; it is named by all that the recipe says, so that the same recipe finds its runs again."""

    def run(self, seed: int) -> "PlannedRun":
        """Return the run of a seed."""
        return PlannedRun(arm=self, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run of the comparison, which may be there already."""

    arm: Arm
    seed: int

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.arm.folder / f"seed-{self.seed}"

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def has_begun(self) -> bool:
        """Whether there is something to resume."""
        return (self.folder / "config.yaml").is_file()

    def recorded(self) -> RecordedRun | None:
        """Return what it has written so far. None: nothing, or what is damaged, which resuming it tells."""
        try:
            return read_run(self.folder) if self.has_begun else None
        except ConfigError:
            return None

    def arguments(self) -> list[str]:
        """Return what begins or resumes it, after `agentrl`."""
        if self.has_begun:
            return ["train", str(self.folder)]
        return ["train", str(self.arm.folder / "recipe.yaml"), "--seed", str(self.seed), "--run_dir", str(self.folder)]


def make_arms(
    paths: Sequence[Path], *, varied: Mapping[str, Sequence[str]], overrides: Sequence[str], folder: Path, control: bool
) -> tuple[list[Arm], dict[str, str]]:
    """Return the recipes to compare, and of each one that has a control, the control's name.

    Raises:
        ConfigError: for a recipe that is wrong, and for two that say the same.
    """
    if any(option.partition("=")[0] == "--run_dir" for option in overrides):
        raise ConfigError("--run_dir: each run has a folder of its own; --folder says where")
    arms = []
    stems = [path.stem for path in paths]
    for path, values in product(paths, product(*varied.values())):
        given = [f"--{field}={value}" for field, value in zip(varied, values, strict=True)]
        stem = path.stem if stems.count(path.stem) == 1 else str(path)
        name = _name(stem if len(paths) > 1 else "", dict(zip(varied, values, strict=True)))
        arms.append(_arm(name, load_recipe(path, [*overrides, *given]), folder, path.stem))
    panel_seed = arms[0].recipe.seed
    arms = [
        _arm(arm.name, _measured(arm.recipe, panel_seed), folder, arm.folder.name.rpartition("-")[0]) for arm in arms
    ]
    controls = {}
    for arm in list(arms) if control else []:
        of = {key: value for key, value in arm.recipe.credit.items() if key != "fallback"}
        recipe = arm.recipe.model_copy(update={"credit": {"scheme": "shuffled", "of": of}})
        controls[arm.name] = f"{arm.name}, shuffled"
        arms.append(_arm(controls[arm.name], recipe, folder, arm.folder.name.rpartition("-")[0]))
    for index, arm in enumerate(arms):
        for other in arms[:index]:
            if arm.folder == other.folder:
                raise ConfigError(f"{other.name} and {arm.name} are the same recipe; there is nothing to compare")
    return arms, controls


def check_sources(runs: Sequence[PlannedRun]) -> None:
    """See that what has begun was trained on the code that is there now.

    Raises:
        ConfigError: naming what has changed since, and what to do.
    """
    changed: dict[str, set[str]] = {}
    for run in runs:
        if run.has_begun:
            began, now = read_sources(RunFolder(run.folder)), sources(run.arm.recipe.model_dump(mode="json"))
            for module in differing(began, now):
                changed.setdefault(module, set()).add(str(run.arm.folder))
    if changed:
        module, folders = next(iter(changed.items()))
        raise ConfigError(
            f"the file of the module {module!r} has changed since runs in {', '.join(sorted(folders))} began: delete these to "
            "train them again, put the file back, or train elsewhere (--folder)"
        )


def parse_varied(given: Sequence[str], *, option: str) -> dict[str, list[str]]:
    """Read `FIELD=VALUE,VALUE` pairs; values are as in YAML, so that a list stands in brackets.

    Raises:
        ConfigError: for anything else.
    """
    found: dict[str, list[str]] = {}
    for text in given:
        field, has_values, values = text.partition("=")
        try:
            node = yaml.compose(f"[{values}]")
        except yaml.YAMLError:
            node = None
        if not (has_values and field and isinstance(node, yaml.SequenceNode) and node.value) or field in found:
            raise ConfigError(f"{option}: expected each field once, as FIELD=VALUE,VALUE, got {text!r}")
        found[field] = [f"[{values}]"[item.start_mark.index : item.end_mark.index] for item in node.value]
    return found


def write_recipe(arm: Arm) -> None:
    """Write the recipe that the runs begin with."""
    arm.folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = arm.recipe.model_dump(mode="json", exclude={"run_dir"})
    (arm.folder / "recipe.yaml").write_text(dump_yaml(said), encoding="utf-8")


def _arm(name: str, recipe: Recipe, folder: Path, stem: str) -> Arm:
    return Arm(name=name, recipe=recipe, folder=folder / f"{stem}-{identity(recipe)}")


def _measured(recipe: Recipe, panel_seed: int) -> Recipe:
    """Return the recipe with evaluations on its way, on the tasks that all recipes and seeds share."""
    evaluation = recipe.evaluation
    update: dict[str, Any] = {}
    if evaluation.seed is None:
        update["seed"] = panel_seed
    if not evaluation.every:
        update["every"] = max(1, recipe.train.steps // _EVALUATIONS)
    return recipe.model_copy(update={"evaluation": evaluation.model_copy(update=update)})


def _name(stem: str, varied: Mapping[str, str]) -> str:
    """Name a recipe by its file, where there are several, and by what varies."""
    if len(varied) == 1 and not stem:
        return re.sub(r"\s+", " ", next(iter(varied.values())))
    return ", ".join(
        [*([stem] if stem else []), *(f"{field.rpartition('.')[2]}={value}" for field, value in varied.items())]
    )
