"""Rewards that need an episode's tokens or its siblings, which no environment sees: added to groups that are complete."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import ConfigError
from agentrl.plain_data import abbreviated, line_of
from agentrl.registry import resolve, suggest
from agentrl.types import Trajectory, TrajectoryGroup

_OFFERED = ("completions", "messages", "num_tokens", "rewards", "successes", "truncated")


class GroupReward(BaseModel):
    """A function of all episodes of a group, and what it counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reward: str
    """`module:function`, or an installed one. By name it takes lists with an entry for each episode: `num_tokens`, `rewards`,
    `completions`, `messages`, `successes`, `truncated`; it returns such a list."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """What each number is multiplied by, before it is added to the reward of the last turn."""
    name: str | None = None
    """Of the component. None: the function's."""
    options: dict[str, Any] = {}
    """Further arguments of the function."""

    @property
    def label(self) -> str:
        """Name of the component."""
        return self.name or self.reward.rpartition(":")[2]

    def function(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            ConfigError: where there is none that takes these arguments.
        """
        field = "rollout.group_rewards"
        found: Any = resolve(self.reward, group="agentrl.group_rewards", field=field, kind="function")
        known = dict(inspect.signature(found).parameters) if inspect.isfunction(found) else {}
        if not known.keys() & set(_OFFERED):  # nothing else that a recipe names is called
            raise ConfigError(
                f"{field}: {self.reward!r} takes none of {', '.join(_OFFERED)}, and is no reward of groups"
            )
        for name in self.options:
            if name not in known or name in _OFFERED:
                raise ConfigError(f"{field}: {self.reward!r} has no option {name!r}.{suggest(name, known)}")
        for name, parameter in known.items():
            if parameter.default is parameter.empty and name not in (*_OFFERED, *self.options):
                raise ConfigError(f"{field}: {self.reward!r} asks for {name!r}; set it in its options")
        function: Callable[..., Any] = found
        return function

    @model_validator(mode="after")
    def _exists(self) -> Self:
        self.function()
        return self


def reward_groups(groups: Sequence[TrajectoryGroup], rewards: Sequence[GroupReward]) -> list[TrajectoryGroup]:
    """Return groups whose last turns carry the rewards of groups too; episodes that failed are no siblings.

    Raises:
        ConfigError: in the words of what a function raised, and for what is not a finite number for each episode.
    """
    functions = [(reward, reward.function()) for reward in rewards]
    return [_rewarded(group, functions) for group in groups] if functions else list(groups)


def _rewarded(group: TrajectoryGroup, functions: Sequence[tuple[GroupReward, Callable[..., Any]]]) -> TrajectoryGroup:
    valid = group.valid
    if not valid:
        return group
    columns = {
        reward.label: [reward.weight * n for n in _numbers(reward, function, valid)] for reward, function in functions
    }
    parts = [{name: column[index] for name, column in columns.items()} for index in range(len(valid))]
    added = {t.trajectory_id: _added(t, amounts) for t, amounts in zip(valid, parts, strict=True)}
    return replace(group, trajectories=tuple(added.get(t.trajectory_id, t) for t in group.trajectories))


def _numbers(reward: GroupReward, function: Callable[..., Any], trajectories: Sequence[Trajectory]) -> list[float]:
    """Return a number for each episode."""
    where = f"rollout.group_rewards: {reward.reward!r}"
    takes = inspect.signature(function).parameters
    columns = {
        "completions": [str(t.turns[-1].message.get("content") or "") for t in trajectories],
        "messages": [[m for turn in t.turns for m in (*turn.observation, turn.message)] for t in trajectories],
        "num_tokens": [t.num_action_tokens for t in trajectories],
        "rewards": [t.reward for t in trajectories],
        "successes": [t.metrics.get("success", 0.0) > 0 for t in trajectories],
        "truncated": [t.truncated for t in trajectories],
    }
    try:
        returned = function(**{name: columns[name] for name in _OFFERED if name in takes}, **reward.options)
        numbers = [float(number) for number in returned]
    except Exception as error:  # a stranger's function may raise anything
        raise ConfigError(f"{where} raised {line_of(error)}") from error
    if len(numbers) != len(trajectories) or not all(map(math.isfinite, numbers)):
        raise ConfigError(
            f"{where} returned {abbreviated(returned)}; return a finite number for each of {len(trajectories)} episodes"
        )
    return numbers


def _added(trajectory: Trajectory, amounts: Mapping[str, float]) -> Trajectory:
    *turns, last = trajectory.turns
    before = last.extras.get("reward_components")
    components = {**(before if isinstance(before, dict) else {})}
    for name, amount in amounts.items():
        components[name] = components.get(name, 0.0) + amount
    extras = {**last.extras, "reward_components": components}
    last = replace(last, reward=last.reward + sum(amounts.values()), extras=extras)
    return replace(trajectory, turns=(*turns, last))


def shorter(num_tokens: list[int], successes: list[bool]) -> list[float]:
    """Return more for an episode that is shorter than its siblings.

        r_i = l_i where episode i is a success, else min(0, l_i)        l_i = 0.5 - (n_i - min n) / (max n - min n)

    Kimi k1.5's length reward, arXiv 2501.12599, section 2.3.3; n_i counts sampled tokens. Where all have one length, it is 0.

    Args:
        num_tokens: of each episode.
        successes: whether each is one.
    """
    least, most = min(num_tokens), max(num_tokens)
    if least == most:
        return [0.0] * len(num_tokens)
    lengths = [0.5 - (n - least) / (most - least) for n in num_tokens]
    return [length if success else min(0.0, length) for length, success in zip(lengths, successes, strict=True)]


def overlong_tokens(num_tokens: list[int], max_length: int, buffer: int) -> list[float]:
    """Return DAPO's soft punishment of long episodes, in tokens, of those too that a limit cut off.

    arXiv 2503.14476, equation 13: 0 up to `max_length - buffer`, from there down to -1 at `max_length`, and -1 beyond.

    Args:
        num_tokens: of each episode.
        max_length: from which on an episode earns -1.
        buffer: tokens over which the punishment grows.
    """
    return [max(-1.0, min(0.0, (max_length - buffer - n) / buffer)) for n in num_tokens]
