from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Need, TrajectoryGroup, assign_credit
from agentrl.errors import CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.action_values import ActionValues
from tests.support.credit import (
    Rows,
    assert_close,
    batches,
    by_turn,
    discounts,
    truncated_batches,
    unflatten,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick

# In S, x is followed by 1 and 0, y twice by 0.
FOUR = make_group(
    [[1], [0], [0], [0]], state_keys=[["S"], ["S"], ["S"], ["S"]], action_keys=[["x"], ["x"], ["y"], ["y"]]
)


def undiscounted(lam: float = 1, **fields: Any) -> ActionValues:
    """Return the scheme on plain returns, whose numbers can be derived by hand."""
    return ActionValues(gamma=1, lam=lam, **fields)


@each(
    ("fields", "expected"),
    [
        # V .25, pool .25. Q(x) = (2 * .5 + .25) / 3 = .416667, Q(y) = (0 + .25) / 3 = .083333.
        ({}, [0.166667, 0.166667, -0.166667, -0.166667]),
        ({"shrinkage": 0}, [0.25, 0.25, -0.25, -0.25]),
        # Q(x) = (2 * .5 + 2 * .25) / 4
        ({"shrinkage": 2}, [0.125, 0.125, -0.125, -0.125]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: list[float]) -> None:
    [found] = by_turn(undiscounted(**fields), FOUR)
    assert_close(found, [[a] for a in expected])


def test_values_of_states_are_shrunk_to_the_pool_and_of_actions_to_their_state() -> None:
    # G: S 3, 1; T 2, 0. The pool is 1.5. V(S) = (4 + 1.5) / 3 = 11/6, V(T) = (2 + 1.5) / 3 = 7/6.
    # Q: S, x (3 + 11/6) / 2 = 29/12; S, y (1 + 11/6) / 2 = 17/12; T, x (2 + 7/6) / 2 = 19/12; T, y 7/12.
    group = make_group([[1, 2], [1, 0]], state_keys=[["S", "T"], ["S", "T"]], action_keys=[["x", "x"], ["y", "y"]])
    [found] = by_turn(undiscounted(), group)
    assert_close(found, [[7 / 12, 5 / 12], [-5 / 12, -7 / 12]])


def test_with_lambda_0_later_chance_is_averaged_out_before_actions_are_compared() -> None:
    # At T, where x and y lead alike, 6 or 0 follow by chance: 6 once after x, thrice after y. x pays 1 by itself.
    group = make_group(
        [[1, 6], [1, 0], [1, 0], [0, 6], [0, 6], [0, 6]],
        state_keys=[["S", "T"]] * 6,
        action_keys=[["x", "z"]] * 3 + [["y", "z"]] * 3,
    )

    def at_s(lam: float) -> list[float]:
        return [row[0] for row in by_turn(undiscounted(lam=lam, shrinkage=0), group)[0]]

    # V(S) = 4.5, V(T) = 4. What followed x is 1 + 2 on average, y 6; the step to T is worth 1 + 4 and 4.
    np.testing.assert_allclose(at_s(1), np.repeat([-1.5, 1.5], 3), rtol=1e-6)
    np.testing.assert_allclose(at_s(0), np.repeat([0.5, -0.5], 3), rtol=1e-6)
    np.testing.assert_allclose(at_s(0.5), np.repeat([-0.5, 0.5], 3), rtol=1e-6)


@pytest.mark.parametrize(
    "fields",
    first_quick(
        [
            {},
            {"lam": 0},
            {"lam": 1},
            {"shrinkage": 0},
            {"lone": "keep"},
            {"lone": "drop"},
        ]
    ),
)
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(ActionValues(**fields, gamma=0.5), outcome_level=False, scale_equivariant=True)


def slow_reference(scheme: ActionValues, group: TrajectoryGroup) -> Rows:
    """Compute the same in exact fractions."""
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    gamma, lam, kappa = Fraction(scheme.gamma), Fraction(scheme.lam), Fraction(scheme.shrinkage)
    rewards = [[Fraction(turn.reward) for turn in t.turns] for t in group.trajectories]
    states = [[turn.state_key for turn in t.turns] for t in group.trajectories]
    actions = [turn.action_key for t in group.trajectories for turn in t.turns]

    def to_go(row: list[Fraction], factor: Fraction) -> list[Fraction]:
        return [sum((factor**n * x for n, x in enumerate(row[k:])), Fraction()) for k in range(len(row))]

    def average(among: list[Fraction]) -> Fraction:
        return sum(among, Fraction()) / len(among)

    plain = [(state, g) for i, row in enumerate(rewards) for state, g in zip(states[i], to_go(row, gamma), strict=True)]

    def plain_value(state: str | None) -> Fraction:
        here = [g for other, g in plain if other == state]
        return average(here or [g for _, g in plain])

    returns = []
    for trajectory, row, places in zip(group.trajectories, rewards, states, strict=True):
        left_in = trajectory.turns[-1].next_state_key
        last = plain_value(places[-1] if left_in is None else left_in) if trajectory.truncated else Fraction()
        values = [*map(plain_value, places), last]
        deltas = [r + gamma * after - before for r, (before, after) in zip(row, pairwise(values), strict=True)]
        residuals = to_go(deltas, gamma * lam)
        # with lam 1 these are the returns themselves: also of a truncated trajectory, which then goes on from nothing
        returns += to_go(row, gamma) if lam == 1 else [v + a for v, a in zip(values[:-1], residuals, strict=True)]
    visits = list(zip([state for row in states for state in row], actions, returns, strict=True))
    pool, found = average(returns), []
    for state, action, _ in visits:
        at_state = [(other, g) for s, other, g in visits if s == state]
        here = [g for _, g in at_state]
        after = {a: [g for other, g in at_state if other == a] for a, _ in at_state}
        value = (sum(here) + kappa * pool) / (len(here) + kappa)
        advantage = (sum(after[action]) + kappa * value) / (len(after[action]) + kappa) - value
        found.append(float(advantage))
    return unflatten(group, found)


@settings(max_examples=40, deadline=None)
@given(
    groups=truncated_batches(),
    gamma=discounts,
    lam=st.sampled_from([0.0, 0.25, 1.0]),
    shrinkage=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = ActionValues(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@settings(max_examples=20, deadline=None)
@given(groups=batches(), shrinkage=st.sampled_from([0.0, 1.0]))
def test_the_same_action_in_the_same_state_has_one_advantage(groups: list[TrajectoryGroup], **fields: Any) -> None:
    for group, rows in zip(groups, by_turn(ActionValues(**fields, lone="keep"), *groups), strict=True):
        shared: dict[Any, set[float]] = {}
        for trajectory, row in zip(group.trajectories, rows, strict=True):
            for turn, advantage in zip(trajectory.turns, row, strict=True):
                shared.setdefault((turn.state_key, turn.action_key), set()).add(advantage)
        assert all(len(advantages) == 1 for advantages in shared.values())


def test_an_action_that_all_took_is_credited_for_its_state_being_unlike_the_pool() -> None:
    # G: S 4, 0, 9; T 1, 0, 2. The pool is 16/6, V(S) = (13 + 16/6) / 4, Q(S, x) = (13 + V(S)) / 4.
    group = make_group(
        [[3, 1], [0, 0], [7, 2]], state_keys=[["S", "T"]] * 3, action_keys=[["x", "x"], ["x", "y"], ["x", "x"]]
    )
    [found], value = by_turn(undiscounted(), group), (13 + 16 / 6) / 4
    assert_close([[row[0]] for row in found], [[(13 + value) / 4 - value]] * 3)


def test_chance_after_a_rare_action_is_shrunk() -> None:
    # y once and x three times, both .75 away from V = .75; without shrinkage y would stand out threefold
    keys = [["S"]] * 4
    group = make_group([[0], [0], [0], [3]], state_keys=keys, action_keys=[["x"], ["x"], ["x"], ["y"]])
    [plain], [shrunk] = by_turn(undiscounted(shrinkage=0), group), by_turn(undiscounted(), group)
    assert_close(plain, [[-0.75], [-0.75], [-0.75], [2.25]])
    # Q(x) = (0 + .75) / 4, Q(y) = (3 + .75) / 2: x keeps 3/4 of its difference, y 1/2
    assert_close(shrunk, [[-0.5625], [-0.5625], [-0.5625], [1.125]])


def test_actions_spelled_differently_are_not_averaged() -> None:
    group = make_group([[1], [0], [0], [0]], state_keys=[["S"]] * 4, action_keys=[["w"], ["x"], ["y"], ["z"]])
    [found] = by_turn(ActionValues(shrinkage=0), group)
    assert found == [[0.75], [-0.25], [-0.25], [-0.25]]


def test_states_and_actions_are_compared_within_their_group_alone() -> None:
    other = make_group([[5], [9]], state_keys=[["S"], ["S"]], action_keys=[["x"], ["y"]], group_id="other")
    assert by_turn(ActionValues(), FOUR, other) == by_turn(ActionValues(), FOUR) + by_turn(ActionValues(), other)


def test_twice_the_rewards_are_twice_the_advantages() -> None:
    twice = make_group([[2], [0], [0], [0]], state_keys=[["S"]] * 4, action_keys=[["x"], ["x"], ["y"], ["y"]])
    np.testing.assert_allclose(by_turn(ActionValues(), twice), 2 * np.array(by_turn(ActionValues(), FOUR)), rtol=1e-6)


@pytest.mark.parametrize(("field", "words"), [("state_key", "state key"), ("action_key", "action key")])
def test_a_missing_key_is_named_by_trajectory_and_turn(field: str, words: str) -> None:
    with pytest.raises(CreditError, match=rf"trajectory g/2, turn 0: no {words}, which this scheme needs"):
        assign_credit(ActionValues(), [without(FOUR, 2, 0, field)])
    assert ActionValues().requirements() == {Need.STATE_KEYS, Need.ACTION_KEYS}


@each("fields", [{"gamma": 2}, {"shrinkage": -1}, {"shrinkage": float("inf")}, {"normalize": "std"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ActionValues.model_validate(fields)
