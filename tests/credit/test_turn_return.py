import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import CreditScheme, Need, StopReason, TrajectoryGroup, assign_credit
from agentrl.errors import CreditError
from agentrl.testing.groups import make_group
from agentrl_credit.turn_return import TurnReturn
from agentrl_credit.uniform import Uniform
from tests.support.credit import (
    F1,
    GO_REWARDS,
    LOGITS,
    STOP_REWARDS,
    assert_close,
    batches,
    by_turn,
    exact_gradient,
    spread,
    stopping_paths,
)
from tests.support.each import each


@each(
    ("fields", "expected"),
    [
        (
            {"baseline": "turn", "leave_one_out": False},
            [[0.375, 0.666667], [-0.125, -0.333333, 0], [-0.625, -0.333333], [0.375]],
        ),
        # Returns-to-go [1,1],[.5,0,0],[0,0],[1]; the others of each: 1.5/6, 3/5, 3.5/6, 2.5/7.
        ({}, [[0.75, 0.75], [-0.1, -0.6, -0.6], [-0.583333, -0.583333], [0.642857]]),
        # A: 1, .5, 0, 1; B: 1, 0; C: 0, 0.
        ({"baseline": "state"}, [[0.5, 1], [-0.166667, 0, -1], [-0.833333, 0], [0.5]]),
        # Index 0 as above; index 1: 1, 0, 0 with sd1 .57735; index 2 is reached by one alone.
        (
            {"baseline": "turn", "leave_one_out": False, "normalize": "std", "eps": 1e-12},
            [[0.783349, 1.154701], [-0.261116, -0.577350, 0], [-1.305582, -0.577350], [0.783349]],
        ),
        # gamma .5: returns-to-go [.5,1],[.5,0,0],[0,0],[1]; the others: 1.5/6, 2.5/5, 3/6, 2/7.
        ({"gamma": 0.5}, [[0.25, 0.75], [0, -0.5, -0.5], [-0.5, -0.5], [0.714286]]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: list[list[float]]) -> None:
    [found] = by_turn(TurnReturn(**fields), F1)
    assert_close(found, expected)


def test_batch_divides_by_the_spread_of_all_advantages_and_does_not_move_them() -> None:
    plain = by_turn(TurnReturn(), F1, make_group([[2], [4]], group_id="other"))
    flat = [a for rows in plain for row in rows for a in row]
    assert abs(statistics.fmean(flat)) > 0.01
    found = by_turn(TurnReturn(normalize="batch"), F1, make_group([[2], [4]], group_id="other"))
    for rows, scaled in zip(plain, found, strict=True):
        assert_close(scaled, [[a / (statistics.stdev(flat) + 1e-6) for a in row] for row in rows])


def slow_reference(scheme: TurnReturn, batch: Sequence[TrajectoryGroup]) -> list[list[list[float]]]:
    """Compute the same by plain loops."""
    found = []
    for group in batch:
        entries = []  # trajectory, turn, cell, return-to-go
        for i, trajectory in enumerate(group.trajectories):
            for k in range(len(trajectory.turns)):
                rest = [turn.reward for turn in trajectory.turns[k:]]
                cell = {"pool": 0, "turn": k, "state": trajectory.turns[k].state_key}[scheme.baseline]
                entries.append((i, k, cell, sum(scheme.gamma**n * reward for n, reward in enumerate(rest))))
        rows: list[list[float]] = [[0.0] * len(t.turns) for t in group.trajectories]
        for i, k, cell, own in entries:
            inside = [g for _, _, c, g in entries if c == cell]
            others = [g for j, _, c, g in entries if c == cell and j != i]
            if others:
                rows[i][k] = own - statistics.fmean(others if scheme.leave_one_out else inside)
                if scheme.normalize == "std":
                    rows[i][k] /= spread(inside, scheme.ddof) + scheme.eps
        found.append(rows)
    compared = [a for rows in found if len(rows) > 1 for row in rows for a in row]
    if scheme.normalize == "batch" and compared:
        scale = spread(compared, scheme.ddof) + scheme.eps
        found = [[[a / scale for a in row] for row in rows] for rows in found]
    return found


@settings(max_examples=60, deadline=None)
@given(
    groups=batches(),
    gamma=st.sampled_from(
        [0, 0.5, 1]
    ),  # with quarters as rewards all returns are exact, and equal where they are equal
    baseline=st.sampled_from(["pool", "state", "turn"]),
    leave_one_out=st.booleans(),
    normalize=st.sampled_from(["none", "std", "batch"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = TurnReturn(**fields, lone="keep")
    for found, expected in zip(by_turn(scheme, *groups), slow_reference(scheme, groups), strict=True):
        assert_close(found, expected)


def expected_gradient(scheme: CreditScheme, *, size: int = 3) -> npt.NDArray[np.float64]:
    """Average, over all groups, the mean over trajectories of sum over turns of A_k times the score."""
    gradient = np.zeros(3)
    for paths in itertools.product(stopping_paths(), repeat=size):
        keys = [["start", "on", "on"][: len(path.rewards)] for path in paths]
        [rows] = by_turn(scheme, make_group([path.rewards for path in paths], state_keys=keys))
        for path, advantages_K in zip(paths, rows, strict=True):
            weight = math.prod(p.probability for p in paths) / size
            gradient[: len(path.scores)] += weight * np.array(advantages_K) * np.array(path.scores)
    return gradient


def cosine(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


@each("size", [2, 3])
@each("scheme", [TurnReturn(), Uniform(normalize="leave_one_out")])
def test_the_default_follows_the_exact_policy_gradient_in_expectation(scheme: CreditScheme, size: int) -> None:
    # 1e-6: advantages are float32
    np.testing.assert_allclose(expected_gradient(scheme, size=size), exact_gradient(), atol=1e-6)


def test_the_exact_gradient_is_the_slope_of_the_expected_return() -> None:
    def expected_return(logits: Sequence[float]) -> float:
        stops = [1 / (1 + math.exp(-logit)) for logit in logits]
        value = 0.0
        for stop, here, onwards in reversed(list(zip(stops, STOP_REWARDS, GO_REWARDS, strict=True))):
            value = stop * here + (1 - stop) * (onwards + value)
        return value

    h = 1e-5
    slopes = []
    for k in range(3):
        up, down = [[x + sign * h * (j == k) for j, x in enumerate(LOGITS)] for sign in (1, -1)]
        slopes.append((expected_return(up) - expected_return(down)) / (2 * h))
    np.testing.assert_allclose(exact_gradient(), slopes, atol=1e-9)


@each(
    ("baseline", "leave_one_out"),
    [("turn", False), ("turn", True), ("state", False), ("state", True), ("pool", False)],
)
def test_the_other_baselines_are_biased_in_direction_too(baseline: Any, leave_one_out: bool) -> None:
    gradient = expected_gradient(TurnReturn(baseline=baseline, leave_one_out=leave_one_out))
    assert np.abs(gradient - exact_gradient()).max() > 0.01
    assert cosine(gradient, exact_gradient()) < 0.999


def test_a_baseline_without_the_own_trajectory_reads_none_of_its_turns() -> None:
    siblings = [[0.5, 0.0, 0.0], [0.0, 0.0, 1.0]]
    keys = [["A", "A", "A"]] * 3
    for baseline in ("pool", "state", "turn"):
        scheme = TurnReturn.model_validate({"baseline": baseline})
        before, after = (
            by_turn(scheme, make_group([[0.0, 1.0, last], *siblings], state_keys=keys))[0] for last in (0.0, 6.0)
        )
        # every return-to-go of the first trajectory grew by 6, and so did its advantages: the baseline stood still
        np.testing.assert_allclose(np.array(after[0]) - before[0], 6, rtol=1e-6)


def test_an_intermediate_reward_is_credited_to_the_turns_up_to_it() -> None:
    late, early = make_group([[0, 0, 1], [0, 0, 0.5]]), make_group([[0, 1, 0], [0, 0, 0.5]])
    # the sibling's returns-to-go are .5 at each turn
    assert by_turn(TurnReturn(), late)[0][0] == [0.5, 0.5, 0.5]
    assert by_turn(TurnReturn(), early)[0][0] == [0.5, 0.5, -0.5]


@each("baseline", ["pool", "state", "turn"])
@each("normalize", ["none", "std", "batch"])
def test_equal_returns_to_go_get_exact_zeros(baseline: Any, normalize: Any) -> None:
    group = make_group([[0.1 + 0.2], [0.3]], state_keys=[["A"], ["A"]])
    [found] = by_turn(TurnReturn(baseline=baseline, normalize=normalize, eps=1e-30), group)
    assert found == [[0], [0]]


def test_a_turn_that_no_sibling_has_gets_zero() -> None:
    group = make_group([[1, 2, 4], [1]], state_keys=[["A", "B", "B"], ["A"]])
    for leave_one_out in (True, False):
        for baseline in ("turn", "state"):
            scheme = TurnReturn.model_validate({"baseline": baseline, "leave_one_out": leave_one_out})
            [[first, _]] = by_turn(scheme, group)
            assert first[1:] == [0, 0]
            assert first[0] > 0


def test_a_lone_trajectory_stops_is_kept_or_is_dropped() -> None:
    group = replace(F1, trajectories=F1.trajectories[1:2])
    with pytest.raises(CreditError, match=r"credit scheme TurnReturn: group f1 .* f1/1, .* lone: keep .* lone: drop"):
        assign_credit(TurnReturn(), [group])
    [[kept]] = assign_credit(TurnReturn(lone="keep"), [group])
    assert kept.advantages_T.tolist() == [0] * 5
    assert kept.keep_T.all()
    [[dropped]] = assign_credit(TurnReturn(lone="drop"), [group])
    assert not dropped.keep_T.any()


def test_a_failed_trajectory_does_not_enter_any_baseline() -> None:
    bad = replace(F1.trajectories[0], trajectory_id="bad", stop_reason=StopReason.ENGINE_ERROR)
    mixed = replace(F1, trajectories=(bad, *F1.trajectories))
    for baseline in ("pool", "state", "turn"):
        scheme = TurnReturn.model_validate({"baseline": baseline})
        [expected], [found] = scheme.assign([F1]), scheme.assign([mixed])
        assert not found[0].keep_T.any()
        for a, b in zip(expected, found[1:], strict=True):
            np.testing.assert_array_equal(a.advantages_T, b.advantages_T)


def test_state_keys_are_asked_for_only_where_they_are_used() -> None:
    assert TurnReturn().requirements() == {Need.TURN_REWARDS}
    assert TurnReturn(baseline="state").requirements() == {Need.STATE_KEYS}


def test_a_missing_state_key_is_named_by_trajectory_and_turn() -> None:
    group = make_group([[0, 1], [1, 0]], state_keys=[["A", "B"], ["A", None]])
    with pytest.raises(CreditError, match=r"trajectory g/1, turn 1: no state key, which this scheme needs"):
        assign_credit(TurnReturn(baseline="state"), [group])


@each(
    "fields", [{"gamma": -0.1}, {"gamma": 1.1}, {"gamma": float("nan")}, {"eps": 0}, {"ddof": 2}, {"baseline": "step"}]
)
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TurnReturn.model_validate(fields)
