import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Need, TrajectoryGroup, assign_credit, load_credit
from agentrl.errors import ConfigError, CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.entropy_modulated import EntropyModulated
from tests.support.credit import (
    F1,
    Rows,
    assert_close,
    batches,
    by_token,
    by_turn,
    mean,
    tokens,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick

PLAIN = {"scheme": "uniform", "normalize": "none"}
# Mean entropies 1, 2, 3, scaled to 0, .5, 1; the advantages of PLAIN are .5 and -.5.
MIXED = make_group([[0, 1], [0]], entropies=[[[0.5, 1.5], 2], [[3, 3, 3]]], action_lengths=[[2, 1], [3]])


@each(
    ("fields", "expected"),
    [
        # exp(0), exp(-.5), exp(-1) are 1, .606531, .367879, on average .658137: weights 1.519441, .921587, .558971.
        ({"zeta": 0.0}, [[0.759721, 0.460794], [-0.279485]]),
        # zeta * .606531 more before the second turn; nothing follows the last ones
        ({"zeta": 0.1}, [[0.820374, 0.460794], [-0.279485]]),
        # exp(-2 * .5)
        ({"zeta": 0.1, "bonus_sharpness": 2.0}, [[0.796509, 0.460794], [-0.279485]]),
        ({"zeta": 0.1, "bonus_sharpness": 0.0}, [[0.859721, 0.460794], [-0.279485]]),
        # 1, exp(-1), exp(-2) on average .501071
        ({"zeta": 0.0, "sharpness": 2.0}, [[0.997862, 0.367093], [-0.135046]]),
        ({"zeta": 0.0, "sharpness": 0.0}, [[0.5, 0.5], [-0.5]]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    [found] = by_turn(EntropyModulated(of=PLAIN, **fields), MIXED)
    assert_close(found, expected)


@pytest.mark.parametrize(
    "of", first_quick([{"scheme": "uniform"}, {"scheme": "turn_return", "gamma": 0.5}, {"scheme": "gigpo"}])
)
@pytest.mark.parametrize("zeta", first_quick([0.05, 0.5]))
def test_it_passes_the_conformance_check(of: dict[str, Any], zeta: float) -> None:
    # the bonus is there also where all returns are equal
    check_credit(
        EntropyModulated(of=of, zeta=zeta),
        relative=False,
        reads_turn_rewards=of["scheme"] != "uniform",
        batch_wide=True,
        options={"of": [{"scheme": "turn_return"}]},
    )


def slow_reference(scheme: EntropyModulated, groups: list[TrajectoryGroup]) -> list[Rows]:
    entropies = [[[mean(turn.signals["entropies"]) for turn in t.turns] for t in g.trajectories] for g in groups]
    flat = [h for rows in entropies for row in rows for h in row]
    low, high = min(flat), max(flat)

    def scaled(h: float) -> float:
        return (h - low) / (high - low) if high > low else 0.0

    middle = mean([math.exp(-scheme.sharpness * scaled(h)) for h in flat])
    found = []
    for rows, base in zip(entropies, by_turn(load_credit(scheme.of), *groups), strict=True):
        modulated: Rows = []
        for row, advantages in zip(rows, base, strict=True):
            weights = [math.exp(-scheme.sharpness * scaled(h)) / middle for h in row]
            bonuses = [scheme.zeta * math.exp(-scheme.bonus_sharpness * scaled(h)) for h in row[1:]] + [0.0]
            modulated.append([a * w + b for a, w, b in zip(advantages, weights, bonuses, strict=True)])
        found.append(modulated)
    return found


# Up to three tokens of equal entropy have that mean exactly: then turns are equal where they are equal.
alike = st.integers(0, 16).map(lambda n: (n / 8,) * 3)


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(entropies=alike),
    of=st.sampled_from([PLAIN | {"lone": "keep"}, {"scheme": "turn_return", "lone": "keep"}]),
    sharpness=st.sampled_from([0.0, 1.0, 3.0]),
    bonus_sharpness=st.sampled_from([0.0, 1.0, 3.0]),
    zeta=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = EntropyModulated(**fields)
    for found, expected in zip(by_turn(scheme, *groups), slow_reference(scheme, groups), strict=True):
        assert_close(found, expected)


@settings(max_examples=20, deadline=None)
@given(
    groups=batches(
        entropies=tokens(st.integers(0, 16).map(lambda n: n / 8)),
        behavior_logprobs=st.just((-1.0,) * 3),
        teacher_logprobs=st.just((0.0,) * 3),
    )
)
def test_the_weights_average_1_over_the_turns_of_the_batch(groups: list[TrajectoryGroup]) -> None:
    # a teacher that is sure of every token gives all of them the same advantage: 1
    found = by_turn(EntropyModulated(of={"scheme": "distill"}, zeta=0), *groups)
    weights = [weight for rows in found for row in rows for weight in row]
    np.testing.assert_allclose(np.mean(weights), 1, rtol=1e-5)  # a mean of float32 numbers


@pytest.mark.parametrize("of", [{"scheme": "uniform"}, {"scheme": "turn_return"}])
def test_equal_entropies_and_no_bonus_leave_the_scheme_as_it_is(of: dict[str, Any]) -> None:
    group = make_group([[0, 1], [0.5, 0, 0], [0]], entropies=[[0.75, 0.75], [0.75, 0.75, 0.75], [0.75]])
    assert by_turn(EntropyModulated(of=of, zeta=0), group) == by_turn(load_credit(of), group)
    # with a bonus, the same to every turn but the last
    [found], [base] = by_turn(EntropyModulated(of=of, zeta=0.5), group), by_turn(load_credit(of), group)
    assert_close(found, [[a + 0.5 * (k < len(row) - 1) for k, a in enumerate(row)] for row in base])


def test_the_bonus_is_that_of_the_turn_after() -> None:
    # Equal returns: nothing but the bonus. The surest turn is the second of the first trajectory.
    group = make_group([[0, 0, 0], [0]], entropies=[[2, 0, 1], [2]])
    [found] = by_turn(EntropyModulated(of=PLAIN, zeta=1), group)
    assert_close(found, [[1, math.exp(-0.5), 0], [0]])


def test_a_surer_turn_learns_more_from_the_same_advantage() -> None:
    # exp(sharpness) times as much between the surest and the least sure turn
    group = make_group([[1, 0], [0]], entropies=[[0.25, 4], [1]])
    [[first, _]] = by_turn(EntropyModulated(of=PLAIN, zeta=0, sharpness=2), group)
    np.testing.assert_allclose(first[0] / first[1], math.exp(2), rtol=1e-6)


def test_entropies_are_scaled_over_the_batch() -> None:
    calm = make_group([[1], [0]], entropies=[[1], [1.5]], group_id="calm")
    wild = make_group([[1], [0]], entropies=[[3], [5]], group_id="wild")
    scheme = EntropyModulated(of=PLAIN, zeta=0)
    [found, _], [alone] = by_turn(scheme, calm, wild), by_turn(scheme, calm)
    # entropies 1 to 5 become 0, 1/8, 1/2, 1
    middle = mean([math.exp(-h) for h in (0, 1 / 8, 1 / 2, 1)])
    assert_close(found, [[0.5 / middle], [-0.5 * math.exp(-1 / 8) / middle]])
    assert_close(alone, [[0.5 / mean([1, math.exp(-1)])], [-0.5 * math.exp(-1) / mean([1, math.exp(-1)])]])


def test_entropies_that_differ_by_rounding_alone_are_equal() -> None:
    group = make_group([[1], [0]], entropies=[[0.1 + 0.2], [0.3]])
    assert_close(by_turn(EntropyModulated(of=PLAIN, zeta=0), group)[0], [[0.5], [-0.5]])


def test_what_the_weighted_scheme_leaves_out_of_the_loss_stays_out() -> None:
    single = make_group([[1, 2]], entropies=[[1, 2]], group_id="single")
    scheme = EntropyModulated(of=PLAIN | {"lone": "drop"})
    [kept, [dropped]] = assign_credit(scheme, [MIXED, single])
    assert all(credit.keep_T.all() for credit in kept)
    assert not dropped.keep_T.any()


def test_the_tokens_of_a_turn_share_its_weight_and_keep_their_own_advantages() -> None:
    group = make_group(
        [[0], [0]], entropies=[[[0, 2]], [[3, 3]]], action_lengths=[[2], [2]], teacher_logprobs=[[[-1, -2]], [[-1, -1]]]
    )
    [base] = by_token(load_credit({"scheme": "distill"}), group)
    [found] = by_token(EntropyModulated(of={"scheme": "distill"}, zeta=0), group)
    middle = mean([1, math.exp(-1)])
    assert_close(found, [[a / middle for a in base[0]], [a * math.exp(-1) / middle for a in base[1]]])


def test_requirements_are_those_of_the_weights_and_of_the_weighted_scheme() -> None:
    assert EntropyModulated().requirements() == {Need.ENTROPIES}
    assert EntropyModulated(of={"scheme": "turn_return"}).requirements() == {Need.ENTROPIES, Need.TURN_REWARDS}
    nested = {"scheme": "judge", "then": {"scheme": "gigpo"}}
    assert EntropyModulated(of=nested).requirements() == {Need.ENTROPIES, Need.TURN_SCORES, Need.STATE_KEYS}


def test_missing_entropies_are_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 1: no entropies, which this scheme needs"):
        assign_credit(EntropyModulated(), [without(MIXED, 0, 1, "entropies")])
    with pytest.raises(CreditError, match=r"trajectory f1/0, turn 0: no entropies"):
        assign_credit(EntropyModulated(), [F1])


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({"scheme": "unifrom"}, r"^credit\.of\.scheme: no 'unifrom' is installed\. Did you mean 'uniform'"),
        (
            {"scheme": "uniform", "normalise": "std"},
            r"^credit\.of\.normalise: 'uniform' has no such option.* Did you mean 'normalize'",
        ),
    ],
)
def test_an_impossible_scheme_is_refused_when_the_recipe_is_read(of: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_credit({"scheme": "entropy_modulated", "of": of})


@each("fields", [{"zeta": -1}, {"sharpness": -1}, {"bonus_sharpness": float("inf")}, {"lone": "keep"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EntropyModulated.model_validate(fields)
