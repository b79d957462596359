"""Rewards that need an episode's tokens or siblings, which no environment sees; added to complete groups."""

import inspect
from functools import partial
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import ConfigError
from agentrl.recipe.plugin import checked_options
from agentrl.recipe.registry import resolve

_Tokens = Annotated[int, Field(gt=0)]
OFFERED = ("completions", "messages", "num_tokens", "rewards", "successes", "truncated")


class GroupReward(BaseModel):
    """A reward function of all episodes of a group, and its weight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reward: str
    """`module:function`, or an installed one. By name it takes lists with an entry for each episode: `num_tokens`, `rewards`,
    `completions`, `messages`, `successes`, `truncated`; it returns such a list, and may be `async def`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of each number before it is added to the reward of the last turn."""
    name: str | None = None
    """Name of the reward component. None: the function's."""
    options: dict[str, Any] = {}
    """Further arguments of the function."""

    @property
    def label(self) -> str:
        """Name of the component."""
        return self.name or self.reward.rpartition(":")[2]

    @property
    def where(self) -> str:
        """Location in the recipe, for error messages."""
        return f"rollout.group_rewards: {self.reward!r}"

    def function(self) -> partial[Any]:
        """Return the function with its options, validated by their annotations.

        Raises:
            ConfigError: if there is no such function, or it takes other arguments.
        """
        found: Any = resolve(self.reward, group="agentrl.group_rewards", field="reward", kind="function")
        known = dict(inspect.signature(found).parameters) if inspect.isfunction(found) else {}
        if not known.keys() & set(OFFERED):  # a recipe may not call anything else
            raise ConfigError(f"{self.reward!r} takes none of {', '.join(OFFERED)}, and is no reward of groups")
        options = checked_options(found, self.options, told=OFFERED, where=repr(self.reward))
        for name, parameter in known.items():
            if parameter.default is parameter.empty and name not in (*OFFERED, *self.options):
                raise ConfigError(f"{self.reward!r} asks for {name!r}; set it in its options")
        return partial(found, **options)

    @model_validator(mode="after")
    def _exists(self) -> Self:
        function = self.function()
        if function.func is overlong_tokens:
            function(num_tokens=[])  # validates its options
        return self


def shorter(num_tokens: list[int], successes: list[bool]) -> list[float]:
    """Reward episodes that are shorter than their siblings.

        r_i = l_i if episode i is a success, else min(0, l_i)        l_i = 0.5 - (n_i - min n) / (max n - min n)

    Kimi k1.5's length reward, arXiv 2501.12599, section 2.3.3; n_i counts sampled tokens. It is 0 if all have one length.

    Args:
        num_tokens: sampled tokens of each episode.
        successes: whether each episode is a success.
    """
    least, most = min(num_tokens), max(num_tokens)
    if least == most:
        return [0.0] * len(num_tokens)
    lengths = [0.5 - (n - least) / (most - least) for n in num_tokens]
    return [length if success else min(0.0, length) for length, success in zip(lengths, successes, strict=True)]


def overlong_tokens(num_tokens: list[int], max_length: _Tokens, buffer: _Tokens) -> list[float]:
    """Return DAPO's soft punishment of long episodes, including those cut off by a limit.

    arXiv 2503.14476, equation 13: 0 up to `max_length - buffer`, from there down to -1 at `max_length`, and -1 beyond.

    Args:
        num_tokens: sampled tokens of each episode.
        max_length: length from which on an episode earns -1.
        buffer: number of tokens over which the punishment grows.
    """
    if buffer > max_length:
        raise ConfigError(f"overlong_tokens: buffer: {buffer} is more than max_length: {max_length}; lower it")
    return [max(-1.0, min(0.0, (max_length - buffer - n) / buffer)) for n in num_tokens]
