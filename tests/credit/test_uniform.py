import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import StopReason, TrajectoryGroup, assign_credit
from agentrl.errors import CreditError
from agentrl.testing.groups import make_group
from agentrl_credit.uniform import Uniform
from tests.support.each import each

F1 = make_group([[0, 1], [0.5, 0, 0], [0, 0], [1]], action_lengths=[[2, 3], [1, 2, 2], [3, 1], [4]], group_id="f1")
NORMALIZE = ["std", "none", "leave_one_out", "batch"]


def advantages(scheme: Uniform, *groups: TrajectoryGroup) -> list[list[float]]:
    """Return the one advantage of each trajectory, after checking that all its tokens have it."""
    found = []
    for row in assign_credit(scheme, groups):
        assert all(np.ptp(credit.advantages_T) == 0 for credit in row)
        found.append([float(credit.advantages_T[0]) for credit in row])
    return found


def slow_reference(scheme: Uniform, batch: list[list[list[float]]]) -> list[list[float]]:
    """Compute the same by plain loops over nested lists of rewards."""
    found = []
    for rows in batch:
        returns = [sum(row) for row in rows]
        group = []
        for i, own in enumerate(returns):
            others = returns[:i] + returns[i + 1 :]
            if not others:
                group.append(0.0)
            elif scheme.normalize == "leave_one_out":
                group.append(own - statistics.fmean(others))
            else:
                group.append(own - statistics.fmean(returns))
        if scheme.normalize == "std" and len(returns) > 1:
            group = [a / (spread(returns, scheme.ddof) + scheme.eps) for a in group]
        found.append(group)
    if scheme.normalize == "batch" and (compared := [a for group in found if len(group) > 1 for a in group]):
        found = [[a / (spread(compared, scheme.ddof) + scheme.eps) for a in group] for group in found]
    return found


def spread(values: list[float], ddof: int) -> float:
    return statistics.stdev(values) if ddof else statistics.pstdev(values)


@each(
    ("normalize", "expected"),
    [
        ("std", [0.783349, -0.261116, -1.305582, 0.783349]),
        ("none", [0.375, -0.125, -0.625, 0.375]),
        ("leave_one_out", [0.5, -0.166667, -0.833333, 0.5]),
    ],
)
def test_reference_numbers(normalize: Any, expected: list[float]) -> None:
    [found] = advantages(Uniform(normalize=normalize, eps=1e-12), F1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_default_is_grpo_with_ddof_1_and_eps_added_to_the_standard_deviation() -> None:
    # returns 0 and 1: mean .5, sd1 = sqrt(.5)
    [found] = advantages(Uniform(), make_group([[0], [1]]))
    np.testing.assert_allclose(found, np.array([-0.5, 0.5]) / (np.sqrt(0.5) + 1e-6), rtol=1e-7)
    [found] = advantages(Uniform(ddof=0, eps=0.5), make_group([[0], [1]]))
    np.testing.assert_allclose(found, [-0.5, 0.5], rtol=1e-7)  # sd0 = .5


def test_batch_divides_by_the_spread_over_all_groups() -> None:
    # deviations -1, 1 and -3, 3: the squares sum to 20 over 4 trajectories
    near, far = make_group([[0], [2]], group_id="near"), make_group([[4], [10]], group_id="far")
    found = advantages(Uniform(normalize="batch", ddof=0, eps=1e-12), near, far)
    np.testing.assert_allclose(found, np.array([[-1, 1], [-3, 3]]) / np.sqrt(5), rtol=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.lists(
        st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=15), min_size=1, max_size=16),
        min_size=1,
        max_size=3,
    ),
    normalize=st.sampled_from(NORMALIZE),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(batch: list[list[list[float]]], normalize: Any, ddof: Any, eps: float) -> None:
    scheme = Uniform(normalize=normalize, ddof=ddof, eps=eps, lone="keep")
    found = advantages(scheme, *(make_group(rows, group_id=f"g{g}") for g, rows in enumerate(batch)))
    for row, expected in zip(found, slow_reference(scheme, batch), strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6)


@each("normalize", NORMALIZE)
@each("rewards", [[[0.1, 0.2], [0.3]], [[0.1], [0.1], [0.1]], [[1, 0], [0, 1]], [[0], [0]]])
def test_a_group_of_equal_returns_gets_exact_zeros(normalize: Any, rewards: list[list[float]]) -> None:
    # .1 + .2 and .3 differ by 5.6e-17, which a standard deviation of 3.9e-17 would blow up to +-.7
    scheme = Uniform(normalize=normalize, eps=1e-30)
    [found] = advantages(scheme, make_group(rewards))
    assert found == [0.0] * len(rewards)


@each("normalize", NORMALIZE)
def test_a_lone_trajectory_stops_is_kept_or_is_dropped(normalize: Any) -> None:
    lone = replace(F1.trajectories[0], stop_reason=StopReason.ENGINE_ERROR)
    group = replace(make_group([[5], [9]]), group_id="f1", trajectories=(lone, F1.trajectories[1]))
    with pytest.raises(CreditError, match=r"credit scheme Uniform: group f1 .* f1/1, .* lone: keep .* lone: drop"):
        assign_credit(Uniform(normalize=normalize), [group])
    [[_, kept]] = assign_credit(Uniform(normalize=normalize, lone="keep"), [group])
    assert kept.advantages_T.tolist() == [0] * 5
    assert kept.keep_T.all()
    [[_, dropped]] = assign_credit(Uniform(normalize=normalize, lone="drop"), [group])
    assert not dropped.keep_T.any()


def test_a_lone_trajectory_does_not_enter_the_batch_statistic() -> None:
    pair, single = make_group([[0], [2]], group_id="pair"), make_group([[7]], group_id="single")
    alone = advantages(Uniform(normalize="batch"), pair)
    assert advantages(Uniform(normalize="batch", lone="keep"), pair, single)[:1] == alone


def test_a_failed_trajectory_does_not_enter_any_statistic() -> None:
    scheme = Uniform()
    bad = replace(F1.trajectories[0], trajectory_id="bad", stop_reason=StopReason.ENV_ERROR)
    mixed = replace(F1, trajectories=(*F1.trajectories[:2], bad, *F1.trajectories[2:]))
    [expected], [found] = scheme.assign([F1]), scheme.assign([mixed])
    assert not found[2].keep_T.any()
    for a, b in zip(expected, found[:2] + found[3:], strict=True):
        np.testing.assert_array_equal(a.advantages_T, b.advantages_T)


@each(
    "fields",
    [{"eps": 0}, {"eps": -1}, {"eps": float("inf")}, {"ddof": 2}, {"normalize": "sd"}, {"lone": "zero"}, {"x": 1}],
)
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Uniform.model_validate(fields)
