"""`agentrl doctor`."""

import argparse
from pathlib import Path

from agentrl.api.target import load, tokenizer_of, untrained
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    words = f"Say what a recipe's engine is, whether it agrees with the trainer, how fast. {OVERRIDING}"
    doctor = commands.add("doctor", _doctor, words, overrides=True)
    doctor.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or a run's folder")


def _doctor(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = load(options.target, rest)
    from agentrl.run.build import build
    from agentrl.run.doctor import examine

    console = Console(soft_wrap=True)
    with build(untrained(recipe), tokenizer_folder=tokenizer_of(run_dir)) as parts:
        for name, words in examine(parts):
            console.print(f"{name:13} {words}")
