from collections import deque
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
from agentrl_credit.graphgpo import GraphGPO
from agentrl_credit.uniform import Uniform
from tests.support.credit import F1, Rows, assert_close, by_turn, changed, norms, truncated_batches, unflatten, without
from tests.support.each import each
from tests.support.tiers import first_quick

# Success is 1 step from C, 2 from B, 3 from A. The first took the long way, the second turned off at B, the third from A to
# where nobody went on from.
MAZE = make_group(
    [[0, 0, 0, 1], [0, 0], [0]],
    state_keys=[["A", "B", "B", "C"], ["A", "B"], ["A"]],
)


@each(
    ("fields", "expected"),
    [
        # omega .5; without a way 1 + 3. From A to B, B, nowhere: 1/8, 1/8, 1/32, less 3/32; from B to B, C, nowhere: 1/8, 1/4,
        # 1/32, less 13/96; from C there is one step. Returns 1, 0, 0 less 1/3.
        (
            {"omega": 0.5, "normalize": "none"},
            [
                [2 / 3 + 1 / 32, 2 / 3 - 1 / 96, 2 / 3 + 11 / 96, 2 / 3],
                [-1 / 3 + 1 / 32, -1 / 3 - 10 / 96],
                [-1 / 3 - 1 / 16],
            ],
        ),
        (
            {"omega": 0.5, "normalize": "none", "step_weight": 32},
            [[2 / 3 + 1, 2 / 3 - 1 / 3, 2 / 3 + 11 / 3, 2 / 3], [-1 / 3 + 1, -1 / 3 - 10 / 3], [-1 / 3 - 2]],
        ),
        # A's differences 1, 1, -2 over their sd0 sqrt(2); B's -1, 11, -10 over sqrt(74); the returns' 2, -1, -1 over sqrt(2).
        (
            {"omega": 0.5, "ddof": 0, "eps": 1e-12},
            [
                [1.414214 + 0.707107, 1.414214 - 0.116248, 1.414214 + 1.278724, 1.414214],
                [-0.707107 + 0.707107, -0.707107 - 1.162476],
                [-0.707107 - 1.414214],
            ],
        ),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(GraphGPO.model_validate(fields), MAZE)
    assert_close(found, expected)


@pytest.mark.parametrize("fields", first_quick([{}, {"normalize": "none"}, {"lone": "keep"}, {"lone": "drop"}]))
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    # A constant on all returns changes which episodes are a success.
    check_credit(
        GraphGPO.model_validate({"omega": 0.5} | fields),
        relative=False,
        reads_turn_rewards=False,
        scale_equivariant=False,
    )


def slow_reference(scheme: GraphGPO, group: TrajectoryGroup) -> Rows:
    """Search backwards from the goal, a step at a time."""
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    steps: list[tuple[str | None, str | None]] = []
    for t in group.trajectories:
        is_success = not t.truncated and t.reward >= scheme.success
        after = [turn.state_key for turn in t.turns[1:]]
        after.append("the goal" if is_success else t.turns[-1].next_state_key or "nowhere")
        steps += zip([turn.state_key for turn in t.turns], after, strict=True)
    distance: dict[str | None, int] = {"the goal": 0}
    queue = deque[str | None](["the goal"])
    while queue:
        here = queue.popleft()
        for before, after_it in steps:
            if after_it == here and before not in distance:
                distance[before] = distance[here] + 1
                queue.append(before)
    farthest = max(distance.values())
    values = [scheme.omega ** (distance.get(after_it, farthest + 1) + 1) for _, after_it in steps]
    divide = scheme.normalize == "std"
    nodes = norms([before for before, _ in steps], values, scheme, divide=divide)
    compared = norms([0] * len(group.trajectories), [t.reward for t in group.trajectories], scheme, divide=divide)
    episodes = [a for a, t in zip(compared, group.trajectories, strict=True) for _ in t.turns]
    return unflatten(group, [a + scheme.step_weight * b for a, b in zip(episodes, nodes, strict=True)])


@settings(max_examples=40, deadline=None)
@given(
    groups=truncated_batches(),
    success=st.sampled_from([-1.0, 0.5, 2.0]),
    omega=st.sampled_from([0.1, 0.5, 0.9]),
    step_weight=st.sampled_from([0.0, 1.0, 2.5]),
    normalize=st.sampled_from(["none", "std"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([0.01, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = GraphGPO(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


def test_without_a_step_term_and_without_a_success_it_is_uniform() -> None:
    expected = by_turn(Uniform(), F1)
    assert by_turn(GraphGPO(step_weight=0), F1) == by_turn(GraphGPO(success=9.0), F1) == expected


def test_returns_that_miss_a_success_by_rounding_are_one() -> None:
    tenths = make_group([[0.1] * 10, [0.0] * 10], state_keys=[["A"] * 9 + ["B"], ["A"] * 10])
    assert tenths.trajectories[0].reward < 1.0
    assert by_turn(GraphGPO(), tenths) != by_turn(Uniform(), tenths)


def test_a_truncated_trajectory_leads_to_the_state_that_it_was_left_in_and_is_no_success() -> None:
    scheme = GraphGPO(omega=0.5, normalize="none")
    group = make_group([[0], [0], [0, 1]], state_keys=[["A"], ["A"], ["A", "B"]])
    left = changed(group, 0, turns=(replace(group.trajectories[0].turns[0], next_state_key="B"),), truncated=True)
    # B, nowhere, B: 1/4, 1/16, 1/4 less 3/16
    assert_close(by_turn(scheme, left)[0], [[-1 / 3 + 1 / 16], [-1 / 3 - 1 / 8], [2 / 3 + 1 / 16, 2 / 3]])
    assert_close(by_turn(scheme, changed(group, 2, truncated=True))[0], [[-1 / 3], [-1 / 3], [2 / 3, 2 / 3]])


def test_a_missing_state_key_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory f1/1, turn 2: no state key, which this scheme needs"):
        assign_credit(GraphGPO(), [without(F1, 1, 2, "state_key")])
    assert GraphGPO().requirements() == {Need.STATE_KEYS}


@each("fields", [{"omega": 1}, {"omega": 0}, {"step_weight": -1}, {"eps": 0}, {"success": float("nan")}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GraphGPO.model_validate(fields)
