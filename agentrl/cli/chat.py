"""`agentrl chat`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.api.target import load, shipped, tokenizer_of
from agentrl.cli.commands import Commands
from agentrl.errors import ConfigError, RendererError
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.recipe.config import Recipe


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    words = (
        "Show how a model's dialogues become tokens: the renderer chosen and why, what was proven of it, a sample dialogue. "
        "Fields of the recipe's section can be given as options: --chat.thinking keep --chat.template FILE"
    )
    chat = commands.add("chat", _chat, words, overrides=True)
    chat.add_argument(
        "target",
        type=Path,
        metavar="MODEL|FOLDER|RUN|RECIPE",
        help="a model of the Hugging Face hub or its folder, of which only the tokenizer is read; a run's folder; a recipe",
    )
    chat.add_argument("--json", action="store_true", help="print the same as data")


def _chat(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, tokenizer, name = _target(options.target, rest)
    from agentrl.chat.proof.inspection import inspect
    from agentrl.report.chat import sections

    found = inspect(recipe.chat, tokenizer, name=name)
    if options.json:
        Console(soft_wrap=True).print(json.dumps(found.model_dump(), indent=2))
    else:
        console = Console()
        for section in sections(found):
            console.print(section)
    if found.error is not None:
        raise RendererError(found.error)


def _target(target: Path, rest: list[str]) -> "tuple[Recipe, Any, str]":
    """Return a recipe, the tokenizer that it is used with, and the name of the model."""
    from agentrl.chat import load_tokenizer, pretrained_tokenizer
    from agentrl.recipe.config import load_recipe

    is_run = (target / "config.yaml").is_file()
    is_recipe = target.suffix in (".yaml", ".yml") or (str(target) in shipped() and not target.exists())
    if not (is_run or target.is_file() or is_recipe):
        if other := [option for option in rest if option.startswith("--") and not option.startswith("--chat.")]:
            raise ConfigError(f"agentrl chat does not take {' '.join(other)}")
        return load_recipe(None, rest), pretrained_tokenizer(str(target), field="model"), str(target)
    recipe, run_dir = load(target, rest)
    name = recipe.model.name_or_path
    if name is not None:
        return recipe, pretrained_tokenizer(name), name
    if (folder := tokenizer_of(run_dir)) is not None:
        return recipe, load_tokenizer(folder), f"the local model of {target}"
    from agentrl.run.parts import bytes_tokenizer

    return (
        recipe,
        bytes_tokenizer(),
        "a local model (with a tokenizer of bytes: its own is trained when it begins)",
    )
