"""`agentrl new`."""

import argparse
import json
import re
import sys
from pathlib import Path

from agentrl.cli.commands import Commands
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console

_ENV, _SMALL = "calculator", "a small one made here"


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    new = commands.add(
        "new",
        _new,
        "Write a commented recipe for an environment and a model; what is not given as an option is asked for. Any field of "
        "the recipe can be given as an option, and stands in it: --train.steps 40",
        overrides=True,
    )
    # NAME, of the file NAME.yaml, is no argument of the parser's: it would take the value of the first `--train.steps 40`.
    new.usage = "agentrl new [NAME] [--env ENV] [--model MODEL] [--FIELD VALUE ...]"
    new.add_argument("--env", help="an installed name (`agentrl envs` lists them), module:Class, or a Gymnasium id")
    new.add_argument("--model", help="a Hugging Face name or folder; none: a small model is made on the spot")


def _new(options: argparse.Namespace, rest: list[str]) -> None:
    from agentrl.cli.new_recipe import SCHEMA, new_recipe

    name, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else (None, rest)
    env = options.env or _asked("Which environment? `agentrl envs` lists them; module:Class is yours", _ENV)
    file = _file(name or re.sub(r"\W+", "_", env.rpartition(":")[2]).strip("_").lower())
    model = options.model or _asked("Which model? A Hugging Face name or folder", _SMALL)
    text = new_recipe(str(file), env=env, model=None if model in (_SMALL, "none") else model, overrides=rest)
    written = [_write(file, text)]
    if not (file.parent / SCHEMA).exists():
        from agentrl.fields.listing import sections
        from agentrl.fields.recipe_schema import recipe_schema

        schema = json.dumps(recipe_schema(sections()), indent=1)
        written.append(f"{_write(file.parent / SCHEMA, schema)} (by which editors complete it)")
    Console(soft_wrap=True).print(f"Wrote {' and '.join(written)}. Now:\n  agentrl train {file}")


def _asked(question: str, default: str) -> str:
    """Return the answer of whoever sits there; the default where nobody does."""
    if not sys.stdin.isatty():
        return default
    try:
        return input(f"{question} [{default}]: ").strip() or default
    except EOFError:
        return default


def _file(name: str) -> Path:
    file = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if file.exists():
        raise ConfigError(f"NAME: {file} is there already; choose another name")
    if not file.parent.is_dir():
        raise ConfigError(f"NAME: there is no folder {file.parent}")
    return file


def _write(file: Path, text: str) -> str:
    with file.open("x", encoding="utf-8") as opened:  # never over another
        opened.write(text)
    return str(file)
