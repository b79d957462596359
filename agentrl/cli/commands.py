"""All commands, and what their parsers have in common."""

import argparse
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

FAMILIES = (
    "train",
    "evaluate",
    "export",
    "plan",
    "chat",
    "serve",
    "up",
    "show",
    "report",
    "compare",
    "envs",
    "agent",
    "credit",
    "fields",
    "new",
)
"""Files of this folder, each with a function `add`, in the order of `agentrl --help`."""

OVERRIDING = "Any field of the recipe can be given as an option: --rollout.group_size 4 --credit.gamma 0.5"


class Commands:
    """Takes the commands of each family."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(dest="command", required=True)

    def add(
        self,
        name: str,
        run: Callable[[argparse.Namespace, list[str]], None],
        words: str,
        *,
        overrides: bool = False,
    ) -> argparse.ArgumentParser:
        """Add a command; return its parser, for its own arguments.

        Args:
            name: of the command.
            run: carries it out, given the options and, with `overrides`, what the parser does not know.
            words: what it does.
            overrides: fields of the recipe, or of something else, can be given as options.
        """
        command = self._parsers.add_parser(name, help=words, description=words, allow_abbrev=False)
        command.set_defaults(run=run, takes_overrides=overrides)
        return command


def rank() -> int:
    """Return the number of this process, as launchers of several set it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes there are, as their launcher sets it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="agentrl", description="Multi-turn RL for language-model agents.")
    commands = Commands(parser)
    for family in FAMILIES:
        import_module(f"agentrl.cli.{family}").add(commands)
    return parser


def first_line(documented: Any) -> str:
    """Return the first line of a docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]
