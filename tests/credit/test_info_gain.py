import itertools
import math
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
from agentrl_credit.info_gain import InfoGain
from tests.support.credit import (
    Rows,
    assert_close,
    batches,
    by_turn,
    discounts,
    logprobs,
    norms,
    rewards_of,
    to_go,
    unflatten,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick

# The answer is believed with probability .25, then .5, then .75; by the second trajectory with .25, then .25.
SEARCH = make_group(
    [[0, 0, 1], [0.5, 0]],
    answer_logprobs=[[math.log(0.25), math.log(0.5), math.log(0.75)], [math.log(0.25), math.log(0.25)]],
)


@each(
    ("fields", "expected"),
    [
        # Gains .25, .25, 0 and 0, 0 beside the rewards; G of .25, .25, 1 and .5, 0.
        ({"normalize": "none"}, [[1.5, 1.25, 1], [0.5, 0]]),
        ({"normalize": "none", "gamma": 0.5}, [[0.625, 0.75, 1], [0.5, 0]]),
        ({"normalize": "none", "info_weight": 2}, [[2, 1.5, 1], [0.5, 0]]),
        # log .5 / .25 = .693147, log .75 / .5 = .405465
        ({"normalize": "none", "potential": "log"}, [[2.098612, 1.405465, 1], [0.5, 0]]),
        # .25, .25, 1, .5, 0: mean .4, squared deviations .0225 * 2, .36, .01, .16: sd1 sqrt(.575 / 4) = .379144.
        # -.15, -.15, .6 and .1, -.4, divided and summed.
        ({"eps": 1e-12}, [[0.791257, 1.186885, 1.582514], [-0.791257, -1.055009]]),
        # Returns 1, .5: .707107 from their mean. Gains of index 0: .25, 0, the same; of index 1 one alone, the other is last.
        # Two gains are ahead of the first turn of the first trajectory, one of that of the second.
        ({"normalize": "turn", "eps": 1e-12}, [[1.207107, 0.707107, 0.707107], [-1.414214, -0.707107]]),
        (
            {"normalize": "turn", "eps": 1e-12, "info_weight": 0.5},
            [[0.957107, 0.707107, 0.707107], [-1.060660, -0.707107]],
        ),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(InfoGain(**fields), SEARCH)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("normalize", "potential", "lone"),
    first_quick(
        [
            *itertools.product(["joint", "turn", "none"], ["probability", "log"], ["error"]),
            ("joint", "log", "keep"),
            ("joint", "log", "drop"),
        ]
    ),
)
def test_it_passes_the_conformance_check(normalize: Any, potential: Any, lone: Any) -> None:
    check_credit(
        InfoGain(normalize=normalize, potential=potential, lone=lone, gamma=0.5),
        relative=False,
        reads_turn_rewards=normalize != "turn",  # which compares whole returns
        scale_equivariant=False,  # a probability does not double with the rewards
    )


def slow_reference(scheme: InfoGain, group: TrajectoryGroup) -> Rows:
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    if scheme.normalize == "turn":
        return slow_by_turn(scheme, group)
    rewards = []
    for trajectory in group.trajectories:
        potentials = []
        for turn in trajectory.turns:
            logprob = turn.signals["answer_logprobs"]
            potentials.append(math.exp(logprob) if scheme.potential == "probability" else logprob)
        for k, reward in enumerate(rewards_of(trajectory)):
            is_last = k == len(potentials) - 1
            gain = 0.0 if is_last else potentials[k + 1] - potentials[k]
            rewards.append(reward + scheme.info_weight * gain)
    if scheme.normalize == "joint":
        rewards = norms([0] * len(rewards), rewards, scheme)
    return [to_go(row, scheme.gamma) for row in unflatten(group, rewards)]


def slow_by_turn(scheme: InfoGain, group: TrajectoryGroup) -> Rows:
    outcomes = norms([0] * len(group.trajectories), [sum(rewards_of(t)) for t in group.trajectories], scheme)
    rows: Rows = []
    for trajectory in group.trajectories:
        potentials = [turn.signals["answer_logprobs"] for turn in trajectory.turns]
        if scheme.potential == "probability":
            potentials = [math.exp(logprob) for logprob in potentials]
        rows.append([after - before for before, after in itertools.pairwise(potentials)])
    places = [(k, gain) for row in rows for k, gain in enumerate(row)]
    scaled = iter(norms([k for k, _ in places], [gain for _, gain in places], scheme) if places else [])
    found = []
    for outcome, row in zip(outcomes, rows, strict=True):
        sums = to_go([next(scaled) for _ in row], scheme.gamma)
        ahead = [total / math.sqrt(len(row) - k) for k, total in enumerate(sums)]
        found.append([outcome + scheme.info_weight * term for term in [*ahead, 0.0]])
    return found


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(answer_logprobs=logprobs),
    gamma=discounts,
    potential=st.sampled_from(["probability", "log"]),
    info_weight=st.sampled_from([0.0, 1.0, 2.0]),
    normalize=st.sampled_from(["joint", "turn", "none"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = InfoGain(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


def test_the_last_turn_has_no_gain() -> None:
    # Belief moves at the last turn of both, one up and one down; nothing was read after it, so it earns its reward alone.
    group = make_group([[0, 1], [0, 0]], answer_logprobs=[[-1, -0.1], [-1, -3]])
    [found] = by_turn(InfoGain(normalize="none", potential="log", gamma=0), group)
    assert_close(found, [[0.9, 1], [-2, 0]])


def test_without_discount_the_gains_telescope_whatever_happened_in_between() -> None:
    # log p from -3 to -.5, by way of nothing or of certainty: the first turn is credited 2.5 beside the return of 1
    direct = make_group([[0, 1], [0]], answer_logprobs=[[-3, -0.5], [0]])
    detour = make_group([[0, 0, 0, 1], [0]], answer_logprobs=[[-3, 0, -9, -0.5], [0]])
    for group in (direct, detour):
        [[first, _]] = by_turn(InfoGain(normalize="none", potential="log"), group)
        np.testing.assert_allclose(first[0], 3.5, rtol=1e-6)


def test_without_weight_belief_plays_no_part() -> None:
    group = make_group([[0, 1], [0.5, 0]], answer_logprobs=[[-1, -0.1], [-1, -3]])
    other = make_group([[0, 1], [0.5, 0]], answer_logprobs=[[-5, -2], [0, 0]])
    assert by_turn(InfoGain(info_weight=0), group) == by_turn(InfoGain(info_weight=0), other)
    assert by_turn(InfoGain(), group) != by_turn(InfoGain(), other)


def test_a_belief_that_cannot_be_told_from_none_has_a_probability_and_no_gain() -> None:
    # exp(-800) is 0 in float64, and the gain of the step away from it is finite
    group = make_group([[0, 0], [0, 0]], answer_logprobs=[[-800, -0.5], [-1, -1]])
    [found] = by_turn(InfoGain(normalize="none"), group)
    assert_close(found, [[math.exp(-0.5), 0], [0, 0]])


def test_groups_are_normalised_apart() -> None:
    other = make_group([[5, 0], [9]], answer_logprobs=[[-1, -2], [-1]], group_id="other")
    assert by_turn(InfoGain(), SEARCH, other) == by_turn(InfoGain(), SEARCH) + by_turn(InfoGain(), other)


def test_a_missing_answer_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/1, turn 1: no answer_logprobs, which this scheme needs"):
        assign_credit(InfoGain(), [without(SEARCH, 1, 1, "answer_logprobs")])
    assert InfoGain().requirements() == {Need.ANSWER_LOGPROBS}


@each("fields", [{"gamma": 2}, {"info_weight": -1}, {"potential": "odds"}, {"normalize": "std"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        InfoGain.model_validate(fields)
