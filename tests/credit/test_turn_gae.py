import itertools
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
from agentrl_credit.turn_gae import TurnGAE
from tests.support.credit import (
    Rows,
    assert_close,
    by_turn,
    changed,
    discounts,
    eighths,
    rewards_of,
    scaled_by_batch,
    slow_gae,
    tokens,
    truncated_batches,
    without,
)
from tests.support.each import each
from tests.support.signals import with_signals
from tests.support.tiers import first_quick

TWO = make_group([[0, 1]], values=[[[0.5, 7], [0.8, 9]]], action_lengths=[[2, 2]])


@each(
    ("fields", "expected"),
    [
        # delta_1 = 1 - .8; delta_0 = .99 * .8 - .5 = .292; A_0 = .292 + .99 * .9 * .2
        ({"gamma": 0.99, "lam": 0.9}, [0.4702, 0.2]),
        ({"lam": 1}, [0.5, 0.2]),
        # at the last token the critic says 7 and 9
        ({"lam": 1, "read": "last"}, [-6, -8]),
        ({"lam": 0, "gamma": 0.5, "read": "last"}, [-2.5, -8]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: list[float]) -> None:
    [found] = by_turn(TurnGAE(**fields), TWO)
    assert_close(found, [expected])


def ends_high(group: TrajectoryGroup) -> TrajectoryGroup:
    """Double the value at the last token of each action, so that it does not depend on how many tokens there are."""
    for i, trajectory in enumerate(group.trajectories):
        turns = []
        for turn in trajectory.turns:
            first, *others = turn.signals["values"]
            turns.append(with_signals(turn, values=(*[first] * len(others), 2 * first)))
        group = changed(group, i, turns=tuple(turns))
    return group


@pytest.mark.parametrize(("read", "normalize"), first_quick(itertools.product(["first", "last"], ["none", "batch"])))
def test_it_passes_the_conformance_check(read: Any, normalize: Any) -> None:
    check_credit(
        TurnGAE(read=read, normalize=normalize, gamma=0.5),
        relative=False,
        scale_equivariant=normalize == "none",
        prepare=ends_high if read == "last" else None,
    )


def slow_reference(scheme: TurnGAE, group: TrajectoryGroup) -> Rows:
    rows = []
    for trajectory in group.trajectories:
        values = [turn.signals["values"][0 if scheme.read == "first" else -1] for turn in trajectory.turns]
        last = trajectory.signals["values"] if trajectory.truncated else 0.0
        rows.append(slow_gae(rewards_of(trajectory), values, gamma=scheme.gamma, lam=scheme.lam, final_value=last))
    return rows


@settings(max_examples=40, deadline=None)
@given(
    groups=truncated_batches(values=tokens(eighths)),
    gamma=discounts,
    lam=st.sampled_from([0.0, 0.25, 1.0]),
    read=st.sampled_from(["first", "last"]),
    normalize=st.sampled_from(["none", "batch"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.1]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = TurnGAE(**fields)
    expected = [slow_reference(scheme, group) for group in groups]
    if scheme.normalize == "batch":
        expected = scaled_by_batch(expected, scheme)
    for found, rows in zip(by_turn(scheme, *groups), expected, strict=True):
        assert_close(found, rows)


def test_a_truncated_trajectory_continues_from_the_critics_last_word() -> None:
    cut_off = changed(TWO, 0, truncated=True, signals={"values": 2.0})
    # one step: .8 - .5, and 1 + .5 * 2 - .8 with gamma .5 on both
    assert_close(by_turn(TurnGAE(lam=0, gamma=0.5), cut_off)[0], [[0.5 * 0.8 - 0.5, 1 + 0.5 * 2 - 0.8]])
    assert_close(by_turn(TurnGAE(lam=1), cut_off)[0], [[2.5, 2.2]])


def test_where_the_task_ended_nothing_follows_whatever_the_critic_says() -> None:
    ended = changed(TWO, 0, signals={"values": 2.0})
    assert by_turn(TurnGAE(), ended) == by_turn(TurnGAE(), TWO)


def test_a_perfect_critic_leaves_nothing_to_credit() -> None:
    group = make_group([[1, 0, 2], [0.5]], values=[[3, 2, 2], [0.5]])
    for lam in (0.0, 0.5, 1.0):
        assert by_turn(TurnGAE(lam=lam), group) == [[[0, 0, 0], [0]]]


def test_batch_divides_by_the_spread_of_all_turns_and_does_not_move_them() -> None:
    # advantages 1, 1 and 4 with sd0 sqrt(2): each turn counts once
    group = make_group([[0, 1], [4]], values=[[0, 0], [0]])
    assert by_turn(TurnGAE(lam=1), group) == [[[1, 1], [4]]]
    [found] = by_turn(TurnGAE(lam=1, normalize="batch", ddof=0, eps=1e-12), group)
    assert_close(found, [[0.5**0.5, 0.5**0.5], [4 * 0.5**0.5]])


def test_a_trajectory_without_siblings_is_credited_like_any_other() -> None:
    pair = make_group([[0, 1], [5]], values=[[0.5, 0.8], [1]])
    [both], [alone] = by_turn(TurnGAE(), pair), by_turn(TurnGAE(), replace(pair, trajectories=pair.trajectories[:1]))
    assert alone == both[:1]


def test_missing_values_are_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 1: no values, which this scheme needs"):
        assign_credit(TurnGAE(), [without(TWO, 0, 1, "values")])
    with pytest.raises(CreditError, match=r"trajectory g/0 was truncated and has no value after its end"):
        assign_credit(TurnGAE(), [changed(TWO, 0, truncated=True)])
    assert TurnGAE().requirements() == {Need.VALUES}


@each("fields", [{"gamma": 2}, {"lam": -0.1}, {"read": "mean"}, {"eps": 0}, {"lone": "keep"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TurnGAE.model_validate(fields)
