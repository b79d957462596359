"""`agentrl show`, and the choice of recorded rollouts."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.commands import Commands
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.report.records import TrajectoryRecord


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    show = commands.add("show", _show, "Print rollouts as the model read them, sampled tokens coloured by advantage.")
    add_rollouts(show, default=1)
    show.add_argument("--faults", action="store_true", help="those whose environment failed, each kind (RUN/faults)")
    show.add_argument("--messages", action="store_true", help="messages, in place of the tokens that the model read")


def add_rollouts(command: argparse.ArgumentParser, *, default: int) -> None:
    """Add the options that choose rollouts."""
    command.add_argument(
        "target", type=Path, metavar="RUN|FILE", help="a run's folder (its newest rollouts), or a rollouts file"
    )
    command.add_argument("-n", "--number", type=int, default=default, help=f"how many rollouts (default {default})")
    command.add_argument("--trajectory", help="only the one with this id")


def read_rollouts(options: argparse.Namespace) -> "tuple[list[TrajectoryRecord], list[TrajectoryRecord]]":
    """Return all records of a file, and those that were asked for."""
    from agentrl.report.folder import RunFolder
    from agentrl.report.records import read_records

    path = options.target
    if options.number < 1:
        raise ConfigError(f"--number: at least 1, got {options.number}")
    if getattr(options, "faults", False):
        everyone = [record for file in RunFolder.open(path).kept_faults() for record in read_records(file)]
        if not everyone:
            raise ConfigError(f"{path} has no episode whose environment failed")
        return everyone, _chosen(everyone, options, path)
    files = rollout_files(path)
    if not files:
        raise ConfigError(f"{path} has no rollouts yet (report.rollouts_every says how often they are written)")
    everyone = list(read_records(files[-1]))
    return everyone, _chosen(everyone, options, files[-1])


def rollout_files(target: Path) -> list[Path]:
    """List the rollout files of a run's folder, oldest first; or the one file that is named.

    Raises:
        ConfigError: if there is none of that name, or its run's folder cannot be opened.
    """
    from agentrl.report.folder import RunFolder
    from agentrl.report.terminal import run_of

    if target.is_dir():
        return RunFolder.open(target).rollouts()
    if not target.is_file():
        raise ConfigError(f"there is no {target}")
    if (run := run_of(target)) is not None:
        RunFolder.open(run)
    return [target]


def _show(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.report.terminal import decoder, legend, render, run_of

    chosen = read_rollouts(options)[1]
    decode = None if options.messages else decoder(run_of(options.target))
    console = Console()
    console.print(legend())
    for record in chosen:
        console.print(render(record, decode))


def _chosen(records: "list[TrajectoryRecord]", options: argparse.Namespace, path: Path) -> "list[TrajectoryRecord]":
    chosen = [r for r in records if options.trajectory in (None, r.trajectory_id)][: options.number]
    if not chosen:
        which = "no rollouts" if options.trajectory is None else f"no trajectory {options.trajectory!r}"
        raise ConfigError(f"{path} has {which}")
    return chosen
