import itertools
from collections.abc import Sequence
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
from agentrl_credit.tree import Tree
from agentrl_credit.uniform import Uniform
from tests.support.credit import (
    Rows,
    assert_close,
    batches,
    by_turn,
    changed,
    discounts,
    eighths,
    exact_gradient,
    mean,
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
FORKED = make_group([[1, 0, 2], [4]], branch_rewards=[[((0, 0), (2,)), ((1, 5),), ()], [()]])


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        # V(start) of the first is the mean of its forks' 0 and 2 and its sibling's 4, V(1) = 6. The turns after the last
        # fork share 0 + 2 - 6. V(start) of the second is the first's 3.
        (1.0, [[1 + 6 - 2, 2 - 6, 2 - 6], [4 - 3]]),
        # V(1) = 1 + .5 * 5; the shared step is 0 + .5 * 2 - 3.5; the first's return is 1 + .25 * 2.
        (0.5, [[1 + 0.5 * 3.5 - 2, 1 - 3.5, 1 - 3.5], [4 - 1.5]]),
    ],
)
def test_reference_numbers(gamma: float, expected: Rows) -> None:
    assert by_turn(Tree(gamma=gamma), FORKED) == [expected]


@pytest.mark.parametrize("lone", first_quick(["error", "keep", "drop"]))
def test_it_passes_the_conformance_check(lone: Any) -> None:
    check_credit(Tree(lone=lone, gamma=0.5), relative=False, scale_equivariant=True)


def slow_reference(scheme: Tree, group: TrajectoryGroup) -> Rows:
    rows: Rows = []
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    for trajectory in group.trajectories:
        forks = [turn.branch_rewards or () for turn in trajectory.turns]
        values: list[float | None] = [None] * len(forks)
        for k, forked in enumerate(forks):
            returns = [to_go(rewards, scheme.gamma)[0] for rewards in forked]
            if k == 0:
                siblings = [t for t in group.trajectories if t is not trajectory]
                returns += [to_go(rewards_of(t), scheme.gamma)[0] for t in siblings]
            values[k] = mean(returns) if returns else None
        rewards, row = rewards_of(trajectory), [0.0] * len(forks)
        for k in range(len(forks)):
            # from the last turn with a value to the next one
            first = max(j for j in range(k + 1) if values[j] is not None)
            end = next((j for j in range(k + 1, len(forks)) if values[j] is not None), len(forks))
            after = values[end] or 0.0 if end < len(forks) else 0.0
            gained = sum(scheme.gamma ** (j - first) * rewards[j] for j in range(first, end))
            row[k] = gained + scheme.gamma ** (end - first) * after - (values[first] or 0.0)
        rows.append(row)
    return rows


@settings(max_examples=40, deadline=None)
@given(groups=batches(branch_rewards=rollouts), gamma=discounts)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], gamma: float) -> None:
    scheme = Tree(gamma=gamma, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


forked_everywhere = st.lists(st.lists(eighths, min_size=1, max_size=4).map(tuple), min_size=1, max_size=2).map(tuple)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(groups=batches(branch_rewards=forked_everywhere))
def test_the_turns_sum_to_the_return_less_the_value_of_the_start(groups: list[TrajectoryGroup]) -> None:
    for group, rows in zip(groups, by_turn(Tree(lone="keep"), *groups), strict=True):
        for trajectory, row in zip(group.trajectories, rows, strict=True):
            forks = [sum(rewards) for rewards in trajectory.turns[0].branch_rewards or ()]
            siblings = [t.reward for t in group.trajectories if t is not trajectory]
            total = trajectory.reward - mean(forks + siblings) if siblings else 0.0
            np.testing.assert_allclose(sum(row), total, rtol=1e-5, atol=1e-5)  # a sum of float32 numbers


def test_turns_between_forks_share_the_advantage_of_their_segment() -> None:
    # forked before turns 0, 2 and 5 of seven; the values are 1, 2 and 3
    forks = [((1,),), (), ((2,),), (), (), ((3,),), ()]
    group = make_group([[0.5, 1, 0, 0, 4, 1, 1], [1]], branch_rewards=[forks, [()]])
    [[row, _]] = by_turn(Tree(), group)
    assert row == [2.5, 2.5, 5, 5, 5, -1, -1]
    # each segment counted once, they sum to R - V(start)
    assert row[0] + row[2] + row[5] == 7.5 - 1
    # the discount ticks at every turn of a segment: .5 + .5 + .25 * 2 - 1, .25 * 4 + .125 * 3 - 2, 1 + .5 - 3
    [[row, _]] = by_turn(Tree(gamma=0.5), group)
    assert row == [0.5, 0.5, -0.625, -0.625, -0.625, -1.5, -1.5]


def test_without_any_fork_it_is_the_return_less_the_siblings_at_every_turn() -> None:
    rewards = [[0.0, 1.0], [0.5, 0.0, 0.0], [0.0, 0.0], [1.0]]
    group = make_group(rewards, branch_rewards=[[()] * len(row) for row in rewards])
    assert_close(by_turn(Tree(), group)[0], by_turn(Uniform(normalize="leave_one_out"), group)[0])


def test_the_own_return_enters_no_value() -> None:
    # Nine more at the last turn are nine more for the segment that ends there, and move nothing before it.
    *turns, last = FORKED.trajectories[0].turns
    more = changed(FORKED, 0, turns=(*turns, replace(last, reward=last.reward + 9)))
    [[before, sibling]], [[after, moved]] = by_turn(Tree(), FORKED), by_turn(Tree(), more)
    np.testing.assert_allclose(np.array(after) - before, [0, 9, 9])
    # the sibling's start is worth nine more
    assert moved[0] == sibling[0] - 9


def test_rollouts_from_the_start_count_beside_the_siblings() -> None:
    # V(start) of the first: forks 0 and 0, siblings 3 and 6; of the second: siblings 9 and 6
    group = make_group([[9], [3], [6]], branch_rewards=[[((0,), (0,))], [()], [()]])
    assert by_turn(Tree(), group) == [[[9 - 2.25], [3 - 7.5], [6 - 6]]]


def test_nothing_follows_the_last_turn_also_where_a_limit_ended_the_episode() -> None:
    cut_off = changed(FORKED, 0, truncated=True, signals={"values": 100.0})
    assert by_turn(Tree(), cut_off) == by_turn(Tree(), FORKED)


def test_rollouts_of_another_group_are_not_read() -> None:
    other = make_group([[5], [9]], branch_rewards=[[((1,),)], [()]], group_id="other")
    assert by_turn(Tree(), FORKED, other) == by_turn(Tree(), FORKED) + by_turn(Tree(), other)


def expected_gradient(forked: Sequence[bool]) -> npt.NDArray[np.float64]:
    """Average over all pairs of trajectories of the stopping problem, and all outcomes of one fork before turns of the first.

    The pair's members are alike, so that the first stands for both; the second's forks do not enter its credit.
    """
    gradient = np.zeros(3)
    for path, sibling in itertools.product(stopping_paths(), repeat=2):
        num = len(path.rewards)
        for forks in itertools.product(*(stopping_paths(k) if forked[k] else [None] for k in range(num))):
            probability = path.probability * sibling.probability * np.prod([f.probability for f in forks if f])
            branches: Any = [[(tuple(fork.rewards),) if fork else () for fork in forks], [()] * len(sibling.rewards)]
            [[row, _]] = by_turn(Tree(), make_group([path.rewards, sibling.rewards], branch_rewards=branches))
            gradient += weighted(float(probability), [a * s for a, s in zip(row, path.scores, strict=True)])
    return gradient


@each("forked", list(itertools.product([False, True], repeat=3)))
def test_it_follows_the_exact_policy_gradient_in_expectation_wherever_it_was_forked(forked: list[bool]) -> None:
    # 1e-6: advantages are float32
    np.testing.assert_allclose(expected_gradient(forked), exact_gradient(), atol=1e-6)


def test_forks_that_are_not_recorded_are_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 2: no branch_rewards, which this scheme needs"):
        assign_credit(Tree(), [without(FORKED, 0, 2, "branch_rewards")])
    assert Tree().requirements() == {Need.BRANCHES}


@each("fields", [{"gamma": 2}, {"gamma": -1}, {"lone": "zero"}, {"lam": 1}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Tree.model_validate(fields)
