"""Rewards of whole groups, from the functions that a recipe names."""

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from agentrl.data.plain import abbreviated
from agentrl.env import MAX_REWARD
from agentrl.env.background import awaited
from agentrl.env.message_env import as_number
from agentrl.errors import ConfigError
from agentrl.learn.interrupt import unless_interrupted
from agentrl.rollout.env_driver import EnvThread
from agentrl.rollout.faults import RaisedError
from agentrl.rollout.group_rewards import OFFERED, GroupReward
from agentrl.types import Need, Trajectory, TrajectoryGroup, Turn, valid_trajectories


def reward_groups(
    groups: Sequence[TrajectoryGroup], rewards: Sequence[GroupReward], *, timeout_s: float
) -> list[TrajectoryGroup]:
    """Return the groups with group rewards added to the last turns; failed episodes are left out.

    Args:
        groups: complete groups.
        rewards: functions of a group.
        timeout_s: deadline of each call, in seconds.

    Raises:
        ConfigError: if a function raises, does not return in time, or does not return a number for each episode.
        TrainingError: if the update was interrupted.
    """
    functions = [(reward, reward.function()) for reward in rewards]
    return asyncio.run(unless_interrupted(_all_rewarded(groups, functions, timeout_s))) if functions else list(groups)


async def _all_rewarded(
    groups: Sequence[TrajectoryGroup], functions: Sequence[tuple[GroupReward, partial[Any]]], timeout_s: float
) -> list[TrajectoryGroup]:
    rewarded = []
    thread = EnvThread()
    try:
        for group in groups:
            columns = {}
            for reward, function in functions if group.valid else ():
                ask = partial(_numbers, reward, function, group.valid, timeout_s)
                try:
                    columns[reward.label] = await thread.call(ask, timeout_s=timeout_s)
                except TimeoutError as error:
                    raise ConfigError(
                        f"{reward.where} did not return within rollout.env_timeout_s: {timeout_s:g} s"
                    ) from error
                except RaisedError as error:
                    words = (
                        error.raised if isinstance(error.raised, ConfigError) else f"{reward.where} raised {error.line}"
                    )
                    raise ConfigError(str(words)) from error
            rewarded.append(_rewarded(group, columns) if columns else group)
    finally:
        thread.close()  # and not waited for: a function of numbers leaves nothing open
    return rewarded


def subtract_kl(groups: Sequence[TrajectoryGroup], *, coefficient: float) -> list[TrajectoryGroup]:
    """Return the groups as a credit scheme sees them if the divergence from the reference is part of the reward.

        reward_k - coefficient * sum over the tokens t of turn k of (behavior_logprob_t - reference_logprob_t)

    The mean of the sum is the divergence of the policy that sampled (k1). Source: arXiv 2203.02155, eq. 2; RLOO,
    2402.14740; REINFORCE++, 2501.03262. These take it token by token, or from the whole episode.

    Raises:
        ConfigError: if the reference's log-probabilities were not measured.
    """
    return [
        replace(group, trajectories=tuple(t if t.failed else _penalised(t, coefficient) for t in group.trajectories))
        for group in groups
    ]


def kl_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the mean log-ratio of sampler and reference, in nats a token, of groups whose reference was measured."""
    differences = [x for t in valid_trajectories(groups) for turn in t.turns for x in _log_ratios(turn)]
    return {"kl/reference": sum(differences) / len(differences)} if differences else {}


def _penalised(trajectory: Trajectory, coefficient: float) -> Trajectory:
    turns = (replace(turn, reward=turn.reward - coefficient * sum(_log_ratios(turn))) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def _log_ratios(turn: Turn) -> list[float]:
    reference = turn.signals.get(Need.REFERENCE_LOGPROBS)
    if reference is None:
        raise ConfigError(
            "loss.kl_estimator: k1_reward, and turns have no reference_logprobs; measure the signals of `LossConfig.needs`"
        )
    return [behavior - other for behavior, other in zip(turn.behavior_logprobs, reference, strict=True)]


def _rewarded(group: TrajectoryGroup, columns: Mapping[str, Sequence[float]]) -> TrajectoryGroup:
    valid = group.valid
    parts = [{name: column[index] for name, column in columns.items()} for index in range(len(valid))]
    added = {t.trajectory_id: _added(t, amounts) for t, amounts in zip(valid, parts, strict=True)}
    return replace(group, trajectories=tuple(added.get(t.trajectory_id, t) for t in group.trajectories))


def _numbers(
    reward: GroupReward, function: partial[Any], trajectories: Sequence[Trajectory], timeout_s: float
) -> list[float]:
    """Return the reward of each episode; the function gets copies, and a coroutine is run."""
    takes = inspect.signature(function).parameters
    columns = {
        "completions": [str(t.turns[-1].message.get("content") or "") for t in trajectories],
        "messages": [[m for turn in t.turns for m in (*turn.observation, turn.message)] for t in trajectories],
        "num_tokens": [t.num_action_tokens for t in trajectories],
        "rewards": [t.reward for t in trajectories],
        "successes": [bool(t.reported("success")) for t in trajectories],
        "truncated": [t.truncated for t in trajectories],
    }
    given = copy.deepcopy({name: columns[name] for name in OFFERED if name in takes} | function.keywords)
    returned = awaited(function(**given), reward.where, timeout_s=timeout_s)
    scores = list(map(as_number, islice(returned, len(trajectories) + 1)))
    numbers = [reward.weight * score for score in scores if score is not None]
    is_each = len(scores) == len(numbers) == len(trajectories)
    if not is_each or not all(abs(number) <= MAX_REWARD for number in numbers):
        raise ConfigError(
            f"{reward.where} returned {abbreviated(returned)}; return a finite number for each of {len(trajectories)} "
            f"episodes, at most {MAX_REWARD:g} in size with its weight"
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
