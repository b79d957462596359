"""`agentrl envs`."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from agentrl.api.target import load
from agentrl.cli.commands import Commands, first_line
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.recipe.config import Recipe
    from agentrl.rollout.env_driver import Env


_ENV = "an installed name, module:Class, a Gymnasium id, a recipe, or a run's folder"
_OVERRIDING = "fields of the recipe can be given as options, such as --env.options.num_boxes 6"


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    envs = commands.add("envs", _envs, "List installed environments; play one, check one, or begin a new one.")
    actions = envs.add_subparsers(dest="action")
    playing = actions.add_parser(
        "play",
        help="play an environment yourself, in the terminal",
        description=f"Play an environment yourself, in the terminal: {_OVERRIDING}",
        allow_abbrev=False,
    )
    playing.set_defaults(run=_play, takes_overrides=True)
    playing.add_argument("env", metavar="ENV", help=_ENV)
    playing.add_argument("--task", type=int, default=0, metavar="NUMBER", help="which task of the split (default: 0)")
    playing.add_argument("--split", choices=("train", "eval"), default="train", help="train or eval (default: train)")
    checking = actions.add_parser(
        "check",
        help="say in plain words what is wrong with an environment",
        description=f"Say in plain words what is wrong with an environment, and what of it is proven: {_OVERRIDING}",
        allow_abbrev=False,
    )
    checking.set_defaults(run=_check, takes_overrides=True)
    checking.add_argument("env", metavar="ENV", help=_ENV)
    checking.add_argument("--seeds", type=int, default=10, metavar="NUMBER", help="tasks that are tried (default: 10)")
    new = actions.add_parser(
        "new",
        help="write an environment, its test and a recipe that trains it",
        description="Write an environment, its test and a recipe that trains it, into the working directory.",
        allow_abbrev=False,
    )
    new.set_defaults(run=_new)
    new.add_argument("name", metavar="NAME", help="its name, such as treasure_hunt")
    serving = commands.add(
        "env-serve", _serve, f"Host an environment for env.servers of a recipe: {_OVERRIDING}.", overrides=True
    )
    serving.add_argument("env", metavar="ENV", help=_ENV)
    serving.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that play (default: the cores)")
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)"
    )
    serving.add_argument("--port", type=int, default=8700, help="port (default: 8700; 0: any that is free)")
    again = actions.add_parser(
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
    from agentrl.recipe.registry import names, resolve
    from agentrl.rollout.faults import environment_failures
    from agentrl.types import Need

    for name in names("agentrl.envs"):
        try:
            with environment_failures():
                base: Any = make_env(name).unwrapped
                described = describe(base)
        except UserError:  # it needs options, or fails
            try:
                what = first_line(resolve(name, group="agentrl.envs", field="env.id"))
                table.add_row(name, what, "as its options say", "", "")
            except UserError as error:  # a package that it is made of is missing
                table.add_row(name, Text(str(error)))
            continue
        keys, rewards = ("yes" if need in described.needs else "no" for need in (Need.STATE_KEYS, Need.TURN_REWARDS))
        tools = ", ".join(tool["function"]["name"] for tool in described.tools)
        table.add_row(name, first_line(type(base)), tools, keys, rewards)
    Console().print(table)


def _play(options: argparse.Namespace, rest: list[str]) -> None:
    recipe = _recipe(options.env, rest)
    from agentrl.report.play import nth_task, play
    from agentrl.rollout.faults import environment_failures

    with environment_failures():
        env = recipe.env.make()
        task = nth_task(env, options.split, options.task, seed=recipe.seed)
    with _printing_traceback(env) as console:
        for line in play(env, task, _ask):
            console.print(line)


def _check(options: argparse.Namespace, rest: list[str]) -> None:
    from agentrl.errors import ConfigError
    from agentrl.testing import check_env

    if options.seeds < 1:
        raise ConfigError(f"--seeds: expected at least 1, got {options.seeds}")
    config = _recipe(options.env, rest).env

    def make() -> "Env":
        return config.make()

    make.__name__ = config.id
    Console(soft_wrap=True).print(str(check_env(make, seeds=range(options.seeds))))


def _serve(options: argparse.Namespace, rest: list[str]) -> None:
    from agentrl.errors import ConfigError

    if options.workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {options.workers}")
    config = _recipe(options.env, rest).env
    import agentrl.env.remote  # noqa: F401 - names the package that may be missing
    from agentrl.rollout.env_server import run

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as by Ctrl-C
    say = Console(soft_wrap=True).print
    run(config, num_workers=options.workers, host=options.host, port=options.port, say=say)


def _new(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.cli.new import write_new_env

    Console(soft_wrap=True).print(write_new_env(options.name, Path()))


def _recipe(env: str, rest: list[str]) -> "Recipe":
    """Return the recipe that is named, or the default one with the environment that is."""
    from agentrl.recipe.config import load_recipe

    if env.endswith((".yaml", ".yml")) or (Path(env) / "config.yaml").is_file():
        recipe, _ = load(env, rest)
        _check_has_env(recipe, f"`agentrl agent try {env}` plays a task with it")
        return recipe
    return load_recipe(None, [f"--env.id={env}", *rest])


def _check_has_env(recipe: "Recipe", fix: str) -> None:
    from agentrl.errors import ConfigError

    if recipe.agent is not None:
        raise ConfigError(f"agent: {recipe.agent.name} plays in place of an environment; {fix}")


def _ask() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):  # at the prompt nothing hangs: whoever plays has had enough
        return None


def _replay(options: argparse.Namespace, _: list[str]) -> None:
    recipe, _folder = load(options.target, [])
    _check_has_env(recipe, f"`agentrl show {options.target} --trajectory {options.episode}` prints what it said")
    from agentrl.report.play import find, replay

    record = find(options.target, options.episode)
    env = recipe.env.make(record.stage)
    with _printing_traceback(env) as console:
        for line in replay(env, record):
            console.print(line)
    console.print(Text(f"It was recorded to end like this: {record.stop_reason} {record.error or ''}", "dim"))


@contextmanager
def _printing_traceback(env: "Env") -> Iterator[Console]:
    """Close an environment in the end; if it raises, print the traceback and exit with 1."""
    from agentrl.data.plain import words_of
    from agentrl.env import close_env
    from agentrl.rollout.faults import describe_fault

    console = Console(soft_wrap=True)
    try:
        try:
            yield console
        finally:
            close_env(env)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        console.print(Text(describe_fault(error).traceback or words_of(error), "red"))
        if isinstance(error, KeyboardInterrupt):  # it hung
            raise
        sys.exit(1)
