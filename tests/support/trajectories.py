"""Trajectories of random tokens, some of which rewrite their history, and batches of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentrl.chat import TurnTokens
from agentrl.credit import Credit
from agentrl.learn.batch import Batch, make_batch
from agentrl.learn.tokens import Aggregation, RatioUnit
from agentrl.rollout.demonstrations import Demonstration
from agentrl.types import StopReason, Trajectory, TrajectoryGroup, Turn, context_of

VOCABULARY = 261


def turn(
    observation: list[int], action: list[int], *, extends: bool = True, logprobs: list[float] | None = None
) -> Turn:
    return Turn(
        observation_ids=tuple(observation),
        extends=extends,
        action_ids=tuple(action),
        behavior_logprobs=tuple(logprobs or [-5.0 - 0.01 * i for i in range(len(action))]),
        versions=(0,) * (len(action) // 2) + (1,) * (len(action) - len(action) // 2),
        reward=0.0,
    )


def trajectory(number: int, *turns: Turn, group: str = "g") -> Trajectory:
    return Trajectory(
        group_id=group,
        trajectory_id=f"{group}/{number}",
        env_id="e",
        seed=0,
        turns=turns,
        stop_reason=StopReason.TERMINATED,
    )


def some_ids(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return [int(token) for token in rng.integers(VOCABULARY, size=int(rng.integers(low, high)))]


def drawn(
    number: int, rng: np.random.Generator, *, fork: bool, prompt: Sequence[int] = (), group: str = "g"
) -> Trajectory:
    """Draw a trajectory of 4 turns, the third of which begins a new context where it forks."""
    turns = []
    for k in range(4):
        begins = k == 0 or (fork and k == 2)
        action = some_ids(rng, 1, 6)
        logprobs = (-5.5 + 0.05 * rng.standard_normal(len(action))).tolist()
        observation = [*(prompt if begins else ()), *some_ids(rng, 2, 8)]
        turns.append(turn(observation, action, extends=not begins or k == 0, logprobs=logprobs))
    return trajectory(number, *turns, group=group)


def with_parents(parents: Sequence[int | None], *, sizes: Sequence[tuple[int, int]] = (), seed: int = 0) -> Trajectory:
    """Draw a trajectory whose turns have these parents; a turn without one begins a context.

    `sizes` are the numbers of observed and sampled tokens of each turn; by default a few.
    """
    rng = np.random.default_rng(seed)
    turns = []
    for number, parent in enumerate(parents):
        observed, sampled = sizes[number] if sizes else (int(rng.integers(2, 8)), int(rng.integers(1, 6)))
        new = turn(*(rng.integers(VOCABULARY, size=size).tolist() for size in (observed, sampled)))
        logprobs = tuple((-5.5 + 0.05 * rng.standard_normal(sampled)).tolist())
        turns.append(replace(new, behavior_logprobs=logprobs, extends=parent is not None, parent=parent))
    return trajectory(0, *turns)


def without_parents(played: Trajectory) -> Trajectory:
    """Return the same contexts and actions, each turn with a context of its own."""
    turns = tuple(
        replace(turn, extends=False, parent=None, observation_ids=context_of(played.turns, number))
        for number, turn in enumerate(played.turns)
    )
    return replace(played, turns=turns)


def some_groups(sizes: Sequence[int], seed: int = 0) -> list[TrajectoryGroup]:
    """Draw groups of these sizes: all rows share a system prompt, those of a group a prompt; every other one forks.

    Some trajectories begin with the turn of the one before them, and some say all over again what it said.
    """
    rng = np.random.default_rng(seed)
    system, groups = some_ids(rng, 1, 6), []
    for number, size in enumerate(sizes):
        prompt, members = [*system, *some_ids(rng, 1, 9)], list[Trajectory]()
        for index in range(size):
            member = drawn(index, rng, fork=bool(rng.integers(2)), prompt=prompt, group=f"g{number}")
            shared = int(rng.choice([0, 1, 4], p=[0.5, 0.3, 0.2])) if members else 0
            turns = (*members[-1].turns[:shared], *member.turns[shared:]) if shared else member.turns
            members.append(replace(member, turns=turns))
        groups.append(TrajectoryGroup(group_id=f"g{number}", trajectories=tuple(members)))
    return groups


def some_demonstrations(num: int, seed: int = 8) -> list[Demonstration]:
    """Draw demonstrations, some of which rewrite their history."""
    found = []
    for t in some_groups([num], seed)[0].trajectories:
        turns = [
            TurnTokens(observation_ids=k.observation_ids, extends=k.extends, action_ids=k.action_ids) for k in t.turns
        ]
        found.append(Demonstration(turns=tuple(turns), is_over=True))
    return found


def some_credits(trajectories: Sequence[Trajectory], seed: int = 0) -> list[Credit]:
    """Draw an advantage for every token; the first trajectory keeps only some of its own."""
    rng = np.random.default_rng(seed)
    return [
        Credit.from_tokens(
            t, rng.standard_normal(t.num_action_tokens), keep_T=rng.random(t.num_action_tokens) < (1.0 if i else 0.6)
        )
        for i, t in enumerate(trajectories)
    ]


def some(num: int = 5) -> tuple[list[Trajectory], list[Credit]]:
    """Draw trajectories that share nothing, every other one of which forks, and their credit."""
    rng = np.random.default_rng(0)
    trajectories = [drawn(i, rng, fork=i % 2 == 1) for i in range(num)]
    return trajectories, some_credits(trajectories)


def batch_of(
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    *,
    unit: RatioUnit = "trajectory",
    aggregation: Aggregation = "trajectory-mean",
) -> Batch:
    return make_batch(trajectories, credits, unit=unit, aggregation=aggregation)


FORKED = trajectory(0, turn([1, 2], [3, 4]), turn([5], [6]), turn([7, 8, 9], [10], extends=False), turn([11], [12, 13]))
