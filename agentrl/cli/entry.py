"""`agentrl COMMAND ...`: what every command has in common."""

import argparse
import logging
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from agentrl.cli.commands import make_parser
from agentrl.cli.exits import exits
from agentrl.errors import ConfigError, UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit as `exits` says."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what models say has letters that not every terminal knows
    # peft imports bitsandbytes, which warns of a 4-bit kernel that nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    options, rest = make_parser().parse_known_args(arguments)
    with exits():
        if "--" in (sys.argv if arguments is None else arguments):
            raise ConfigError("-- means nothing to agentrl; leave it out")
        _look_for_modules_here(options)
        if rest and not options.takes_overrides:
            raise ConfigError(f"agentrl {options.command} does not take {' '.join(rest)}")
        options.run(options, rest)


def _look_for_modules_here(options: argparse.Namespace) -> None:
    """Let `module:Class` mean a file of the working directory, as with `python -m`; not where that is a run's, of anyone."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UserError("the working directory is gone; go to one that is there") from None
    runs = getattr(options, "targets", None) or [getattr(options, "target", None)]
    if not any(run and run.is_dir() and here.is_relative_to(run.resolve()) for run in runs):
        sys.path.insert(0, str(here))
