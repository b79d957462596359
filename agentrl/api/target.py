"""What a command or a function is told to work on: a recipe, or the folder of a run."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.errors import ConfigError
from agentrl.registry import suggest

if TYPE_CHECKING:
    from agentrl.config import Recipe

Target: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Recipe | None"
"""A recipe (the name of one that comes with agentrl, a YAML file, its sections; None: an empty one), or a run: what
`agentrl.train` returned, or its folder."""

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = (_PACKAGE / "recipes", _PACKAGE.parent / "examples")
"""Folders of the recipes that come with agentrl: installed, and in a checkout."""


def load(
    target: Target, overrides: Sequence[str] = (), *, changes: Mapping[str, Any] | None = None
) -> "tuple[Recipe, Path | None]":
    """Return the recipe, and the run's folder where `target` is one; what is laid over it is told in `load_recipe`.

    Raises:
        ConfigError: for a target that is none of these, and whatever `load_recipe` refuses.
    """
    from agentrl.config import Recipe, load_recipe

    if isinstance(target, Recipe):
        target = target.model_dump(mode="json")
    if target is None or isinstance(target, Mapping):
        from agentrl.api.given import sections

        return load_recipe(target and sections(target), overrides, changes=changes), None
    path = find(Path(target))
    if path.is_dir():
        return _of_run(path, overrides, changes or {}), path
    return load_recipe(path, overrides, changes=changes), None


def load_to_play(
    target: Target, overrides: Sequence[str] = (), *, changes: Mapping[str, Any] | None = None
) -> "tuple[Recipe, Path | None]":
    """Return what `load` does. An environment that is asked for is played in, and none of the recipe's `evaluation.env`.

    Raises:
        ConfigError: as `load`.
    """
    recipe, run_dir = load(target, overrides, changes=changes)
    changes, names = changes or {}, [option.partition("=")[0] for option in overrides]
    is_asked = "env" in changes or any(re.fullmatch(r"--env(\..*)?", name) for name in names)
    others = changes.get("evaluation", {}).get("env") or any(name.startswith("--evaluation.env") for name in names)
    if is_asked and not others:
        recipe = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"env": {}})})
    return recipe, run_dir


def look_for_modules_here(target: Target) -> None:
    """Let `module:Class` mean a file of the working directory also in a script that lies elsewhere, as commands do.

    Not where that is a run's, of anyone.
    """
    here = Path.cwd()
    is_of_run = (
        isinstance(target, str | os.PathLike) and Path(target).is_dir() and here.is_relative_to(Path(target).resolve())
    )
    if str(here) not in sys.path and not is_of_run:
        sys.path.append(str(here))


def name_of(target: Target) -> str:
    """Return what the folder of a new run is called after."""
    return Path(target).stem if isinstance(target, str | os.PathLike) else "run"


def find(path: Path) -> Path:
    """Return a path that is there, or that of the recipe of this name which comes with agentrl.

    Raises:
        ConfigError: for a name that no recipe has.
    """
    if path.exists() or not re.fullmatch(r"\w+", str(path)):
        return path
    if str(path) not in (known := shipped()):
        raise ConfigError(
            f"{path} is no file, no run and no recipe that comes with agentrl.{suggest(str(path), known)}"
        )
    return known[str(path)]


def shipped() -> dict[str, Path]:
    """Return the recipes that come with agentrl, by name."""
    return {file.stem: file for folder in _SHIPPED for file in folder.glob("*.yaml")}


def _of_run(folder: Path, overrides: Sequence[str], changes: Mapping[str, Any]) -> "Recipe":
    from agentrl.config import load_recipe
    from agentrl.report.folder import RunFolder

    if "run_dir" in changes or any(option.partition("=")[0] == "--run_dir" for option in overrides):
        raise ConfigError(f"--run_dir: the run stays in {folder}; leave it out, or copy the folder")
    config = RunFolder.open(folder).config_file
    try:
        return load_recipe(config, [*overrides, f"--run_dir={folder}"], changes=changes)
    except ConfigError:
        _check_alone(config)  # someone may have edited it
        raise


def _check_alone(config: Path) -> None:
    """Raise ConfigError in one line, with the file's name, where a run's recipe is at fault and no option."""
    from agentrl.config import load_recipe

    try:
        load_recipe(config)
    except ConfigError as error:
        words = "; ".join(str(error).splitlines())
        raise error if str(config) in words else ConfigError(f"{config}: {words}") from error


def tokenizer_of(run_dir: Path | None) -> Path | None:
    """Return the folder of a run's tokenizer, where there is one yet."""
    folder = run_dir / "tokenizer" if run_dir else None
    return folder if folder and folder.is_dir() else None


def untrained(recipe: "Recipe", *, process: int = 0) -> "Recipe":
    """Return a recipe for one process that trains and writes nothing; what only training reads is not asked for."""
    return recipe.model_copy(
        update={
            "run_dir": None,
            "report": recipe.report.model_copy(update={"trackers": ()}),
            "engine": recipe.engine.of_process(process),
            "credit": {"scheme": "uniform", "lone": "keep"},
            "loss": recipe.loss.model_copy(update={"kl_coefficient": 0.0, "routing_replay": "none"}),
            "train": recipe.train.model_copy(update={"optimizer": "adamw", "sharding": "none"}),
        }
    )
