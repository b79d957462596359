"""`agentrl train` and `agentrl launch`."""

import argparse
import sys
from pathlib import Path

from agentrl.api.target import load, name_of
from agentrl.cli.commands import OVERRIDING, Commands, rank
from agentrl.cli.entry import exits
from agentrl.report.terminal import Console
from agentrl.run import launch


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    train = commands.add("train", _train, f"Train a recipe, or resume a run. {OVERRIDING}", overrides=True)
    train.add_argument(
        "target", type=Path, metavar="RECIPE|RUN", help="a YAML recipe, or the folder of a run to resume"
    )
    _add_verbose(train)
    launched = commands.add("launch", _launch, f"Train as several processes. {OVERRIDING}", overrides=True)
    launch.add_options(launched)
    launched.add_argument("target", type=Path, metavar="RECIPE|RUN", help="as for `agentrl train`")
    _add_verbose(launched)


def _add_verbose(command: argparse.ArgumentParser) -> None:
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("-v", "--verbose", action="store_true", help="print the metrics of each step")
    shown.add_argument("-q", "--quiet", action="store_true", help="print nothing but warnings")


def _train(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = load(options.target, rest)
    from agentrl.api.training import run, with_run_dir

    is_main = rank() == 0
    recipe = with_run_dir(recipe, run_dir, name=name_of(options.target, recipe), is_main=is_main)
    with exits(recipe.run_dir):
        console = Console(soft_wrap=True, quiet=options.quiet or not is_main)
        run(recipe, run_dir, console=console, is_main=is_main, verbose=options.verbose)


def _launch(options: argparse.Namespace, rest: list[str]) -> None:
    # What can be checked now is reported once, and with the exit status of a mistake.
    launch.check(options)
    recipe, run_dir = load(options.target, rest)
    from agentrl.distributed.checkpoints import checkpoint_errors, checkpoints
    from agentrl.report.folder import RunFolder
    from agentrl.run.checkpoint import check_processes
    from agentrl.run.parts import task_shard

    task_shard(recipe.engine, num_groups=recipe.rollout.num_groups, rank=0, num_ranks=options.processes)
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
    launch.launch(options, [*rest, *(["--verbose"] if options.verbose else ["--quiet"] if options.quiet else [])])
