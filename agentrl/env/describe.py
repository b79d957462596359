"""What an environment says of itself, looked at once."""

from dataclasses import dataclass
from typing import Any

from agentrl.env.message_env import MessageEnv
from agentrl.env.tools import tool_schemas
from agentrl.errors import EnvironmentFailure
from agentrl.plain_data import PlainDataError, abbreviated
from agentrl.types import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvDescription:
    """What an environment offers to credit schemes and to the model."""

    needs: frozenset[Need]
    """Data that credit schemes may read from it."""
    tools: list[dict[str, Any]]
    """JSON schemas of its tools."""


def describe(env: MessageEnv) -> EnvDescription:
    """Return what an environment offers.

    Raises:
        EnvironmentFailure: naming what `provides()` or `tools` should be.
    """
    name, provided = type(env).__name__, env.provides()
    if not isinstance(provided, set | frozenset) or not all(need in list(Need) for need in provided):
        raise EnvironmentFailure(
            f"environment {name}: provides() returned {abbreviated(provided)}; return a frozenset of agentrl.Need"
        )
    try:
        return EnvDescription(needs=frozenset(map(Need, provided)), tools=tool_schemas(env.tools))
    except PlainDataError as error:
        raise EnvironmentFailure(f"environment {name}: {error}") from error
