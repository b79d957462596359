from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Need, TrajectoryGroup, assign_credit
from agentrl.errors import CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.hgpo import HGPO
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
        # The step term of GiGPO. G at A: 1, .5, 0, 1 less .625; at B: 1, 0 less .5; at C: 0, 0.
        ({"context": 0}, [[0.375, 0.5], [-0.125, 0, -0.5], [-0.625, 0], [0.375]]),
        # Weights 1/3, 2/3. All begin in A; A, B and C, B were met once and A, C is flat: B keeps a third of its +-.5.
        ({"context": 1}, [[0.375, 0.166667], [-0.125, 0, -0.166667], [-0.625, 0], [0.375]]),
        # Weights 1/6, 2/6, 3/6.
        ({}, [[0.375, 0.083333], [-0.125, 0, -0.083333], [-0.625, 0], [0.375]]),
        # Weights 1/3 each.
        ({"alpha": 0}, [[0.375, 0.166667], [-0.125, 0, -0.166667], [-0.625, 0], [0.375]]),
        # sd1 of A .478714, of B .707107.
        (
            {"context": 1, "normalize": "std", "eps": 1e-12},
            [[0.783349, 0.235702], [-0.261116, 0, -0.235702], [-1.305582, 0], [0.783349]],
        ),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(HGPO(**fields), F1)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("normalize", "context", "lone"),
    # With context 0 there is one weight, and nothing for alpha to do.
    first_quick(
        [("none", 2, "keep"), ("none", 1, "error"), ("none", 3, "drop"), ("std", 1, "error"), ("std", 2, "error")]
    ),
)
def test_it_passes_the_conformance_check(normalize: Any, context: int, lone: Any) -> None:
    check_credit(HGPO(normalize=normalize, context=context, lone=lone, gamma=0.5))


def slow_reference(scheme: HGPO, group: TrajectoryGroup) -> Rows:
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    returns = [g for t in group.trajectories for g in to_go(rewards_of(t), scheme.gamma)]
    total = sum((c + 1) ** scheme.alpha for c in range(scheme.context + 1))
    found = [0.0] * len(returns)
    for c in range(scheme.context + 1):
        histories = []
        for trajectory in group.trajectories:
            states = [turn.state_key for turn in trajectory.turns]
            histories += [tuple(states[max(0, k - c) : k + 1]) for k in range(len(states))]
        terms = norms(histories, returns, scheme, divide=scheme.normalize == "std")
        found = [a + (c + 1) ** scheme.alpha / total * term for a, term in zip(found, terms, strict=True)]
    return unflatten(group, found)


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(),
    gamma=discounts,
    context=st.integers(0, 4),
    alpha=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    normalize=st.sampled_from(["none", "std"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = HGPO(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


def test_a_cell_with_one_member_contributes_zero_with_its_weight() -> None:
    # Both reach B, by different ways: B compares 1 with 0, and nobody else came by X, B or Y, B. Were the weights of the
    # empty cells given to the others, the term would be .5 again.
    group = make_group([[0, 1], [0, 0]], state_keys=[["X", "B"], ["Y", "B"]])
    assert by_turn(HGPO(context=0), group)[0][0][1] == 0.5
    [found] = by_turn(HGPO(context=1, alpha=0), group)
    assert found == [[0, 0.25], [0, -0.25]]


def test_the_order_of_the_states_tells_histories_apart() -> None:
    # C after A, B and after B, A: with two states of history, not the same situation
    same = make_group([[0, 0, 1], [0, 0, 0]], state_keys=[["A", "B", "C"], ["A", "B", "C"]])
    other = make_group([[0, 0, 1], [0, 0, 0]], state_keys=[["A", "B", "C"], ["B", "A", "C"]])
    assert by_turn(HGPO(context=2, alpha=0), same)[0][0][2] == 0.5
    [found] = by_turn(HGPO(context=2, alpha=0), other)
    assert_close(found, [[0.5 / 3, 0.5 / 3, 0.5 / 3], [-0.5 / 3, -0.5 / 3, -0.5 / 3]])


def test_the_first_turn_is_compared_with_first_turns_once_history_counts() -> None:
    # A is met at the first turn and again later: alone, one cell of G = 1, 1, 0; with history, the start and A, A.
    group = make_group([[0, 1], [0]], state_keys=[["A", "A"], ["A"]])
    assert_close(by_turn(HGPO(context=0), group)[0], [[1 / 3, 1 / 3], [-2 / 3]])
    assert_close(by_turn(HGPO(context=1, alpha=0), group)[0], [[(1 / 3 + 1 / 2) / 2, 1 / 6], [(-2 / 3 - 1 / 2) / 2]])


def test_histories_do_not_run_from_one_trajectory_into_the_next() -> None:
    # were the turn before a first turn the last of the trajectory before, the starts would be told apart
    group = make_group([[1, 0], [0, 0], [0, 0]], state_keys=[["A", "B"], ["A", "C"], ["A", "B"]])
    [found] = by_turn(HGPO(context=1, alpha=0), group)
    assert_close([[row[0]] for row in found], [[2 / 3], [-1 / 3], [-1 / 3]])


def test_a_missing_state_key_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory f1/2, turn 1: no state key, which this scheme needs"):
        assign_credit(HGPO(), [without(F1, 2, 1, "state_key")])
    assert HGPO().requirements() == {Need.STATE_KEYS}


@each("fields", [{"gamma": -1}, {"context": -1}, {"alpha": 700.0}, {"eps": 0}, {"ddof": 2}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HGPO.model_validate(fields)
