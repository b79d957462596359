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
from agentrl_credit.bilevel_gae import BilevelGAE
from agentrl_credit.turn_gae import TurnGAE
from tests.support.credit import (
    Rows,
    assert_close,
    by_token,
    by_turn,
    changed,
    cut,
    discounts,
    eighths,
    rewards_of,
    slow_gae,
    tokens,
    truncated_batches,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick

TWO = make_group([[0, 1]], values=[[[0.2, 0.3], [0.5, 0.6]]], action_lengths=[[2, 2]])
lambdas = st.sampled_from([0.0, 0.25, 1.0])


@each(
    ("fields", "expected"),
    [
        # Turns: A_1 = 1 - .5, A_0 = .9 * .5 - .2 + .9 * A_1 = .7, so G = .9, 1. Tokens: G less the value. Were the turn
        # without a reward merged into the next, its tokens would run on to the reward of 1.
        ({"gamma": 0.9}, [0.7, 0.6, 0.5, 0.4]),
        # lam 0 over turns: G_0 = .9 * .5 = .45
        ({"gamma": 0.9, "lam": 0}, [0.25, 0.15, 0.5, 0.4]),
        # One token ahead: .5 * .3 - .2 and .5 * .6 - .5; the last tokens as above.
        ({"gamma": 0.9, "token_gamma": 0.5, "token_lam": 0}, [-0.05, 0.6, -0.2, 0.4]),
        # token_lam .5: .3 - .2 + .5 * .6 and .6 - .5 + .5 * .4
        ({"gamma": 0.9, "token_lam": 0.5}, [0.4, 0.6, 0.3, 0.4]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: list[float]) -> None:
    [found] = by_token(BilevelGAE(**fields), TWO)
    assert_close(found, [expected])


@pytest.mark.parametrize("fields", first_quick([{}, {"gamma": 0.5, "lam": 0.5, "token_gamma": 0.5, "token_lam": 0.5}]))
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(BilevelGAE(**fields), relative=False, scale_equivariant=True)


def slow_reference(scheme: BilevelGAE, group: TrajectoryGroup) -> Rows:
    rows = []
    for trajectory in group.trajectories:
        values = [list(turn.signals["values"]) for turn in trajectory.turns]
        rewards, last = rewards_of(trajectory), trajectory.signals["values"] if trajectory.truncated else 0.0
        # The lambda-return by its own recursion: G_k = r_k + gamma * ((1 - lam) V_{k+1} + lam G_{k+1}).
        totals: list[float] = []
        following = value = last
        for k in reversed(range(len(rewards))):
            following = rewards[k] + scheme.gamma * ((1 - scheme.lam) * value + scheme.lam * following)
            value = values[k][0]
            totals.insert(0, following)
        row: list[float] = []
        for inside, total in zip(values, totals, strict=True):
            at_end = [0.0] * (len(inside) - 1) + [total]
            row += slow_gae(at_end, inside, gamma=scheme.token_gamma, lam=scheme.token_lam, final_value=0.0)
        rows.append(row)
    return rows


@settings(max_examples=40, deadline=None)
@given(
    groups=truncated_batches(values=tokens(eighths)),
    gamma=discounts,
    lam=lambdas,
    token_gamma=discounts,
    token_lam=lambdas,
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = BilevelGAE(**fields)
    for group, found in zip(groups, by_token(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@settings(max_examples=20, deadline=None)
@given(groups=truncated_batches(values=tokens(eighths), action_lengths=st.just(1)), gamma=discounts, lam=lambdas)
def test_with_one_token_a_turn_it_is_turn_gae(groups: list[TrajectoryGroup], gamma: float, lam: float) -> None:
    expected = by_turn(TurnGAE(gamma=gamma, lam=lam), *groups)
    for found, rows in zip(by_token(BilevelGAE(gamma=gamma, lam=lam), *groups), expected, strict=True):
        assert_close(found, rows)


@each("token_lam", [0.0, 0.5, 1.0])
def test_turns_without_a_reward_keep_their_place(token_lam: float) -> None:
    # Twelve turns, only the last of them rewarded: the value of each turn's last token is taken from that turn's own
    # return, never from the first token of the next turn.
    num = 12
    values = [[[k / 8, k / 8 + 3.0] for k in range(num)]]
    group = make_group([[0.0] * (num - 1) + [1.0]], values=values, action_lengths=[[2] * num])
    [[row]] = by_token(BilevelGAE(gamma=0.5, token_lam=token_lam), group)
    ends = [turn[-1] for turn in cut(group.trajectories[0], row)]
    np.testing.assert_allclose(ends, [0.5 ** (num - 1 - k) - (k / 8 + 3) for k in range(num)], rtol=1e-6)


def test_where_the_turns_end_matters_not_where_the_rewards_are() -> None:
    values = [0.2, 0.3, 0.5, 0.6]
    one_turn = make_group([[1]], values=[[values]], action_lengths=[[4]])
    assert_close(by_token(BilevelGAE(gamma=0.9), one_turn)[0], [[0.8, 0.7, 0.5, 0.4]])
    assert_close(by_token(BilevelGAE(gamma=0.9), TWO)[0], [[0.7, 0.6, 0.5, 0.4]])


def test_a_truncated_trajectory_continues_from_the_critics_last_word() -> None:
    cut_off = changed(TWO, 0, truncated=True, signals={"values": 2.0})
    # G_1 = 1 + .5 * 2, G_0 = .5 * 2
    assert_close(by_token(BilevelGAE(gamma=0.5), cut_off)[0], [[0.8, 0.7, 1.5, 1.4]])
    assert by_token(BilevelGAE(), changed(TWO, 0, signals={"values": 2.0})) == by_token(BilevelGAE(), TWO)


def test_missing_values_are_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 0: no values, which this scheme needs"):
        assign_credit(BilevelGAE(), [without(TWO, 0, 0, "values")])
    with pytest.raises(CreditError, match=r"trajectory g/0 was truncated and has no value after its end"):
        assign_credit(BilevelGAE(), [changed(TWO, 0, truncated=True)])
    assert BilevelGAE().requirements() == {Need.VALUES}


@each("fields", [{"gamma": 2}, {"lam": -0.1}, {"token_gamma": 1.1}, {"token_lam": -1}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BilevelGAE.model_validate(fields)
