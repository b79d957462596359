"""What a command is told to work on: a recipe, or the folder of a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import Recipe


def load(target: Path, rest: list[str]) -> "tuple[Recipe, Path | None]":
    """Return the recipe, and the run's folder where `target` is one."""
    from agentrl.config import load_recipe
    from agentrl.report.folder import RunFolder

    if target.is_dir():
        if any(option.partition("=")[0] == "--run_dir" for option in rest):
            raise ConfigError(f"--run_dir: the run stays in {target}; leave it out, or copy the folder")
        config = RunFolder.open(target).config_file
        try:
            return load_recipe(config, [*rest, f"--run_dir={target}"]), target
        except ConfigError:
            _check_alone(config)  # an earlier version may have written what is no recipe now
            raise
    return load_recipe(target, rest), None


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
            "engine": recipe.engine.of_process(process),
            "credit": {"scheme": "uniform", "lone": "keep"},
            "loss": recipe.loss.model_copy(update={"kl_coefficient": 0.0, "routing_replay": False}),
            "train": recipe.train.model_copy(update={"optimizer": "adamw", "sharding": "none"}),
        }
    )
