"""The environment of a run with the entries of `env.schedule`."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from agentrl.config import Recipe
from agentrl.env import EnvDescription
from agentrl.errors import ConfigError, UserError
from agentrl.rollout import describe_env
from agentrl.rollout.env_calls import MakeEnv
from agentrl.rollout.tasks import Stage


def makers(recipe: Recipe) -> tuple[MakeEnv, ...]:
    """Return what makes an environment with each entry."""
    return tuple(partial(recipe.env.make, stage) for stage in range(1, len(recipe.env.schedule) + 1))


def describe_stages(recipe: Recipe, own: EnvDescription, runner: asyncio.Runner) -> tuple[Stage, ...]:
    """Make the environment once with each entry, and look at it.

    Args:
        recipe: of the run.
        own: what the environment offers with `env.options` alone.
        runner: event loop to look on.

    Raises:
        UserError: naming the entry with which it cannot be made, has no training tasks, or offers something else.
    """
    found = []
    for place, (entry, make_env) in enumerate(zip(recipe.env.schedule, makers(recipe), strict=True)):
        with naming_stage(place):
            description = runner.run(describe_env(make_env, timeout_s=recipe.rollout.env_timeout_s))
            if (description.needs, _names(description)) != (own.needs, _names(own)):
                raise ConfigError(
                    "the environment has other tools, or other data for credit schemes, than with env.options alone; schedule "
                    "what changes neither"
                )
            if description.num_tasks.train == 0:
                raise ConfigError("the environment has no training tasks (num_tasks('train') returned 0)")
        found.append(Stage(from_step=entry.from_step, num_train=description.num_tasks.train))
    return tuple(found)


@contextmanager
def naming_stage(place: int) -> Iterator[None]:
    """Say in errors at which entry of the schedule they occurred."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"env.schedule.{place}: {error}") from error


def _names(description: EnvDescription) -> list[str]:
    return [tool["function"]["name"] for tool in description.tools]
