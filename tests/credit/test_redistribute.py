from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Credit, CreditScheme, Need, TrajectoryGroup, assign_credit, load_credit
from agentrl.errors import ConfigError, CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.redistribute import Redistribute
from agentrl_credit.turn_return import TurnReturn
from agentrl_credit.uniform import Uniform
from tests.support.credit import Rows, assert_close, batches, by_turn, mean, rewards_of, without
from tests.support.each import each
from tests.support.tiers import first_quick


class Rewards(CreditScheme):
    """Shows the rewards that it is given."""

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [[Credit.from_turns(t, rewards_of(t)) for t in group.trajectories] for group in groups]


SHOWN = {"scheme": f"{__name__}:Rewards"}

# Both end in T with z; they differ in what they did in S.
TWO = make_group([[0, 1], [0, 0]], state_keys=[["S", "T"], ["S", "T"]], action_keys=[["x", "z"], ["y", "z"]])


@pytest.mark.parametrize(
    ("ridge", "expected"),
    [
        # Returns less their mean: .5, -.5. X X^T = [[2, 1], [1, 2]], so X^T (X X^T + 1)^-1 (.5, -.5) = X^T (.25, -.25): w of
        # S, x is .25, of S, y -.25, of T, z 0. What is left of .5, .25, is shared by two turns; the mean goes to the last.
        (1.0, [[0.375, 0.625], [-0.375, 0.375]]),
        # X^T (.5, -.5) / (1 + 3) = .125; .375 is left
        (3.0, [[0.3125, 0.6875], [-0.3125, 0.3125]]),
    ],
)
def test_reference_numbers(ridge: float, expected: Rows) -> None:
    [found] = by_turn(Redistribute(then=SHOWN, ridge=ridge), TWO)
    assert_close(found, expected)


@pytest.mark.parametrize("fields", first_quick([{}, {"ridge": 10.0}, {"then": {"scheme": "gigpo"}}]))
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(
        Redistribute(**fields),
        options={"then": [{"scheme": "turn_return", "gamma": 0.5}]},
        reads_turn_rewards=False,
        batch_wide=True,
        scale_equivariant=True,
    )


def slow_reference(scheme: Redistribute, groups: Sequence[TrajectoryGroup]) -> list[Rows]:
    """Lay out the design matrix and solve the normal equations."""
    trajectories = [t for group in groups for t in group.trajectories]
    pairs = sorted({(turn.state_key, turn.action_key) for t in trajectories for turn in t.turns}, key=str)
    design = np.zeros((len(trajectories), len(pairs)))
    for row, trajectory in zip(design, trajectories, strict=True):
        for turn in trajectory.turns:
            row[pairs.index((turn.state_key, turn.action_key))] += 1
    middle = mean([t.reward for t in trajectories])
    targets = np.array([t.reward - middle for t in trajectories])
    weights = np.linalg.solve(design.T @ design + scheme.ridge * np.eye(len(pairs)), design.T @ targets)
    found = []
    for group in groups:
        rows = []
        for trajectory in group.trajectories:
            fitted = [float(weights[pairs.index((turn.state_key, turn.action_key))]) for turn in trajectory.turns]
            rest = (trajectory.reward - middle - sum(fitted)) / len(fitted)
            rows.append([w + rest + (middle if k == len(fitted) - 1 else 0.0) for k, w in enumerate(fitted)])
        found.append(rows)
    return found


@settings(max_examples=40, deadline=None)
@given(groups=batches(), ridge=st.sampled_from([10.0, 100.0]))
def test_agrees_with_the_solved_normal_equations(groups: list[TrajectoryGroup], ridge: float) -> None:
    scheme = Redistribute(then=SHOWN, ridge=ridge)
    for found, expected in zip(by_turn(scheme, *groups), slow_reference(scheme, groups), strict=True):
        assert_close(found, expected)


@settings(max_examples=20, deadline=None)
@given(groups=batches(state_keys=st.integers(0, 400).map(str)), ridge=st.sampled_from([1e-3, 1.0]))
def test_agrees_with_the_solved_normal_equations_where_pairs_are_many(
    groups: list[TrajectoryGroup], ridge: float
) -> None:
    scheme = Redistribute(then=SHOWN, ridge=ridge)
    for found, expected in zip(by_turn(scheme, *groups), slow_reference(scheme, groups), strict=True):
        assert_close(found, expected)


@settings(max_examples=20, deadline=None)
@given(groups=batches(), ridge=st.sampled_from([0.01, 1.0]))
def test_the_redistributed_rewards_sum_to_each_return(groups: list[TrajectoryGroup], ridge: float) -> None:
    for group, rows in zip(groups, by_turn(Redistribute(then=SHOWN, ridge=ridge), *groups), strict=True):
        for trajectory, row in zip(group.trajectories, rows, strict=True):
            np.testing.assert_allclose(sum(row), trajectory.reward, rtol=1e-5, atol=1e-5)  # a sum of float32 numbers


@settings(max_examples=20, deadline=None)
@given(groups=batches())
def test_the_first_turns_return_is_what_it_was(groups: list[TrajectoryGroup]) -> None:
    # G of the first turns is the return, and the pool at the first turns alone is the group's: the outcome is unmoved
    then = {"scheme": "uniform", "normalize": "leave_one_out", "lone": "keep"}
    direct = Uniform(normalize="leave_one_out", lone="keep")
    for found, expected in zip(by_turn(Redistribute(then=then), *groups), by_turn(direct, *groups), strict=True):
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-5, atol=1e-5)  # as above


def test_a_pair_that_goes_with_high_returns_gets_the_credit() -> None:
    # Five turns, the reward at the last. Whatever else happened, taking the key in the third went with 1, leaving it with 0.
    rng = np.random.default_rng(0)
    rewards, actions = [], []
    for _ in range(60):
        taken = bool(rng.random() < 0.5)
        rewards.append([0.0, 0.0, 0.0, 0.0, float(taken)])
        actions.append([str(rng.integers(3)), str(rng.integers(3)), "take" if taken else "leave", "0", "0"])
    group = make_group(rewards, state_keys=[list("abcde")] * 60, action_keys=actions)
    [found] = by_turn(Redistribute(then=SHOWN, ridge=0.01), group)
    by_place: dict[bool, list[list[float]]] = {True: [], False: []}
    for row, reward in zip(found, rewards, strict=True):
        by_place[reward[-1] == 1].append(row)
    gap = np.mean(by_place[True], axis=0) - np.mean(by_place[False], axis=0)
    assert gap[2] > 0.95
    assert np.abs(np.delete(gap, 2)).max() < 0.05


def test_it_is_fitted_over_the_batch() -> None:
    # what x is worth in S is learned from both groups
    other = make_group(
        [[0, 3], [0, 0]], state_keys=[["S", "T"]] * 2, action_keys=[["x", "z"], ["w", "z"]], group_id="h"
    )
    [together, _], [alone] = (by_turn(Redistribute(then=SHOWN), *groups) for groups in ((TWO, other), (TWO,)))
    assert together[0][0] > alone[0][0] + 0.05
    [[joint, _]] = [slow_reference(Redistribute(), [TWO, other])]
    assert_close(together, joint)


def test_the_credit_is_that_of_the_next_scheme_on_the_redistributed_rewards() -> None:
    [rewards] = by_turn(Redistribute(then=SHOWN), TWO)
    moved = make_group(rewards, state_keys=[["S", "T"]] * 2)
    for spec in ({"scheme": "turn_return", "gamma": 0.5}, {"scheme": "gigpo"}):
        assert_close(by_turn(Redistribute(then=spec), TWO)[0], by_turn(load_credit(spec), moved)[0])
    assert by_turn(Redistribute(), TWO) == by_turn(Redistribute(then={"scheme": "turn_return"}), TWO)


def test_which_turn_was_rewarded_plays_no_part() -> None:
    early = make_group([[1, 0], [0, 0]], state_keys=[["S", "T"]] * 2, action_keys=[["x", "z"], ["y", "z"]])
    assert by_turn(Redistribute(), early) == by_turn(Redistribute(), TWO)
    assert by_turn(TurnReturn(), early) != by_turn(TurnReturn(), TWO)


def test_requirements_are_those_of_the_fit_and_of_the_next_scheme_but_for_turn_rewards() -> None:
    keys = {Need.STATE_KEYS, Need.ACTION_KEYS}
    assert Redistribute().requirements() == keys
    assert Redistribute(then={"scheme": "turn_return"}).requirements() == keys
    judged = {"scheme": "judge", "then": {"scheme": "turn_return"}}
    assert Redistribute(then=judged).requirements() == keys | {Need.TURN_SCORES}


@pytest.mark.parametrize(("field", "words"), [("state_key", "state key"), ("action_key", "action key")])
def test_a_missing_key_is_named_by_trajectory_and_turn(field: str, words: str) -> None:
    with pytest.raises(CreditError, match=rf"trajectory g/1, turn 0: no {words}, which this scheme needs"):
        assign_credit(Redistribute(), [without(TWO, 1, 0, field)])


def test_what_the_next_scheme_refuses_is_refused() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 0: no turn_scores"):
        assign_credit(Redistribute(then={"scheme": "judge"}), [TWO])
    with pytest.raises(CreditError, match=r"group g has one valid trajectory, g/0"):
        assign_credit(Redistribute(), [replace(TWO, trajectories=TWO.trajectories[:1])])


@each(
    ("then", "message"),
    [
        (
            {"scheme": "turn_retrun"},
            r"^credit\.then\.scheme: no 'turn_retrun' is installed\. Did you mean 'turn_return'",
        ),
        ({"scheme": "turn_return", "gama": 1}, r"^credit\.then\.gama: 'turn_return' has no such option\. .*'gamma'"),
        ({"scheme": "turn_return", "gamma": 2}, r"^credit\.then\.gamma: .*less than or equal to 1 \(got 2\)"),
        ({}, r"^credit\.then\.scheme: expected the name of a credit scheme, got None"),
    ],
)
def test_an_impossible_next_scheme_is_refused_when_the_recipe_is_read(then: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_credit({"scheme": "redistribute", "then": then})


@each("fields", [{"ridge": 0}, {"ridge": -1}, {"ridge": float("inf")}, {"lone": "keep"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Redistribute.model_validate(fields)
