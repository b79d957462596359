import math
from dataclasses import replace
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
from agentrl_credit.hindsight import Hindsight
from agentrl_credit.uniform import Uniform
from tests.support.credit import (
    Rows,
    assert_close,
    batches,
    by_turn,
    logprobs,
    mean,
    norms,
    tokens,
    unflatten,
    without,
)
from tests.support.each import each
from tests.support.signals import with_signals
from tests.support.tiers import first_quick

HALF, TWICE = math.log(0.5), math.log(2)


def told(
    rewards: Rows, log_ratios: list[list[Any]], lengths: list[list[int]] | None = None, group_id: str = "g"
) -> TrajectoryGroup:
    """Build a group in which hindsight changes log-probabilities by so much."""
    group = make_group(rewards, hindsight_logprobs=log_ratios, action_lengths=lengths, group_id=group_id)
    trajectories = []
    for t in group.trajectories:
        turns = [
            with_signals(
                turn,
                hindsight_logprobs=tuple(np.add(turn.behavior_logprobs, turn.signals["hindsight_logprobs"]).tolist()),
            )
            for turn in t.turns
        ]
        trajectories.append(replace(t, turns=tuple(turns)))
    return replace(group, trajectories=tuple(trajectories))


# The first succeeded: hindsight makes its first turn half as likely and its second twice.
TOLD = told([[0, 1], [0]], [[[HALF - 1, HALF + 1], TWICE], [TWICE]], [[2, 1], [1]])


@each(
    ("fields", "expected"),
    [
        # Returns 1, 0: +-.707107 with sd1. rho R: .5, 2, 0: mean .833333, sd1 1.040833: -.320256, 1.120897, -.800641.
        ({}, [[0.386851, 1.828004], [-1.507748]]),
        ({"step_weight": 0.5}, [[0.546979, 1.267555], [-1.107427]]),
        # Returns +-1 with sd0; sd0 of rho R .849837: -.392232, 1.372813, -.980581.
        ({"ddof": 0}, [[0.607768, 2.372813], [-1.980581]]),
        # Bounded to 1 / 1.5 .. 1.5: 2/3, 3/2, 0 with mean .722222, sd1 .751542: -.073922, 1.034910, -.960988.
        ({"max_ratio": 1.5}, [[0.633185, 1.742017], [-1.668094]]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(Hindsight(eps=1e-12, **fields), TOLD)
    assert_close(found, expected)


@pytest.mark.parametrize(
    "fields",
    first_quick([{}, {"ddof": 0}, {"max_ratio": 1.5}, {"step_weight": 0.5}, {"lone": "keep"}, {"lone": "drop"}]),
)
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(Hindsight(**fields), relative=False)


def slow_reference(scheme: Hindsight, group: TrajectoryGroup) -> Rows:
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    outcomes = norms([0] * len(group.trajectories), [t.reward for t in group.trajectories], scheme)
    weighted = []
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            pairs = zip(turn.signals["hindsight_logprobs"], turn.behavior_logprobs, strict=True)
            ratio = math.exp(mean([told - policy for told, policy in pairs]))
            weighted.append(min(max(ratio, 1 / scheme.max_ratio), scheme.max_ratio) * trajectory.reward)
    steps = unflatten(group, norms([0] * len(weighted), weighted, scheme))
    return [[outcome + scheme.step_weight * a for a in row] for outcome, row in zip(outcomes, steps, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(hindsight_logprobs=tokens(logprobs)),
    step_weight=st.sampled_from([0.0, 1.0, 2.0]),
    max_ratio=st.sampled_from([1.25, 5.0]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = Hindsight(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@each("huge", [3.0, 30.0, 3000.0])
def test_the_ratio_is_bounded_on_both_sides(huge: float) -> None:
    # log 5 = 1.609: beyond it, it makes no difference how much likelier or less likely hindsight makes a turn
    found = by_turn(Hindsight(), told([[0, 1], [4]], [[huge, -huge], [0.0]]))
    bounded = by_turn(Hindsight(), told([[0, 1], [4]], [[math.log(5), -math.log(5)], [0.0]]))
    assert_close(found[0], bounded[0])
    inside = by_turn(Hindsight(), told([[0, 1], [4]], [[1.0, -1.0], [0.0]]))
    assert abs(inside[0][0][0] - bounded[0][0][0]) > 0.01


def test_the_ratio_is_that_of_the_mean_log_probability_however_long_the_turn() -> None:
    short, long = told([[1, 1], [0]], [[1.0, 0], [0]]), told([[1, 1], [0]], [[1.0, 0], [0]], [[6, 1], [1]])
    assert_close(by_turn(Hindsight(), long)[0], by_turn(Hindsight(), short)[0])


def test_turns_of_a_failure_that_hindsight_does_not_touch_differ_by_their_outcome_alone() -> None:
    # rho times a return of 0 is 0, whatever rho
    [found] = by_turn(Hindsight(), told([[1], [0, 0, 0]], [[0.5], [1.0, -1.0, 0.0]]))
    assert len(set(found[1])) == 1


def test_without_the_hindsight_term_it_is_uniform() -> None:
    assert by_turn(Hindsight(step_weight=0), TOLD) == by_turn(Uniform(), TOLD)


def test_a_policy_that_hindsight_does_not_change_credits_every_turn_alike() -> None:
    [found] = by_turn(Hindsight(), told([[0, 1, 0], [0.5]], [[0, 0, 0], [0]]))
    assert len(set(found[0])) == 1


def test_groups_are_normalised_apart() -> None:
    other = told([[5], [9]], [[0.5], [-0.5]], group_id="other")
    assert by_turn(Hindsight(), TOLD, other) == by_turn(Hindsight(), TOLD) + by_turn(Hindsight(), other)


def test_missing_log_probabilities_are_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/1, turn 0: no hindsight_logprobs, which this scheme needs"):
        assign_credit(Hindsight(), [without(TOLD, 1, 0, "hindsight_logprobs")])
    assert Hindsight().requirements() == {Need.HINDSIGHT_LOGPROBS}


@each("fields", [{"step_weight": -1}, {"max_ratio": 1}, {"eps": 0}, {"ddof": 2}, {"gamma": 1}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Hindsight.model_validate(fields)
