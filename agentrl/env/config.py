"""The recipe's section about the environment."""

from typing import Any

import gymnasium as gym
from pydantic import BaseModel, ConfigDict

from agentrl.env.make import make_env
from agentrl.types import Message


class EnvConfig(BaseModel):
    """Which environment the agent lives in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = "calculator"
    """An installed name (`agentrl envs` lists them), `module:Class`, or a Gymnasium id."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""

    wrappers: tuple[dict[str, Any], ...] = ()
    """What is put around it, the first innermost: each an `id`, an installed name or `module:Class` of a
    `gymnasium.Wrapper`, and beside it keyword arguments of its constructor."""

    def make(self) -> gym.Env[tuple[Message, ...], str | Message]:
        """Return a new environment.

        Raises:
            ConfigError: see `make_env`.
        """
        return make_env(self.id, self.options, wrappers=self.wrappers)
