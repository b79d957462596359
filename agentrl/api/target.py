"""Target of a command or a function: a recipe, or the folder of a run.

Scripts may hand in classes, functions and sections in place of names; notebooks have an event loop and no terminal.
"""

import asyncio
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel

from agentrl.credit import CreditScheme
from agentrl.data.files import absolute
from agentrl.data.plain import PlainDataError, abbreviated, plain_data
from agentrl.errors import ConfigError
from agentrl.recipe.plugin import Plugin
from agentrl.recipe.registry import Group, spec_of, suggest

if TYPE_CHECKING:
    from agentrl.recipe.config import Recipe


@contextmanager
def without_running_loop() -> Iterator[None]:
    """Let `asyncio.run` work in a cell of a notebook: the notebook's own event loop stands still as long as the cell runs."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


def line_display() -> Callable[[str], None]:
    """Return what shows a line of text below the cell, in place of the one before."""
    from IPython.display import Pretty, display  # where there is a notebook, there is IPython

    def show(words: str) -> None:
        shown.update(Pretty(words))

    shown: Any = display(Pretty(""), display_id=True)
    return show


_KEYS = {"env": "id", "model": "name_or_path", "credit": "scheme", "engine": "name", "chat": "renderer"}
"""Field of a section that a lone name stands for: `env=MyEnv` is `env={"id": MyEnv}`."""
_GROUPS: dict[str, Group] = {"env": "agentrl.envs", "credit": "agentrl.credit"}


def sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections of a recipe as plain data; those that are None are left out.

    A class or a function becomes its name, and resolves in this process even where it cannot be imported. A credit scheme, or
    the config of an engine or a renderer, becomes its name and its fields.

    Raises:
        ConfigError: naming the field, for what cannot be written down, with what to give instead.
    """
    return {name: _section(name, value) for name, value in given.items() if value is not None}


def _section(name: str, value: Any) -> Any:
    if isinstance(value, CreditScheme | Plugin):
        return {_KEYS[name]: spec_of(type(value), group=_GROUPS.get(name)), **_fields(value)}
    if isinstance(value, BaseModel):
        return _fields(value)
    if callable(getattr(value, "state_dict", None)):
        raise ConfigError(
            f"{name}: give the name or the folder of a model, so that the run can be resumed; write this one with "
            "model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER)"
        )
    plain = _plain(value, name, group=_GROUPS.get(name))
    return {_KEYS[name]: plain} if name in _KEYS and not isinstance(plain, dict) else plain


def _fields(section: BaseModel) -> dict[str, Any]:
    fields: dict[str, Any] = section.model_dump(mode="json")
    if isinstance(section, Plugin):
        fields.pop(section.seam.key, None)
    return fields


def _plain(value: Any, place: str, *, group: Group | None = None) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _plain(item, f"{place}.{key}", group=group if key == "id" else None) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, type) or inspect.isroutine(value):
        if value.__name__ == "<lambda>":
            raise ConfigError(
                f"{place}: a lambda has no name that a recipe could hold; write it as a function with `def`"
            )
        return spec_of(value, group=group)
    try:
        return plain_data(value, place)
    except PlainDataError as error:
        raise ConfigError(
            f"{error}; give a class or a function, whose name a recipe can hold, or plain data (got {abbreviated(value)})"
        ) from error


Target: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Recipe | None"
"""A recipe (the name of one that comes with agentrl, a YAML file, its sections; None: an empty one), or a run: what
`agentrl.train` returned, or its folder."""

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = (_PACKAGE / "recipes", _PACKAGE.parent / "examples")
"""Folders of the recipes that come with agentrl: installed, and in a checkout."""


def load(
    target: Target, overrides: Sequence[str] = (), *, changes: Mapping[str, Any] | None = None
) -> "tuple[Recipe, Path | None]":
    """Return the recipe, and the run's folder if `target` is one; `load_recipe` lists what is laid over it.

    Raises:
        ConfigError: for a target that is none of these, and whatever `load_recipe` refuses.
    """
    from agentrl.recipe.config import Recipe, load_recipe

    if isinstance(target, Recipe):
        target = target.model_dump(mode="json")
    if target is None or isinstance(target, Mapping):
        return load_recipe(target and sections(target), overrides, changes=changes), None
    path = find(Path(target))
    if path.is_dir():
        path = absolute(path)
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
    here = absolute("")
    is_of_run = (
        isinstance(target, str | os.PathLike) and Path(target).is_dir() and here.is_relative_to(Path(target).resolve())
    )
    if str(here) not in sys.path and not is_of_run:
        sys.path.append(str(here))


def name_of(target: Target, recipe: "Recipe") -> str:
    """Return the name for the folder of a new run: that of the recipe's file, or of the environment if it is another.

    Args:
        target: as given.
        recipe: read from it, with what was laid over it.
    """
    if isinstance(target, str | os.PathLike):
        with suppress(ConfigError):  # only whole with what is laid over it
            if load(target)[0].player_id == recipe.player_id:
                return Path(target).stem
    name = recipe.player_id.rpartition(":")[2].rpartition("<locals>.")[2]
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


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
    from agentrl.recipe.config import load_recipe
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
    from agentrl.recipe.config import load_recipe

    try:
        load_recipe(config)
    except ConfigError as error:
        words = "; ".join(str(error).splitlines())
        raise error if str(config) in words else ConfigError(f"{config}: {words}") from error


def tokenizer_of(run_dir: Path | None) -> Path | None:
    """Return the folder of a run's tokenizer, if there is one yet."""
    folder = run_dir / "tokenizer" if run_dir else None
    return folder if folder and folder.is_dir() else None


def untrained(recipe: "Recipe", *, process: int = 0) -> "Recipe":
    """Return a recipe for one process that trains and writes nothing; what only training reads is not asked for."""
    return recipe.model_copy(
        update={
            "run_dir": None,
            "report": recipe.report.model_copy(update={"trackers": ()}),
            "engine": recipe.engine.for_process(process),
            "warmup": recipe.warmup if recipe.model.name_or_path is None else type(recipe.warmup)(),
            "credit": {"scheme": "uniform", "lone": "keep"},
            "loss": recipe.loss.model_copy(
                update={"kl_coefficient": 0.0, "distill_coefficient": 0.0, "routing_replay": "none", "nll": None}
            ),
            "train": recipe.train.model_copy(update={"optimizer": "adamw", "sharding": "none"}),
        }
    )
