"""The recipe's section about the environment."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class EnvConfig(BaseModel):
    """Which environment the agent lives in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = "calculator"
    """An installed name (`agentrl envs` lists them), `module:Class`, or a Gymnasium id."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""
