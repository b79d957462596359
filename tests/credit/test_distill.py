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
from agentrl_credit.distill import Distill
from tests.support.credit import Rows, assert_close, batches, by_token, logprobs, tokens, without
from tests.support.each import each
from tests.support.tiers import first_quick

STUDENT = make_group(
    [[0]], action_lengths=[[3]], behavior_logprobs=[[[-1, -0.5, -2]]], teacher_logprobs=[[[-0.8, -1.5, -2]]]
)
TEACHERS = {
    "model": ("teacher_logprobs", Need.TEACHER_LOGPROBS),
    "reference": ("reference_logprobs", Need.REFERENCE_LOGPROBS),
    "hindsight": ("hindsight_logprobs", Need.HINDSIGHT_LOGPROBS),
}


@each(
    ("discount", "expected"),
    [
        (0.0, [0.2, -1, 0]),
        (0.5, [-0.3, -1, 0]),
        (1.0, [-0.8, -1, 0]),
    ],
)
def test_reference_numbers(discount: float, expected: list[float]) -> None:
    [found] = by_token(Distill(discount=discount), STUDENT)
    assert_close(found, [expected])


@pytest.mark.parametrize("teacher", first_quick(TEACHERS))
@pytest.mark.parametrize("discount", first_quick([0.0, 0.5]))
def test_it_passes_the_conformance_check(teacher: Any, discount: float) -> None:
    check_credit(Distill(teacher=teacher, discount=discount), relative=False)


def slow_reference(scheme: Distill, group: TrajectoryGroup) -> Rows:
    rows = []
    for trajectory in group.trajectories:
        differences = []
        for turn in trajectory.turns:
            teacher = turn.signals[TEACHERS[scheme.teacher][0]]
            differences += [-(p - q) for p, q in zip(turn.behavior_logprobs, teacher, strict=True)]
        rows.append(
            [sum(scheme.discount**j * d for j, d in enumerate(differences[t:])) for t in range(len(differences))]
        )
    return rows


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(teacher_logprobs=tokens(logprobs), reference_logprobs=tokens(logprobs)),
    teacher=st.sampled_from(["model", "reference"]),
    discount=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = Distill(**fields)
    for group, found in zip(groups, by_token(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@each("observation", [0, 1, 50])
def test_the_discount_ticks_over_action_tokens_alone_and_across_turns(observation: int) -> None:
    # Differences 0, 0 | 1 | 0, 4, in three turns with observations in between: the last but one action token is one away
    # from the 4, whatever the environment said.
    group = make_group(
        [[0, 0, 0]],
        action_lengths=[[2, 1, 2]],
        observation_lengths=[[3, observation, observation]],
        behavior_logprobs=[[[-1, -1], [-2], [-1, -5]]],
        teacher_logprobs=[[[-1, -1], [-1], [-1, -1]]],
    )
    [[row]] = by_token(Distill(discount=0.5), group)
    assert row == [0.25 + 0.25, 0.5 + 0.5, 1 + 1, 2, 4]


def test_a_teacher_that_agrees_teaches_nothing() -> None:
    group = make_group([[5, 7], [0]], teacher_logprobs=[[-0.25, -0.5], [-0.5]])
    assert [t.behavior_logprobs for t in group.trajectories[0].turns] == [(-0.25,), (-0.5,)]
    for discount in (0.0, 1.0):
        assert by_token(Distill(discount=discount), group) == [[[0, 0], [0]]]


def test_tokens_that_the_teacher_likes_better_are_raised() -> None:
    [[row]] = by_token(Distill(), STUDENT)
    assert [bool(a > 0) for a in row] == [True, False, False]


def test_the_mean_credit_is_less_the_divergence_from_the_teacher() -> None:
    # One token, sampled with .2, .3 or .5, where the teacher has .5, .25 and .25.
    policy, teacher = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.25, 0.25])
    credits = [
        by_token(Distill(), make_group([[0]], behavior_logprobs=[[np.log(p)]], teacher_logprobs=[[np.log(q)]]))[0][0][0]
        for p, q in zip(policy, teacher, strict=True)
    ]
    np.testing.assert_allclose(policy @ credits, -np.sum(policy * np.log(policy / teacher)), rtol=1e-6)


def test_rewards_play_no_part() -> None:
    rewarded = replace(STUDENT.trajectories[0], turns=(replace(STUDENT.trajectories[0].turns[0], reward=9.0),))
    assert by_token(Distill(), replace(STUDENT, trajectories=(rewarded,))) == by_token(Distill(), STUDENT)


@each("teacher", TEACHERS)
def test_only_the_chosen_teacher_is_asked_and_missed(teacher: Any) -> None:
    field, need = TEACHERS[teacher]
    assert Distill(teacher=teacher).requirements() == {need}
    everyone: dict[str, Any] = {field: [[-3, -4], [-5]] for field, _ in TEACHERS.values()}
    everyone[field] = [[-0.25, -1.5], [0]]
    group = make_group([[0, 0], [0]], **everyone)
    assert by_token(Distill(teacher=teacher), group) == [[[0, -1], [0.5]]]
    with pytest.raises(CreditError, match=rf"trajectory g/0, turn 1: no {field}, which this scheme needs"):
        assign_credit(Distill(teacher=teacher), [without(group, 0, 1, field)])


@each("fields", [{"discount": -0.1}, {"discount": 1.1}, {"teacher": "policy"}, {"gamma": 0}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Distill.model_validate(fields)
