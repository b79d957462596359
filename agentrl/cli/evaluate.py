"""`agentrl eval`."""

import argparse
import json
from pathlib import Path

from agentrl.api.target import load_to_play
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.data.files import shown
from agentrl.report.terminal import Console, announced_by


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    evaluate = commands.add("eval", _eval, f"Play the evaluation tasks. {OVERRIDING}", overrides=True)
    evaluate.add_argument(
        "target", type=Path, metavar="RECIPE|RUN", help="a recipe (its model untrained), or a run's folder"
    )
    evaluate.add_argument("--json", action="store_true", help="metrics, intervals and every task, as one JSON object")


def _eval(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = load_to_play(options.target, rest)
    from agentrl.api.evaluation import evaluated
    from agentrl.report.statistics import as_json, tables

    console = Console(soft_wrap=True, stderr=options.json)
    with announced_by(lambda words: console.print(f"{words} ...")):
        found, path = evaluated(recipe, run_dir, console=console)
    file = None if path is None else Path(shown(path))
    envs = {f"eval/{name}/" if name else "eval/": env.id for name, env in recipe.evaluation.env.items()}
    env_ids = {prefix: envs.get(prefix, recipe.env.id) for prefix in found}
    if options.json:
        print(json.dumps(as_json(found, env_ids, file), indent=1))
        return
    for table in tables(found, env_ids, file):
        Console().print(table)
