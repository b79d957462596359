"""`agentrl envs`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Commands, first_line
from agentrl.cli.targets import load
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    envs = commands.add("envs", _envs, "List installed environments, or play a recorded episode again.")
    again = envs.add_subparsers(dest="action").add_parser(
        "replay",
        help="play an episode of a run again, with the traceback where its environment raises",
        description="Make the environment of a run's recipe, reset it as for a recorded episode, take the recorded actions "
        "again and print the dialogue; where the environment raises, print the traceback and exit with 1.",
        allow_abbrev=False,
    )
    again.set_defaults(run=_replay)
    again.add_argument("target", type=Path, metavar="RUN", help="a run's folder")
    again.add_argument("episode", metavar="EPISODE", help="its name, such as train/000012/3")


def _envs(_: argparse.Namespace, __: list[str]) -> None:
    table = Table("name", "what it is", "tools", "state keys", "turn rewards")
    from agentrl.env import describe, make_env
    from agentrl.errors import UserError
    from agentrl.registry import names, resolve
    from agentrl.types import Need

    for name in names("agentrl.envs"):
        try:
            base: Any = make_env(name).unwrapped
        except UserError:  # it needs options
            cls = resolve(name, group="agentrl.envs", field="env.id")
            table.add_row(name, first_line(cls), "as its options say", "", "")
            continue
        described = describe(base)
        keys, rewards = ("yes" if need in described.needs else "no" for need in (Need.STATE_KEYS, Need.TURN_REWARDS))
        tools = ", ".join(tool["function"]["name"] for tool in described.tools)
        table.add_row(name, first_line(type(base)), tools, keys, rewards)
    Console().print(table)


def _replay(options: argparse.Namespace, _: list[str]) -> None:
    recipe, _folder = load(options.target, [])
    from agentrl.plain_data import words_of
    from agentrl.report.replay import find, replay
    from agentrl.rollout.fault import fault_of

    record = find(options.target, options.episode)
    env = recipe.env.make()
    console = Console(soft_wrap=True)
    try:
        for line in replay(env, record):
            console.print(line)
    except (Exception, KeyboardInterrupt) as error:
        console.print(Text(fault_of(error).traceback or words_of(error), "red"))
        if isinstance(error, KeyboardInterrupt):  # it hung
            raise
        sys.exit(1)
    finally:
        env.close()
    console.print(Text(f"It was recorded to end like this: {record.stop_reason} {record.error or ''}", "dim"))
