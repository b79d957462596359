from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Need, TrajectoryGroup, assign_credit
from agentrl.errors import CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.triage import ROLES, Triage
from agentrl_credit.uniform import Uniform
from tests.support.credit import Rows, assert_close, batches, by_turn, eighths, norms, unflatten, without
from tests.support.each import each
from tests.support.tiers import first_quick

# A success with a step back, a failure with a useful look around.
ROLED = make_group(
    [[0, 1], [0]],
    turn_scores=[[ROLES["regression"], ROLES["progress"]], [ROLES["exploration"]]],
)


@each(
    ("fields", "expected"),
    [
        # Returns 1, 0: half a unit each way over their sd1 .707107.
        ({"normalize": "none", "eps": 1e-12}, [[0.707107 - 0.5, 0.707107 + 1], [-0.707107 + 0.5]]),
        ({"normalize": "none", "eps": 1e-12, "role_weight": 2}, [[0.707107 - 1, 0.707107 + 2], [-0.707107 + 1]]),
        # sd0 .5. The three .5, 2, -.5 less 2/3, over sqrt(38/36).
        ({"ddof": 0, "eps": 1e-12}, [[-0.162221, 1.297771], [-1.135550]]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(Triage.model_validate(fields), ROLED)
    assert_close(found, expected)


def test_roles_are_scored_as_in_the_paper() -> None:
    assert ROLES == {"progress": 1, "exploration": 0.5, "infrastructure": -0.1, "regression": -0.5}


@pytest.mark.parametrize("fields", first_quick([{}, {"normalize": "none"}, {"lone": "keep"}, {"lone": "drop"}]))
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(Triage.model_validate(fields), relative=False, scale_equivariant=False)


def slow_reference(scheme: Triage, groups: list[TrajectoryGroup]) -> list[Rows]:
    corrected: list[list[float]] = []
    for group in groups:
        outcomes = norms([0] * len(group.trajectories), [t.reward for t in group.trajectories], scheme)
        corrected.append(
            [
                outcome + scheme.role_weight * turn.signals["turn_scores"]
                for outcome, trajectory in zip(outcomes, group.trajectories, strict=True)
                for turn in trajectory.turns
            ]
        )
    flat = [a for group, row in zip(groups, corrected, strict=True) for a in row if len(group.trajectories) > 1]
    whitened = iter(norms([0] * len(flat), flat, scheme) if scheme.normalize == "batch" else flat)
    return [
        unflatten(group, [next(whitened) if len(group.trajectories) > 1 else 0.0 for _ in row])
        for group, row in zip(groups, corrected, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(turn_scores=eighths),
    role_weight=st.sampled_from([0.0, 0.5, 2.0]),
    normalize=st.sampled_from(["none", "batch"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = Triage(**fields, lone="keep")
    for found, expected in zip(by_turn(scheme, *groups), slow_reference(scheme, groups), strict=True):
        assert_close(found, expected)


def test_without_weight_it_is_uniform() -> None:
    assert by_turn(Triage(role_weight=0, normalize="none"), ROLED) == by_turn(Uniform(), ROLED)


def test_a_missing_score_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 1: no turn_scores, which this scheme needs"):
        assign_credit(Triage(), [without(ROLED, 0, 1, "turn_scores")])
    assert Triage().requirements() == {Need.TURN_SCORES}


@each("fields", [{"role_weight": -1}, {"eps": 0}, {"normalize": "std"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Triage.model_validate(fields)
