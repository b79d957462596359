from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Need, TrajectoryGroup, assign_credit
from agentrl.errors import CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.g2po import G2PO
from agentrl_credit.uniform import Uniform
from tests.support.credit import (
    F1,
    Rows,
    assert_close,
    by_turn,
    changed,
    discounts,
    mean,
    norms,
    rewards_of,
    to_go,
    truncated_batches,
    unflatten,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick

# A is followed by B twice and by C; B by the prize and by nothing.
GRAPH = make_group([[0, 8], [0, 0], [0, 0]], state_keys=[["A", "B"], ["A", "B"], ["A", "C"]])


@each(
    ("fields", "expected"),
    [
        # Half of the discount: G at A 4, 0, 0, at B 8, 0, so V(A) = 2/3, V(B) = 2, V(C) = 0. Ahead of A: 2, 2, 0, less 4/3; of
        # B: 8, 0, less 4. Gains 4/3, 4/3, -2/3, 6, -2, 0, less 1. Returns 8, 0, 0, less 8/3.
        (
            {"gamma": 0.5, "normalize": "none"},
            [
                [16 / 3 + 2 / 3 + 1 / 3, 16 / 3 + 4 + 5],
                [-8 / 3 + 2 / 3 + 1 / 3, -8 / 3 - 4 - 3],
                [-8 / 3 - 4 / 3 - 5 / 3, -8 / 3 + 0 - 1],
            ],
        ),
        (
            {"gamma": 0.5, "normalize": "none", "step_weight": 0.5},
            [[16 / 3 + 0.5, 16 / 3 + 4.5], [-8 / 3 + 0.5, -8 / 3 - 3.5], [-8 / 3 - 1.5, -8 / 3 - 0.5]],
        ),
        # The same divided by sd0: returns sqrt(128/9) 3.771236, ahead of A .942809, of B 4, gains sqrt(19/3) 2.516611.
        (
            {"gamma": 0.5, "ddof": 0, "eps": 1e-12},
            [
                [1.414214 + 0.707107 + 0.132453, 1.414214 + 1 + 1.986799],
                [-0.707107 + 0.707107 + 0.132453, -0.707107 - 1 - 1.192079],
                [-0.707107 - 1.414214 - 0.662266, -0.707107 + 0 - 0.397360],
            ],
        ),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(G2PO.model_validate(fields), GRAPH)
    assert_close(found, expected)


@pytest.mark.parametrize(
    "fields", first_quick([{}, {"normalize": "none"}, {"gamma": 1.0}, {"lone": "keep"}, {"lone": "drop"}])
)
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(G2PO.model_validate({"gamma": 0.5} | fields))


def slow_reference(scheme: G2PO, group: TrajectoryGroup) -> Rows:
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    divide = scheme.normalize == "std"
    states = [turn.state_key for t in group.trajectories for turn in t.turns]
    returns = [scheme.gamma * g for t in group.trajectories for g in to_go(rewards_of(t), scheme.gamma)]

    def value(state: str | None) -> float:
        return mean([g for s, g in zip(states, returns, strict=True) if s == state] or returns)

    ahead, gains = [], []
    for trajectory in group.trajectories:
        last = trajectory.turns[-1]
        left_in = last.state_key if last.next_state_key is None else last.next_state_key
        after = [value(turn.state_key) for turn in trajectory.turns[1:]]
        after.append(value(left_in) if trajectory.truncated else 0.0)
        for turn, beyond in zip(trajectory.turns, after, strict=True):
            ahead.append(turn.reward + beyond)
            gains.append(turn.reward + beyond - value(turn.state_key))
    compared = norms([0] * len(group.trajectories), [t.reward for t in group.trajectories], scheme, divide=divide)
    episodes = [a for a, t in zip(compared, group.trajectories, strict=True) for _ in t.turns]
    nodes, edges = norms(states, ahead, scheme, divide=divide), norms([0] * len(gains), gains, scheme, divide=divide)
    triples = zip(episodes, nodes, edges, strict=True)
    return unflatten(group, [a + scheme.step_weight * (b + c) for a, b, c in triples])


@settings(max_examples=40, deadline=None)
@given(
    groups=truncated_batches(),
    gamma=discounts,
    step_weight=st.sampled_from([0.0, 1.0, 2.5]),
    normalize=st.sampled_from(["none", "std"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([0.01, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = G2PO(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


def test_without_a_step_term_it_is_uniform() -> None:
    assert by_turn(G2PO(step_weight=0), F1) == by_turn(Uniform(), F1)


def test_a_truncated_trajectory_continues_from_the_state_that_it_was_left_in() -> None:
    group = make_group([[0], [0, 4]], state_keys=[["A"], ["A", "B"]])
    left = changed(group, 0, turns=(replace(group.trajectories[0].turns[0], next_state_key="B"),), truncated=True)
    scheme = G2PO(gamma=1, normalize="none")
    # V(A) = (0 + 4) / 2: ahead 4 and 4, gains 2, 2, 0 less 4/3; returns 0, 4 less 2.
    assert_close(by_turn(scheme, left)[0], [[-2 + 0 + 2 / 3], [2 + 0 + 2 / 3, 2 + 0 - 4 / 3]])


def test_a_missing_state_key_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory f1/1, turn 2: no state key, which this scheme needs"):
        assign_credit(G2PO(), [without(F1, 1, 2, "state_key")])
    assert G2PO().requirements() == {Need.STATE_KEYS}


@each("fields", [{"gamma": 1.5}, {"step_weight": -1}, {"eps": 0}, {"normalize": "batch"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        G2PO.model_validate(fields)
