import itertools
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
from agentrl_credit.gigpo import GiGPO
from agentrl_credit.uniform import Uniform
from tests.support.credit import (
    F1,
    Rows,
    assert_close,
    batches,
    by_turn,
    discounts,
    norms,
    rewards_of,
    to_go,
    unflatten,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick


@each(
    ("fields", "expected"),
    [
        # Returns less .625; G at A: 1, .5, 0, 1 less .625; at B: 1, 0 less .5; at C: 0, 0.
        ({}, [[0.75, 0.875], [-0.25, -0.125, -0.625], [-1.25, -0.625], [0.75]]),
        ({"step_weight": 0.5}, [[0.5625, 0.625], [-0.1875, -0.125, -0.375], [-0.9375, -0.625], [0.5625]]),
        # Counted once a turn the mean is (2 * 1 + 3 * .5 + 2 * 0 + 1) / 8 = .5625.
        (
            {"weight_by_turns": True, "step_weight": 0},
            [[0.4375, 0.4375], [-0.0625, -0.0625, -0.0625], [-0.5625, -0.5625], [0.4375]],
        ),
        # The episode term divided by sd1 .478714; A by the same, B by .707107.
        (
            {"normalize": "std", "eps": 1e-12},
            [[1.566699, 1.490456], [-0.522233, -0.261116, -0.968223], [-2.611165, -1.305582], [1.566699]],
        ),
        # G at A: .5, .5, 0, 1 less .5.
        ({"gamma": 0.5}, [[0.375, 0.875], [-0.125, -0.125, -0.625], [-1.125, -0.625], [0.875]]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(GiGPO(**fields), F1)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("normalize", "weight_by_turns", "lone"),
    first_quick(itertools.product(["none", "std"], [False, True], ["error", "keep", "drop"])),
)
def test_it_passes_the_conformance_check(normalize: Any, weight_by_turns: bool, lone: Any) -> None:
    check_credit(GiGPO(normalize=normalize, weight_by_turns=weight_by_turns, lone=lone, gamma=0.5))


def slow_reference(scheme: GiGPO, group: TrajectoryGroup) -> Rows:
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    divide = scheme.normalize == "std"
    once_a_turn = [t.reward for t in group.trajectories for _ in t.turns]
    if scheme.weight_by_turns:
        episodes = norms([0] * len(once_a_turn), once_a_turn, scheme, divide=divide)
    else:
        compared = norms([0] * len(group.trajectories), [t.reward for t in group.trajectories], scheme, divide=divide)
        episodes = [a for a, t in zip(compared, group.trajectories, strict=True) for _ in t.turns]
    states = [turn.state_key for t in group.trajectories for turn in t.turns]
    returns = [g for t in group.trajectories for g in to_go(rewards_of(t), scheme.gamma)]
    steps = norms(states, returns, scheme, divide=divide)
    return unflatten(group, [a + scheme.step_weight * b for a, b in zip(episodes, steps, strict=True)])


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(),
    gamma=discounts,
    step_weight=st.sampled_from([0.0, 1.0, 2.5]),
    weight_by_turns=st.booleans(),
    normalize=st.sampled_from(["none", "std"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = GiGPO(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


def test_an_episodes_length_does_not_move_the_episode_baseline_unless_weighted_by_turns() -> None:
    # The second of three siblings goes on for idle turns in states of its own; its return stays 1.
    rewards, keys = [[0.0], [1.0], [0.5]], [["A"], ["A"], ["A"]]
    short = make_group(rewards, state_keys=keys)
    long = make_group([[0.0], [1.0, 0, 0, 0, 0], [0.5]], state_keys=[["A"], [*"AVWXY"], ["A"]])
    episode = {"step_weight": 0}
    for normalize in ("none", "std"):
        scheme = GiGPO.model_validate({"normalize": normalize} | episode)
        [before], [after] = by_turn(scheme, short), by_turn(scheme, long)
        assert [row[0] for row in after] == [row[0] for row in before]
    [weighted] = by_turn(GiGPO(weight_by_turns=True, step_weight=0), long)
    # mean (0 + 5 * 1 + .5) / 7
    np.testing.assert_allclose([row[0] for row in weighted], np.array([0, 1, 0.5]) - 5.5 / 7, rtol=1e-6)


@pytest.mark.parametrize("normalize", ["none", "std"])
def test_a_state_met_once_gets_no_step_term(normalize: Any) -> None:
    group = make_group([[0, 1, 4], [2, 0]], state_keys=[["A", "B", "C"], ["A", "D"]])
    [found], [outcome] = by_turn(GiGPO(normalize=normalize), group), by_turn(Uniform(normalize=normalize), group)
    for k, state in enumerate("ABC"):
        assert (found[0][k] == outcome[0][k]) == (state != "A")
    assert found[1][1] == outcome[1][1]


def test_without_a_step_term_it_is_uniform() -> None:
    assert by_turn(GiGPO(step_weight=0), F1) == by_turn(Uniform(normalize="none"), F1)


def test_states_are_compared_within_their_group_alone() -> None:
    one = make_group([[0], [1]], state_keys=[["A"], ["A"]], group_id="one")
    other = make_group([[5], [9]], state_keys=[["A"], ["A"]], group_id="other")
    assert by_turn(GiGPO(), one, other) == by_turn(GiGPO(), one) + by_turn(GiGPO(), other)


def test_a_state_met_twice_by_one_trajectory_is_compared_with_itself() -> None:
    # G at A: 3, 1 of the first and nothing of the second, which has return 0
    group = make_group([[2, 1], [0]], state_keys=[["A", "A"], ["B"]])
    assert by_turn(GiGPO(), group) == [[[1.5 + 1, 1.5 - 1], [-1.5]]]


def test_a_missing_state_key_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory f1/1, turn 2: no state key, which this scheme needs"):
        assign_credit(GiGPO(), [without(F1, 1, 2, "state_key")])
    assert GiGPO().requirements() == {Need.STATE_KEYS}


@each("fields", [{"gamma": 1.5}, {"step_weight": -1}, {"eps": 0}, {"normalize": "batch"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GiGPO.model_validate(fields)
