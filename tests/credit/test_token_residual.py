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
from agentrl_credit.token_residual import TokenResidual
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
    mean,
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
alphas = st.sampled_from([0.0, 0.5, 2.0])


@each(
    ("fields", "expected"),
    [
        # Turns, lam 1: 1 - .2 and 1 - .5. Tokens, token_lam 1: 1 less the value, .8, .7, .5, .4: .05 about each mean.
        ({"lam": 1, "token_lam": 1, "alpha": 1}, [0.85, 0.75, 0.55, 0.45]),
        # Tokens, token_lam 0: .3 - .2, .5 - .3, .6 - .5, 1 - .6, so +-.05 and +-.15 about the means.
        ({"lam": 1, "token_lam": 0, "alpha": 1}, [0.75, 0.85, 0.35, 0.65]),
        ({"lam": 1, "token_lam": 0, "alpha": 0.5}, [0.775, 0.825, 0.425, 0.575]),
        # Turns, lam 0, gamma .5: .5 * .5 - .2 and 1 - .5. The tokens know no discount.
        ({"lam": 0, "gamma": 0.5, "token_lam": 1, "alpha": 1}, [0.1, 0, 0.55, 0.45]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: list[float]) -> None:
    [found] = by_token(TokenResidual(**fields), TWO)
    assert_close(found, [expected])


@pytest.mark.parametrize("fields", first_quick([{}, {"gamma": 0.5, "lam": 0.5, "token_lam": 0.5, "alpha": 2.0}]))
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(TokenResidual(**fields), relative=False, scale_equivariant=True)


def slow_reference(scheme: TokenResidual, group: TrajectoryGroup) -> Rows:
    rows = []
    for trajectory in group.trajectories:
        values = [list(turn.signals["values"]) for turn in trajectory.turns]
        last = trajectory.signals["values"] if trajectory.truncated else 0.0
        rewards = rewards_of(trajectory)
        firsts = [inside[0] for inside in values]
        turns = slow_gae(rewards, firsts, gamma=scheme.gamma, lam=scheme.lam, final_value=last)
        at_ends = [
            r for inside, reward in zip(values, rewards, strict=True) for r in [0.0] * (len(inside) - 1) + [reward]
        ]
        flat = [value for inside in values for value in inside]
        singles = slow_gae(at_ends, flat, gamma=1.0, lam=scheme.token_lam, final_value=last)
        row: list[float] = []
        for advantage, inside in zip(turns, cut(trajectory, singles), strict=True):
            row += [advantage + scheme.alpha * (a - mean(inside)) for a in inside]
        rows.append(row)
    return rows


@settings(max_examples=40, deadline=None)
@given(groups=truncated_batches(values=tokens(eighths)), gamma=discounts, lam=lambdas, token_lam=lambdas, alpha=alphas)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = TokenResidual(**fields)
    for group, found in zip(groups, by_token(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@settings(max_examples=20, deadline=None)
@given(groups=truncated_batches(values=tokens(eighths)), token_lam=lambdas, alpha=alphas)
def test_the_residual_sums_to_zero_in_every_turn(groups: list[TrajectoryGroup], token_lam: float, alpha: float) -> None:
    found = by_token(TokenResidual(token_lam=token_lam, alpha=alpha), *groups)
    for group, rows, turns in zip(groups, found, by_turn(TurnGAE(), *groups), strict=True):
        for trajectory, row, advantages in zip(group.trajectories, rows, turns, strict=True):
            means = [mean(inside) for inside in cut(trajectory, row)]
            np.testing.assert_allclose(means, advantages, rtol=1e-5, atol=1e-5)  # means of float32 numbers


@settings(max_examples=20, deadline=None)
@given(groups=truncated_batches(values=tokens(eighths)), gamma=discounts, lam=lambdas)
def test_without_the_residual_it_is_turn_gae(groups: list[TrajectoryGroup], gamma: float, lam: float) -> None:
    assert by_turn(TokenResidual(gamma=gamma, lam=lam, alpha=0), *groups) == by_turn(
        TurnGAE(gamma=gamma, lam=lam), *groups
    )


def test_an_action_of_one_token_has_no_residual() -> None:
    group = make_group([[0, 1]], values=[[[0.2], [0.5, 0.6]]], action_lengths=[[1, 2]])
    [found], [turns] = by_token(TokenResidual(alpha=3), group), by_turn(TurnGAE(), group)
    assert found[0][0] == turns[0][0]


def test_a_truncated_trajectory_continues_from_the_critics_last_word() -> None:
    cut_off = changed(TWO, 0, truncated=True, signals={"values": 2.0})
    # Turns, lam 0: .5 - .2 and 1 + 2 - .5. Tokens, token_lam 0: .1, .2, .1, 1 + 2 - .6 = 2.4.
    scheme = TokenResidual(lam=0, token_lam=0, alpha=1)
    assert_close(by_token(scheme, cut_off)[0], [[0.25, 0.35, 1.35, 3.65]])
    assert by_token(scheme, changed(TWO, 0, signals={"values": 2.0})) == by_token(scheme, TWO)


def test_missing_values_are_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 1: no values, which this scheme needs"):
        assign_credit(TokenResidual(), [without(TWO, 0, 1, "values")])
    with pytest.raises(CreditError, match=r"trajectory g/0 was truncated and has no value after its end"):
        assign_credit(TokenResidual(), [changed(TWO, 0, truncated=True)])
    assert TokenResidual().requirements() == {Need.VALUES}


@each("fields", [{"gamma": 2}, {"lam": -0.1}, {"token_lam": 1.1}, {"alpha": -1}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TokenResidual.model_validate(fields)
