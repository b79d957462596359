"""`agentrl agent`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from agentrl.api.target import load
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console, announced_by


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    agent = commands.add("agent", _agent, "Try a program that plays in place of an environment.")
    actions = agent.add_subparsers(dest="action")
    words = (
        "Let an agent play evaluation tasks with the recipe's model, and print each of its calls: whether it continues, forks "
        f"or rewrites another, its first difference, and the parameters that are not taken over. {OVERRIDING}"
    )
    trying = actions.add_parser("try", help="play a task, and print each call", description=words, allow_abbrev=False)
    trying.set_defaults(run=_try, takes_overrides=True)
    trying.add_argument(
        "target",
        type=Path,
        metavar="RECIPE|RUN|MODULE:FUNCTION",
        help="a recipe or a run with an agent, or its function",
    )
    trying.add_argument("--tasks", metavar="FILE", help="table of the tasks (agent.tasks)")
    trying.add_argument("-n", "--number", type=int, default=1, metavar="N", help="how many tasks (default: 1)")
    trying.add_argument("--messages", action="store_true", help="print the dialogues too")


def _agent(_: argparse.Namespace, __: list[str]) -> None:
    raise ConfigError("agentrl agent try RECIPE plays a task and prints each call")


def _try(options: argparse.Namespace, rest: list[str]) -> None:
    if options.number < 1:
        raise ConfigError(f"--number: expected at least 1, got {options.number}")
    name: str = str(options.target)
    is_name = ":" in name and not options.target.exists()
    if is_name and options.tasks is None and not any(word.startswith("--agent.tasks") for word in rest):
        raise ConfigError("--tasks: name the table of the tasks, such as tasks.jsonl")
    changes: dict[str, Any] = {"evaluation": {"num_tasks": options.number, "samples": 1, "pass_at": [1], "env": {}}}
    if is_name:
        changes["agent"] = {"run": name}
    if options.tasks is not None:
        changes["agent"] = {**changes.get("agent", {}), "tasks": {"tasks": options.tasks}}
    recipe, run_dir = load(None if is_name else options.target, rest, changes=changes)
    if recipe.agent is None:
        raise ConfigError(f"{options.target}: its recipe has no agent; `agentrl eval {options.target}` plays its tasks")
    from agentrl.api.evaluation import evaluated
    from agentrl.report.calls import summary
    from agentrl.report.terminal import in_short

    console = Console(soft_wrap=True)
    with announced_by(lambda words: console.print(f"{words} ...")):
        found, _ = evaluated(recipe, run_dir, console=console, keep=False)
    played = [t for one in found.values() for group in one.groups for t in group.trajectories]
    for trajectory in played:
        console.print(f"\ntask {trajectory.task_index}, seed {trajectory.seed}")
        for line in summary(trajectory):
            console.print(line)
        for text in in_short(trajectory) if options.messages else ():
            console.print(text)
    if any(trajectory.failed for trajectory in played):
        sys.exit(1)
