"""`agentrl eval`."""

import argparse
from pathlib import Path

from rich.table import Table

from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.cli.targets import load, tokenizer_of, untrained
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    evaluate = commands.add("eval", _eval, f"Play the evaluation tasks. {OVERRIDING}", overrides=True)
    evaluate.add_argument(
        "target", type=Path, metavar="RECIPE|RUN", help="a recipe (its model untrained), or a run's folder"
    )


def _eval(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = load(options.target, rest)
    recipe = untrained(recipe)
    from agentrl.report.folder import RunFolder
    from agentrl.run.build import build
    from agentrl.run.evaluate import evaluate
    from agentrl.run.resume import load_weights
    from agentrl.run.start import reuse_environments

    folder = RunFolder.open(run_dir) if run_dir else None
    console = Console(soft_wrap=True)

    def warn(words: str) -> None:
        console.print(f"warning: {words}", style="yellow")

    with build(recipe, tokenizer_folder=tokenizer_of(run_dir), on_warning=warn) as parts:
        if folder:
            load_weights(parts, folder)
        parts.link.start(0)
        reuse_environments(parts)
        found = evaluate(parts)
    envs = {f"eval/{name}/" if name else "eval/": env.id for name, env in recipe.evaluation.env.items()}
    for prefix, evaluation in found.items():
        title = f"{envs.get(prefix, recipe.env.id)}: {len(evaluation.groups)} evaluation tasks"
        table = Table("metric", "value", title=title)
        for name, value in evaluation.metrics.items():
            table.add_row(name, f"{value:.4g}")
        Console().print(table)
