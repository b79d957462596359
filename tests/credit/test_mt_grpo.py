import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import TrajectoryGroup
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.mt_grpo import MTGRPO
from agentrl_credit.uniform import Uniform
from tests.support.credit import F1, Rows, assert_close, batches, by_turn, norms, rewards_of, unflatten
from tests.support.each import each
from tests.support.tiers import first_quick


@each(
    ("fields", "expected"),
    [
        # Return less .625: .375, -.125, -.625, .375. Turn index 0: 0, .5, 0, 1 less .375; index 1: 1, 0, 0 less 1/3;
        # index 2: one alone.
        ({"normalize": "none"}, [[0, 1.041667], [0, -0.458333, -0.125], [-1, -0.958333], [1]]),
        ({"normalize": "none", "turn_weight": 0.5}, [[0.1875, 0.708333], [-0.0625, -0.291667, -0.125],
                                                     [-0.8125, -0.791667], [0.6875]]),
        # sd1 of the returns and of index 0: .478714; of index 1: .577350.
        ({"eps": 1e-12}, [[0, 1.938050], [0, -0.838466, -0.261116], [-2.088931, -1.882932], [2.088931]]),
    ],
)  # fmt: skip
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(MTGRPO(**fields), F1)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("normalize", "ddof", "lone"), first_quick(itertools.product(["std", "none"], [1, 0], ["error", "keep", "drop"]))
)
def test_it_passes_the_conformance_check(normalize: Any, ddof: Any, lone: Any) -> None:
    check_credit(MTGRPO(normalize=normalize, ddof=ddof, lone=lone, turn_weight=0.5))


def slow_reference(scheme: MTGRPO, group: TrajectoryGroup) -> Rows:
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    divide = scheme.normalize == "std"
    outcomes = norms([0] * len(group.trajectories), [t.reward for t in group.trajectories], scheme, divide=divide)
    places = [k for t in group.trajectories for k in range(len(t.turns))]
    rewards = [reward for t in group.trajectories for reward in rewards_of(t)]
    steps = unflatten(group, norms(places, rewards, scheme, divide=divide))
    return [[outcome + scheme.turn_weight * step for step in row] for outcome, row in zip(outcomes, steps, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(),
    turn_weight=st.sampled_from([0.0, 0.5, 2.0]),
    normalize=st.sampled_from(["std", "none"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = MTGRPO(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@pytest.mark.parametrize("normalize", ["std", "none"])
def test_without_a_turn_term_it_is_uniform(normalize: Any) -> None:
    assert by_turn(MTGRPO(turn_weight=0, normalize=normalize), F1) == by_turn(Uniform(normalize=normalize), F1)


def test_every_turn_has_a_term_of_its_own_not_only_the_first() -> None:
    # the same returns: the outcome term is 0; the other sibling earns nothing anywhere but at the end
    rewards = [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
    [[first, second]] = by_turn(MTGRPO(normalize="none"), make_group(rewards))
    assert first == [0, 0, -0.5, 0.5]
    assert second == [0, 0, 0.5, -0.5]


def test_what_a_turn_makes_possible_is_left_to_the_outcome_term() -> None:
    # both turns of the first trajectory earn the same as their siblings' at that index, so only the outcome differs
    [rows] = by_turn(MTGRPO(normalize="none"), make_group([[1, 0, 2], [1, 0]]))
    assert rows == [[1, 1, 1], [-1, -1]]


def test_the_last_one_left_has_no_turn_term() -> None:
    late = [[0, 0, 5], [0, 5]]
    outcome = Uniform(normalize="none")
    [rows], [uniform] = by_turn(MTGRPO(normalize="none"), make_group(late)), by_turn(outcome, make_group(late))
    assert rows[0][2] == uniform[0][2]
    np.testing.assert_allclose([rows[0][1], rows[1][1]], [-2.5, 2.5])


@each("fields", [{"turn_weight": -1}, {"eps": 0}, {"normalize": "batch"}, {"gamma": 1}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MTGRPO.model_validate(fields)
