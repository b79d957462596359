"""The recipe's section about the environment."""

import json
from itertools import pairwise
from typing import Annotated, Any, Self

import gymnasium as gym
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from agentrl.env.make import make_env
from agentrl.errors import ConfigError
from agentrl.plain_data import PlainDataError, plain_data
from agentrl.types import Amount, Message


def _as_kept(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as a run's folder keeps them: a run is resumed in the environment in which it began."""
    try:
        kept: dict[str, Any] = plain_data(options)
        json.dumps(options, allow_nan=False, default=str)
    except PlainDataError as error:
        raise PydanticCustomError("plain", "{words}", {"words": str(error)}) from error
    except ValueError:
        raise PydanticCustomError("finite", "expected finite numbers") from None
    return kept


Options = Annotated[dict[str, Any], AfterValidator(_as_kept)]


class StageConfig(BaseModel):
    """Options of the environment that hold in training from a step on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    from_step: Amount
    """The first step whose groups are started with them."""
    options: Options
    """Laid over `env.options`, until the next entry."""


class EnvConfig(BaseModel):
    """Which environment the agent lives in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = "calculator"
    """An installed name (`agentrl envs` lists them), `module:Class`, or a Gymnasium id."""
    options: Options = {}
    """Keyword arguments of the environment's constructor."""

    wrappers: tuple[Options, ...] = ()
    """What is put around it, the first innermost: each an `id`, an installed name or `module:Class` of a
    `gymnasium.Wrapper`, and beside it keyword arguments of its constructor."""

    schedule: tuple[StageConfig, ...] = ()
    """Options that change with the step, in training alone: a schedule of difficulty."""

    def make(self, stage: int = 0) -> gym.Env[tuple[Message, ...], str | Message]:
        """Return a new environment.

        Args:
            stage: with the options of an entry of the schedule, from 1. 0: with `options` alone.

        Raises:
            ConfigError: see `make_env`; and for an entry that there is not.
        """
        if not 0 <= stage <= (num := len(self.schedule)):
            raise ConfigError(f"env.schedule has no entry {stage}; it has {num}")
        options = self.options | (self.schedule[stage - 1].options if stage else {})
        return make_env(self.id, options, wrappers=self.wrappers)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for place, (one, following) in enumerate(pairwise(self.schedule)):
            if following.from_step <= one.from_step:
                raise ValueError(
                    f"schedule.{place + 1}.from_step: {following.from_step} does not come after {one.from_step}; order the "
                    "entries by their steps"
                )
        return self
