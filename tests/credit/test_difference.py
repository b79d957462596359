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
from agentrl_credit.difference import Difference
from tests.support.credit import (
    Rows,
    assert_close,
    batches,
    by_turn,
    discounts,
    eighths,
    exact_gradient,
    mean,
    norms,
    rewards_of,
    stopping_paths,
    to_go,
    weighted,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick

rollouts = st.lists(st.lists(eighths, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple)

# The first was forked twice before its first turn, once before its second and not before its third.
FORKED = make_group([[1, 0, 2], [4]], branch_rewards=[[((0, 0), (2,)), ((1, 5),), ()], [((3,),)]])


@each(
    ("fields", "expected"),
    [
        # 3 less the mean of 0 and 2; 2 less 6; nothing to compare the third with; 4 less 3.
        ({}, [[2, -4, 0], [1]]),
        # G .5 * .5 * 2 + 1, .5 * 2, 2; the second turn's fork got 1 + .5 * 5
        ({"gamma": 0.5}, [[0.5, -2.5, 0], [1]]),
        # 3 among 3, 0, 2: mean 5/3, sd1 1.527525; 2 among 2, 6: mean 4, sd1 2.828427; 4 among 4, 3
        ({"normalize": "std", "eps": 1e-12}, [[0.872872, -0.707107, 0], [0.707107]]),
        ({"normalize": "std", "ddof": 0, "eps": 1e-12}, [[1.069045, -1, 0], [1]]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(Difference(**fields), FORKED)
    assert_close(found, expected)


@pytest.mark.parametrize(("normalize", "ddof"), first_quick([("none", 1), ("std", 1), ("std", 0)]))
def test_it_passes_the_conformance_check(normalize: Any, ddof: Any) -> None:
    check_credit(
        Difference(normalize=normalize, ddof=ddof, gamma=0.5), relative=False, scale_equivariant=normalize == "none"
    )


def slow_reference(scheme: Difference, group: TrajectoryGroup) -> Rows:
    rows = []
    for trajectory in group.trajectories:
        row = []
        for turn, own in zip(trajectory.turns, to_go(rewards_of(trajectory), scheme.gamma), strict=True):
            others = [to_go(rewards, scheme.gamma)[0] for rewards in turn.branch_rewards or ()]
            if scheme.normalize == "std":
                row.append(norms([0] * (len(others) + 1), [own, *others], scheme)[0])
            else:
                row.append(mean([own - other for other in others]) if others else 0.0)
        rows.append(row)
    return rows


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(branch_rewards=rollouts),
    gamma=discounts,
    normalize=st.sampled_from(["none", "std"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = Difference(**fields)
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@pytest.mark.parametrize("normalize", ["none", "std"])
def test_a_turn_at_which_nothing_was_forked_gets_zero(normalize: Any) -> None:
    group = make_group([[1, 2], [3]], branch_rewards=[[(), ((0,),)], [()]])
    [found] = by_turn(Difference(normalize=normalize), group)
    assert found[0][0] == found[1][0] == 0
    assert found[0][1] > 0


def test_counterfactuals_that_fared_alike_give_exact_zeros() -> None:
    # .1 + .2 and .3 differ by rounding alone
    group = make_group([[0.1 + 0.2]], branch_rewards=[[((0.3,), (0.1, 0.2))]])
    for normalize in ("none", "std"):
        scheme = Difference.model_validate({"normalize": normalize, "eps": 1e-30})
        assert by_turn(scheme, group) == [[[0]]]


def test_siblings_are_no_counterfactuals() -> None:
    [both] = by_turn(Difference(), FORKED)
    [alone] = by_turn(Difference(), replace(FORKED, trajectories=FORKED.trajectories[:1]))
    assert alone == both[:1]


def test_the_own_return_moves_the_own_advantage_alone() -> None:
    *turns, last = FORKED.trajectories[0].turns
    first = replace(FORKED.trajectories[0], turns=(*turns, replace(last, reward=last.reward + 9)))
    [before], [after] = (
        by_turn(Difference(), group)
        for group in (FORKED, replace(FORKED, trajectories=(first, FORKED.trajectories[1])))
    )
    assert after == [[before[0][0] + 9, before[0][1] + 9, 0], before[1]]


def expected_gradient(*, forked: tuple[bool, bool, bool]) -> npt.NDArray[np.float64]:
    """Average over all trajectories of the stopping problem, and all outcomes of one fork before each turn that has one."""
    gradient = np.zeros(3)
    for path in stopping_paths():
        options = [stopping_paths(k) if forked[k] else [None] for k in range(len(path.rewards))]
        for forks in itertools.product(*options):
            probability = path.probability * np.prod([fork.probability for fork in forks if fork])
            branches = [[(tuple(fork.rewards),) if fork else () for fork in forks]]
            [[row]] = by_turn(Difference(), make_group([path.rewards], branch_rewards=branches))
            gradient += weighted(float(probability), [a * s for a, s in zip(row, path.scores, strict=True)])
    return gradient


def test_forked_before_every_turn_it_follows_the_exact_policy_gradient_in_expectation() -> None:
    # 1e-6: advantages are float32
    np.testing.assert_allclose(expected_gradient(forked=(True, True, True)), exact_gradient(), atol=1e-6)


def test_turns_before_which_nothing_was_forked_do_not_learn() -> None:
    found = expected_gradient(forked=(True, False, True))
    np.testing.assert_allclose(found, exact_gradient() * [1, 0, 1], atol=1e-6)
    assert abs(exact_gradient()[1]) > 0.01


def test_forks_that_are_not_recorded_are_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/1, turn 0: no branch_rewards, which this scheme needs"):
        assign_credit(Difference(), [without(FORKED, 1, 0, "branch_rewards")])
    assert Difference().requirements() == {Need.BRANCHES}


@each("fields", [{"gamma": 2}, {"normalize": "batch"}, {"eps": 0}, {"ddof": 2}, {"lone": "keep"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Difference.model_validate(fields)
