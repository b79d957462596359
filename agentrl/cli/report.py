"""`agentrl report` and `agentrl view`."""

import argparse
from pathlib import Path

from agentrl.cli.commands import Commands
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    report = commands.add(
        "report", _report, "Write curves and rollouts of runs as one page of HTML, which opens offline."
    )
    _add_runs(report)
    report.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default RUN/report.html; of several runs, report.html here)",
    )
    view = commands.add("view", _view, "Show curves and rollouts of runs in the browser while they go on.")
    _add_runs(view)
    view.add_argument("--port", type=int, default=8642, help="on 127.0.0.1 (default 8642; 0: any that is free)")


def _add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "targets",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="the folder of a run; those that differ in the seed alone are taken together",
    )


def _report(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.recipe.config import Recipe
    from agentrl.report.html import write_report

    folders: list[Path] = options.targets
    out = options.out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; name a file")
    path = write_report(folders, out, defaults=Recipe().model_dump(mode="json"))
    Console(soft_wrap=True).print(f"report: {path} ({path.stat().st_size / 2**20:.1f} MiB)")


def _view(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.recipe.config import Recipe
    from agentrl.report.html.live import HOST, LiveRuns, listen, serve

    live = LiveRuns(options.targets, defaults=Recipe().model_dump(mode="json"))
    with listen(options.port) as where:
        Console(soft_wrap=True).print(f"http://{HOST}:{where.getsockname()[1]}/  (end with Ctrl-C)")
        serve(live, where)
