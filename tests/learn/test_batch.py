"""Trajectories and their rows; trajectories for other tests. `T` trained tokens."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from agentrl.credit import Credit
from agentrl.errors import CreditError
from agentrl.learn.batch import Batch, make_batch, rows_of
from agentrl.learn.loss import Aggregation, RatioUnit
from agentrl.types import StopReason, Trajectory, TrajectoryGroup, Turn

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


def test_a_row_holds_all_tokens_and_the_mask_those_that_were_sampled() -> None:
    rows = rows_of(FORKED)
    assert [row.ids_L.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
    assert [row.positions_T.tolist() for row in rows] == [[2, 3, 5], [3, 5, 6]]


def test_every_sampled_token_is_trained_once_at_the_place_of_its_predecessor() -> None:
    plain = trajectory(1, turn([20, 21, 22], [23], logprobs=[-0.5]))
    credits = [Credit.from_tokens(FORKED, [1, 2, 3, 4, 5, 6]), Credit.from_tokens(plain, [7])]
    batch = batch_of([FORKED, plain], credits, unit="turn", aggregation="trajectory-mean")
    assert [row.tolist() for row in batch.rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23]]
    assert batch.row_T.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert batch.position_T.tolist() == [1, 2, 4, 2, 4, 5, 2]
    assert batch.target_T.tolist() == [3, 4, 6, 10, 12, 13, 23]
    assert batch.trajectory_T.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.turn_T.tolist() == [0, 0, 1, 2, 3, 3, 0]
    assert batch.version_T.tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert batch.behavior_T.tolist() == [-5.0, -5.01, -5.0, -5.0, -5.0, -5.01, -0.5]
    assert batch.advantage_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.unit_T.tolist() == [0, 0, 1, 2, 3, 3, 4]
    np.testing.assert_allclose(batch.weight_T, [1 / 12] * 6 + [1 / 2], rtol=1e-15)  # 1 / (N |y_i|), N = 2


def test_tokens_that_are_not_kept_stay_as_context_and_leave_every_denominator() -> None:
    keep = [True, False, True, True, False, True]
    batch = batch_of([FORKED], [Credit.from_tokens(FORKED, [1, 2, 3, 4, 5, 6], keep_T=keep)])
    assert [row.tolist() for row in batch.rows] == [row.ids_L.tolist() for row in rows_of(FORKED)]
    assert batch.target_T.tolist() == [3, 6, 10, 13]
    assert batch.position_T.tolist() == [1, 4, 2, 5]
    assert batch.advantage_T.tolist() == [1, 3, 4, 6]
    np.testing.assert_allclose(batch.weight_T, [1 / 4] * 4, rtol=1e-15)


def test_a_batch_knows_which_trajectories_are_of_one_group() -> None:
    trajectories = [trajectory(0, turn([1], [2]), group=group) for group in ("b", "a", "b")]
    assert batch_of(trajectories, [Credit.uniform(t, 1.0) for t in trajectories]).groups == [1, 0, 1]


def test_credit_that_does_not_fit_is_refused() -> None:
    short = trajectory(1, turn([1], [2]))
    with pytest.raises(CreditError, match="trajectory g/0 has 6 action tokens"):
        batch_of([FORKED], [Credit.uniform(short, 1.0)])


def test_rewards_keys_and_messages_are_no_part_of_a_batch() -> None:
    trajectories, credits = some(2)
    told = [
        replace(
            t,
            turns=tuple(replace(k, reward=9.0, state_key="s", observation=({"role": "user"},)) for k in t.turns),
            seed=5,
            metrics={"success": 1.0},
        )
        for t in trajectories
    ]
    one, other = batch_of(trajectories, credits), batch_of(told, credits)
    for field in fields(Batch):
        np.testing.assert_equal(getattr(other, field.name), getattr(one, field.name))
