"""`agentrl train` and `agentrl launch`."""

import argparse
import datetime as dt
import sys
from pathlib import Path

from rich.table import Table

from agentrl import launch
from agentrl.cli.commands import OVERRIDING, Commands, rank
from agentrl.cli.exits import exits
from agentrl.cli.progress import print_end, progress
from agentrl.cli.targets import load, tokenizer_of
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    train = commands.add("train", _train, f"Train a recipe, or resume a run. {OVERRIDING}", overrides=True)
    train.add_argument(
        "target", type=Path, metavar="RECIPE|RUN", help="a YAML recipe, or the folder of a run to resume"
    )
    launched = commands.add("launch", _launch, f"Train as several processes. {OVERRIDING}", overrides=True)
    launch.add_options(launched)
    launched.add_argument("target", type=Path, metavar="RECIPE|RUN", help="as for `agentrl train`")


def _train(options: argparse.Namespace, rest: list[str]) -> None:
    console = Console(soft_wrap=True, quiet=rank() > 0)
    recipe, run_dir = load(options.target, rest)
    from agentrl.config import plan
    from agentrl.distributed.checkpoints import newest_step
    from agentrl.report.folder import RunFolder
    from agentrl.run.build import build
    from agentrl.run.loop import train
    from agentrl.run.resume import has_changed

    folder = RunFolder.open(run_dir) if run_dir else None
    steps_done = newest_step(folder.checkpoints) if folder else None
    if steps_done is not None and recipe.train.steps < steps_done:
        raise ConfigError(
            f"train.steps: {recipe.train.steps} is less than the {steps_done} steps that {run_dir} has done; raise it"
        )
    if folder and steps_done == recipe.train.steps:
        print_end(console, folder, recipe)
        console.print(f"all {recipe.train.steps} steps are done; resume with a larger --train.steps")
        return
    if recipe.run_dir is None:
        stamp = dt.datetime.now().strftime("%Y%m%d-%H%M%S")  # local time: a name for a person
        recipe = recipe.model_copy(update={"run_dir": Path("runs") / f"{options.target.stem}-{stamp}"})
    elif folder is None and rank() == 0:
        RunFolder.check_free(recipe.run_dir)  # before the work of building a model
    table = Table(title=f"{recipe.env.id}, seed {recipe.seed}", title_justify="left", show_header=False, box=None)
    for name, value in plan(recipe).items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"run folder: {recipe.run_dir}")
    teller = console if rank() == 0 else Console(soft_wrap=True)  # what one process alone has found, it tells

    def warn(words: str) -> None:
        teller.print(f"warning: {words}", style="yellow")

    with (
        exits(run_dir),
        build(recipe, tokenizer_folder=tokenizer_of(run_dir), on_warning=warn) as parts,
        exits(parts.recipe.run_dir),  # as the first process named it
    ):
        warnings = list(parts.warnings)
        if folder and has_changed(parts.recipe, folder):
            warnings.append("the recipe has changed: what was sampled since the last checkpoint is sampled again")
        for warning in warnings:
            console.print(f"warning: {warning}", style="yellow")
        with progress(console) as on_progress:
            folder, _ = train(parts, folder, on_progress=on_progress)
    print_end(console, folder, recipe)


def _launch(options: argparse.Namespace, rest: list[str]) -> None:
    # What can be checked now is told once, and with the exit status of a mistake.
    launch.check(options)
    recipe, run_dir = load(options.target, rest)
    from agentrl.distributed.checkpoints import checkpoint_errors, checkpoints
    from agentrl.report.folder import RunFolder
    from agentrl.run.engines import share_of
    from agentrl.run.resume import check_processes

    share_of(recipe, 0, options.processes)
    if run_dir is not None:
        for newest in checkpoints(RunFolder.open(run_dir).checkpoints)[-1:]:
            with checkpoint_errors(newest):
                check_processes(newest, options.processes)
    elif recipe.run_dir is not None and options.machine == 0:
        RunFolder.check_free(recipe.run_dir)
    if options.processes == 1:
        _train(options, rest)
        return
    sys.stdout.flush()
    launch.launch(options, rest)
