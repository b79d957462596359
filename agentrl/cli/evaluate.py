"""`agentrl eval`."""

import argparse
from pathlib import Path

from rich.table import Table

from agentrl.api.target import load
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    evaluate = commands.add("eval", _eval, f"Play the evaluation tasks. {OVERRIDING}", overrides=True)
    evaluate.add_argument(
        "target", type=Path, metavar="RECIPE|RUN", help="a recipe (its model untrained), or a run's folder"
    )


def _eval(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = load(options.target, rest)
    from agentrl.api.evaluation import evaluated

    found = evaluated(recipe, run_dir, console=Console(soft_wrap=True))
    envs = {f"eval/{name}/" if name else "eval/": env.id for name, env in recipe.evaluation.env.items()}
    for prefix, evaluation in found.items():
        title = f"{envs.get(prefix, recipe.env.id)}: {len(evaluation.groups)} evaluation tasks"
        table = Table("metric", "value", title=title)
        for name, value in evaluation.metrics.items():
            table.add_row(name, f"{value:.4g}")
        Console().print(table)
