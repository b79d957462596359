import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Need, TrajectoryGroup, assign_credit
from agentrl.errors import CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.gigpo import GiGPO
from agentrl_credit.group_gae import GroupGAE
from tests.support.credit import (
    F1,
    Rows,
    assert_close,
    batches,
    by_turn,
    changed,
    discounts,
    exact_gradient,
    mean,
    rewards_of,
    scaled_by_batch,
    slow_gae,
    stopping_paths,
    to_go,
    truncated_batches,
    weighted,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick


@each(
    ("fields", "expected"),
    [
        # V: A .625, B .5, C 0.
        ({"lam": 0}, [[-0.125, 0.5], [-0.125, 0.5, -0.5], [-0.625, 0], [0.375]]),
        ({"lam": 0.5}, [[0.125, 0.5], [0, 0.25, -0.5], [-0.625, 0], [0.375]]),
        ({"lam": 1}, [[0.375, 0.5], [-0.125, 0, -0.5], [-0.625, 0], [0.375]]),
        # The pool is 3.5 / 8 = .4375. V: A (4 * .625 + 2 * .4375) / 6 = .5625, B (1 + .875) / 4 = .46875, C .21875.
        (
            {"lam": 0, "shrinkage": 2},
            [[-0.09375, 0.53125], [0.15625, 0.25, -0.46875], [-0.34375, -0.21875], [0.4375]],
        ),
        # G with gamma .5: A .5, .5, 0, 1; B 1, 0; C 0, 0. V: A .5, B .5, C 0.
        ({"lam": 0, "gamma": 0.5}, [[-0.25, 0.5], [0, 0.25, -0.5], [-0.5, 0], [0.5]]),
        # V of the others. First: A .5, B 0. Second: A 2/3, C 0, B 1. Third: A 5/6, C 0. Fourth: A .5.
        (
            {"lam": 0, "leave_one_out": True},
            [[-0.5, 1], [-0.166667, 1, -1], [-0.833333, 0], [0.5]],
        ),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(GroupGAE.model_validate({"leave_one_out": False} | fields), F1)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("leave_one_out", "lam", "normalize", "lone"),
    first_quick(
        [
            *itertools.product([True, False], [1.0, 0.5, 0.0], ["none", "batch"], ["error"]),
            (True, 0.5, "none", "keep"),
            (True, 0.5, "none", "drop"),
        ]
    ),
)
def test_it_passes_the_conformance_check(leave_one_out: bool, lam: float, normalize: Any, lone: Any) -> None:
    check_credit(GroupGAE(leave_one_out=leave_one_out, lam=lam, normalize=normalize, lone=lone, gamma=0.5, shrinkage=1))


def slow_reference(scheme: GroupGAE, group: TrajectoryGroup) -> Rows:
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    visits = [
        (i, turn.state_key, g)
        for i, trajectory in enumerate(group.trajectories)
        for turn, g in zip(trajectory.turns, to_go(rewards_of(trajectory), scheme.gamma), strict=True)
    ]
    rows = []
    for i, trajectory in enumerate(group.trajectories):
        seen = [(state, g) for j, state, g in visits if not (scheme.leave_one_out and j == i)]
        pool = mean([g for _, g in seen])

        def value(state: str | None, seen: Any = seen, pool: float = pool) -> float:
            here = [g for other, g in seen if other == state]
            weight = len(here) + scheme.shrinkage
            return (sum(here) + scheme.shrinkage * pool) / weight if here else pool

        last = trajectory.turns[-1]
        cut_off_in = last.state_key if last.next_state_key is None else last.next_state_key
        rows.append(
            slow_gae(
                rewards_of(trajectory),
                [value(turn.state_key) for turn in trajectory.turns],
                gamma=scheme.gamma,
                lam=scheme.lam,
                final_value=value(cut_off_in) if trajectory.truncated else 0.0,
            )
        )
    return rows


@settings(max_examples=40, deadline=None)
@given(
    groups=truncated_batches(),
    gamma=discounts,
    lam=st.sampled_from([0.0, 0.25, 1.0]),
    leave_one_out=st.booleans(),
    shrinkage=st.sampled_from([0.0, 0.5, 3.0]),
    normalize=st.sampled_from(["none", "batch"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = GroupGAE(**fields, lone="keep")
    expected = [slow_reference(scheme, group) for group in groups]
    if scheme.normalize == "batch":
        expected = scaled_by_batch(expected, scheme, alone=False)
    for found, rows in zip(by_turn(scheme, *groups), expected, strict=True):
        assert_close(found, rows)


@settings(max_examples=20, deadline=None)
@given(groups=batches(), gamma=discounts)
def test_with_lambda_1_and_the_own_visits_it_is_the_step_term_of_gigpo(
    groups: list[TrajectoryGroup], gamma: float
) -> None:
    found = by_turn(GroupGAE(lam=1, gamma=gamma, leave_one_out=False, lone="keep"), *groups)
    both = by_turn(GiGPO(gamma=gamma, step_weight=1, lone="keep"), *groups)
    outcome = by_turn(GiGPO(gamma=gamma, step_weight=0, lone="keep"), *groups)
    for rows, with_it, without_it in zip(found, both, outcome, strict=True):
        pairs = zip(with_it, without_it, strict=True)
        assert_close(rows, [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs])


@pytest.mark.parametrize("shrinkage", [0.0, 2.0])
def test_own_rewards_do_not_move_the_own_values_when_left_out(shrinkage: float) -> None:
    # All in A. Six more at the end of the first trajectory is six more for all of its turns with lambda 1, and for the
    # last alone with lambda 0: every value that it is compared with stood still.
    siblings, keys = [[0.5, 0.0, 0.0], [0.0, 0.0, 1.0]], [["A", "A", "A"]] * 3
    for lam, gain in ((1.0, [6, 6, 6]), (0.0, [0, 0, 6])):
        scheme = GroupGAE(lam=lam, shrinkage=shrinkage)
        before, after = (
            by_turn(scheme, make_group([[0.0, 1.0, last], *siblings], state_keys=keys))[0][0] for last in (0.0, 6.0)
        )
        np.testing.assert_allclose(np.array(after) - before, gain, rtol=1e-6, atol=1e-6)


def test_the_pool_stands_in_for_a_state_that_no_one_else_met() -> None:
    # The others of the first: G 3, 1, so V(X) = 2; the others of the second: G 8, 8, so V(Y) = V(Z) = 8.
    group = make_group([[0, 8], [2, 1]], state_keys=[["X", "X"], ["Y", "Z"]])
    assert by_turn(GroupGAE(lam=0), group) == [[[0, 6], [2, -7]]]
    assert by_turn(GroupGAE(lam=1), group) == [[[6, 6], [-5, -7]]]


def test_a_truncated_trajectory_continues_from_the_state_that_it_was_left_in() -> None:
    # V: A 0 and B 5 by the sibling. The first was left in B after A: 1 + V(B) - V(A).
    group = make_group([[1], [-5, 5]], state_keys=[["A"], ["A", "B"]])
    left_in_b = replace(group.trajectories[0].turns[0], next_state_key="B")
    ended, cut_off = changed(group, 0, turns=(left_in_b,)), changed(group, 0, turns=(left_in_b,), truncated=True)
    assert by_turn(GroupGAE(lam=0), ended)[0][0] == [1]
    assert by_turn(GroupGAE(lam=0), cut_off)[0][0] == [6]
    assert by_turn(GroupGAE(lam=0, gamma=0.5), cut_off)[0][0] == [1 + 0.5 * 5 - (-5 + 0.5 * 5)]
    # The sibling's own numbers do not depend on how the first ended: V(A) = 1, and the pool, 1, for B.
    assert by_turn(GroupGAE(lam=0), cut_off)[0][1] == by_turn(GroupGAE(lam=0), ended)[0][1] == [-5, 4]


def test_an_action_that_was_cut_off_continues_from_the_state_that_it_was_taken_in() -> None:
    group = make_group([[0, 1], [1, 4]], state_keys=[["A", "B"], ["A", "B"]])
    cut_off = changed(group, 0, truncated=True)
    assert cut_off.trajectories[0].turns[-1].next_state_key is None
    # V of the sibling: A 5, B 4, not the pool of 4.5 for a state that it never saw; at the last turn 1 + V(B) - V(B)
    assert by_turn(GroupGAE(lam=0), cut_off)[0][0] == [-1, 1]


def test_an_empty_key_is_a_key() -> None:
    group = make_group([[1], [-5, 5]], state_keys=[["A"], ["A", ""]])
    left = changed(group, 0, turns=(replace(group.trajectories[0].turns[0], next_state_key=""),), truncated=True)
    assert by_turn(GroupGAE(lam=0), left)[0][0] == [6]


def test_values_of_another_group_are_not_read() -> None:
    other = make_group([[5], [9]], state_keys=[["A"], ["A"]], group_id="other")
    assert by_turn(GroupGAE(), F1, other) == by_turn(GroupGAE(), F1) + by_turn(GroupGAE(), other)


def expected_gradient(scheme: GroupGAE, keys: list[str], *, size: int = 3) -> npt.NDArray[np.float64]:
    """Average, over all groups of the stopping problem, the mean over trajectories of the sum of A_k times the score."""
    gradient = np.zeros(3)
    for paths in itertools.product(stopping_paths(), repeat=size):
        probability = np.prod([path.probability for path in paths])
        states = [keys[: len(path.rewards)] for path in paths]
        [rows] = by_turn(scheme, make_group([path.rewards for path in paths], state_keys=states))
        for path, row in zip(paths, rows, strict=True):
            gradient += weighted(float(probability) / size, [a * s for a, s in zip(row, path.scores, strict=True)])
    return gradient


@each("keys", [["s0", "s1", "s2"], ["s0", "s1", "s1"], ["s0", "s0", "s0"]])
@each("shrinkage", [0.0, 1.0])
def test_lambda_1_with_the_own_visits_left_out_is_unbiased_whatever_the_keys_tell_apart(
    keys: list[str], shrinkage: float
) -> None:
    # 1e-6: advantages are float32
    scheme = GroupGAE(lam=1, shrinkage=shrinkage)
    np.testing.assert_allclose(expected_gradient(scheme, keys), exact_gradient(), atol=1e-6)


def test_own_visits_or_a_smaller_lambda_bias_it_even_where_each_key_is_one_situation() -> None:
    for scheme in (GroupGAE(lam=1, leave_one_out=False), GroupGAE(lam=0), GroupGAE(lam=0.5)):
        assert np.abs(expected_gradient(scheme, ["s0", "s1", "s2"]) - exact_gradient()).max() > 0.01


def test_keys_that_call_different_situations_equal_hide_the_decision_between_them_from_lambda_0() -> None:
    # From S to a room that pays 4, or to one that pays nothing: V(S) = 2. Were both rooms M, V(M) = 2 either way.
    rewards = [[0, 4], [0, 4], [0, 0], [0, 0]]
    told_apart = make_group(rewards, state_keys=[["S", "X"], ["S", "X"], ["S", "Y"], ["S", "Y"]])
    alike = make_group(rewards, state_keys=[["S", "M"]] * 4)
    trusting, whole = GroupGAE(lam=0, leave_one_out=False), GroupGAE(lam=1, leave_one_out=False)
    assert by_turn(trusting, told_apart) == [[[2, 0], [2, 0], [-2, 0], [-2, 0]]]
    assert by_turn(trusting, alike) == [[[0, 2], [0, 2], [0, -2], [0, -2]]]
    assert [row[0] for row in by_turn(whole, alike)[0]] == [2, 2, -2, -2]


def test_a_missing_state_key_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory f1/0, turn 1: no state key, which this scheme needs"):
        assign_credit(GroupGAE(), [without(F1, 0, 1, "state_key")])
    assert GroupGAE().requirements() == {Need.STATE_KEYS}


@each("fields", [{"gamma": 2}, {"lam": -0.1}, {"shrinkage": -1}, {"eps": 0}, {"normalize": "std"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GroupGAE.model_validate(fields)
