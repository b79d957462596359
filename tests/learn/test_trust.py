"""Trust regions against plain loops, in float64."""

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.learn.batch import LossColumns
from agentrl.learn.calibration import Calibration, ClipTarget, Units, unit_clip_stats
from agentrl.learn.config import CalibratedConfig, KernelConfig, LossConfig
from agentrl.learn.micro_batch_loss import trust_region
from agentrl.learn.tokens import Aggregation, RatioUnit
from agentrl.learn.trust import Ratios, Region, TrustRegion, fixed, is_rejected, kernel, rejecting, token
from tests.support.each import each
from tests.support.ratio_batches import (
    AGGREGATIONS,
    UNITS,
    Batch,
    batch_weights,
    close,
    f64,
    loss_and_gradient,
    make_batch,
    slow_units,
)

LOW, HIGH = 0.02, 0.03
POSITIVE, NEGATIVE = (2.0, 3.0), (3.0, 2.0)
Slow = Callable[[list[float], int, float], tuple[float, bool]]
"""From the log-ratios of a unit, a token's place in it and its advantage: its factor, and whether it has left."""


def slow_ratio(log_ratios: list[float]) -> float:
    return math.exp(sum(log_ratios) / len(log_ratios))


def slow_fixed(log_ratios: list[float], place: int, advantage: float) -> tuple[float, bool]:
    ratio = slow_ratio(log_ratios)
    bound = min(max(ratio, 1 - LOW), 1 + HIGH)
    return (bound, True) if bound * advantage < ratio * advantage else (ratio, False)


def slow_token(log_ratios: list[float], place: int, advantage: float) -> tuple[float, bool]:
    own = math.exp(log_ratios[place])
    return slow_ratio(log_ratios), own > 1 + HIGH if advantage > 0 else own < 1 - LOW


def slow_kernel(log_ratios: list[float], place: int, advantage: float) -> tuple[float, bool]:
    weight = math.prod(math.exp(one) for one in log_ratios)
    power, rate = NEGATIVE if advantage < 0 else POSITIVE
    return weight**power * math.exp(rate * (1 - weight)), False


def slow_rejecting(log_ratios: list[float], place: int, advantage: float) -> tuple[float, bool]:
    ratio = slow_ratio(log_ratios)
    return (0.0, advantage != 0) if ratio > 1.05 or ratio < 1 / 1.05 else slow_fixed(log_ratios, place, advantage)


REGIONS: dict[str, tuple[TrustRegion, Slow]] = {
    "fixed": (partial(fixed, low=LOW, high=HIGH), slow_fixed),
    "token": (partial(token, low=LOW, high=HIGH), slow_token),
    "kernel": (partial(kernel, positive=POSITIVE, negative=NEGATIVE), slow_kernel),
    "rejecting": (partial(rejecting, within=partial(fixed, low=LOW, high=HIGH), limit=1.05), slow_rejecting),
}


def slow_loss(batch: Batch, unit: RatioUnit, weights: torch.Tensor, slow: Slow) -> tuple[float, list[float], set[int]]:
    """Loss, gradient and tokens that have left, one token at a time, from the equations."""
    loss, gradient, left = 0.0, [0.0] * len(batch.keep_T), set()
    for tokens in slow_units(batch, unit):
        log_ratios = [float(batch.policy_T[t] - batch.anchor_T[t]) for t in tokens]
        for place, t in enumerate(tokens):
            advantage, weight = float(batch.advantages_T[t]), float(weights[t])
            factor, has_left = slow(log_ratios, place, advantage)
            loss -= weight * factor * advantage
            if has_left:
                left.add(t)
            else:
                gradient[t] = -weight * factor * advantage
    return loss, gradient, left


@pytest.mark.parametrize("name", REGIONS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    unit=st.sampled_from(UNITS),
    aggregation=st.sampled_from(AGGREGATIONS),
    drop=st.sampled_from([0.0, 0.3]),
)
def test_loss_gradient_and_decisions_follow_the_equations(
    name: str, seed: int, unit: RatioUnit, aggregation: Aggregation, drop: float
) -> None:
    batch, (trust, slow) = make_batch(seed, spread=0.1, drop=drop), REGIONS[name]
    weight_T = torch.from_numpy(batch_weights(batch, aggregation))
    loss, gradient, left = slow_loss(batch, unit, weight_T, slow)
    kept = np.flatnonzero(batch.keep_T)
    result, got = loss_and_gradient(batch, unit, weight_T, trust, kept)
    close(result.loss, torch.tensor(loss, dtype=torch.float64))
    close(got, f64(*gradient)[torch.from_numpy(kept)])
    assert {int(kept[t]) for t in result.clipped_T.nonzero()[:, 0]} == left


@pytest.mark.parametrize("name", REGIONS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    unit=st.sampled_from(UNITS),
    aggregation=st.sampled_from(AGGREGATIONS),
    num_micro=st.integers(1, 7),
)
def test_no_split_into_micro_batches_and_no_order_changes_loss_or_gradient(
    name: str, seed: int, unit: RatioUnit, aggregation: Aggregation, num_micro: int
) -> None:
    batch, trust = make_batch(seed, spread=0.1, drop=0.2), REGIONS[name][0]
    weight_T = torch.from_numpy(batch_weights(batch, aggregation))
    kept = np.flatnonzero(batch.keep_T)
    whole, expected = loss_and_gradient(batch, unit, weight_T, trust, kept)

    rng = np.random.default_rng(seed)
    home = rng.integers(num_micro, size=batch.trajectory_T.max() + 1)  # some micro-batches stay empty
    total = torch.zeros((), dtype=torch.float64)
    gradient = torch.zeros(len(batch.keep_T), dtype=torch.float64)
    clipped = torch.zeros(len(batch.keep_T), dtype=torch.bool)
    for micro in range(num_micro):
        order = rng.permutation(kept[home[batch.trajectory_T[kept]] == micro])
        part, part_gradient = loss_and_gradient(batch, unit, weight_T, trust, order)
        total = total + part.loss.detach()
        gradient[torch.from_numpy(order)] = part_gradient
        clipped[torch.from_numpy(order)] = part.clipped_T
    close(total, whole.loss.detach())
    close(gradient[torch.from_numpy(kept)], expected)
    assert torch.equal(clipped[torch.from_numpy(kept)], whole.clipped_T)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), unit=st.sampled_from(UNITS))
def test_a_range_for_each_token_is_that_range(seed: int, unit: RatioUnit) -> None:
    batch = make_batch(seed, spread=0.1)
    weight_T, order = torch.from_numpy(batch_weights(batch, "trajectory-mean")), np.arange(len(batch.keep_T))
    low_T, high_T = (torch.full((len(order),), width, dtype=torch.float64) for width in (LOW, HIGH))
    of_each = partial(fixed, low=low_T, high=high_T)
    (one, expected), (each, got) = (
        loss_and_gradient(batch, unit, weight_T, trust, order) for trust in (REGIONS["fixed"][0], of_each)
    )
    close(each.loss, one.loss)
    close(got, expected)


def ratios(*log_ratio_T: float, advantages_T: list[float], dtype: torch.dtype = torch.float64) -> Ratios:
    """Ratios of tokens of one unit."""
    tokens_T = torch.tensor(log_ratio_T, dtype=dtype)
    unit_T = torch.zeros(len(tokens_T), dtype=torch.int64)
    return Ratios(tokens_T, unit_T, tokens_T.mean()[None].exp(), torch.tensor(advantages_T, dtype=dtype))


def test_a_token_that_moved_far_leaves_alone_by_its_own_ratio_and_with_its_whole_unit_by_the_units() -> None:
    moved = ratios(0.5, 0.0, 0.0, 0.0, advantages_T=[1, 1, 1, 1])
    assert token(moved, low=0.2, high=0.27).clipped_T.tolist() == [True, False, False, False]
    assert fixed(moved, low=3e-4, high=4e-4).clipped_T.tolist() == [True] * 4


def test_the_kernel_is_one_at_the_sampling_policy_and_largest_at_the_quotient_of_its_exponents() -> None:
    weights = torch.linspace(0.05, 4, 400, dtype=torch.float64)
    factors = [
        float(kernel(ratios(math.log(w), advantages_T=[1.0]), positive=(3.0, 2.0), negative=NEGATIVE)[0])
        for w in weights
    ]
    assert float(weights[int(np.argmax(factors))]) == pytest.approx(1.5, abs=0.01)
    assert float(kernel(ratios(0.0, advantages_T=[1.0]), positive=POSITIVE, negative=NEGATIVE)[0]) == 1


@each("log_ratio", [-1e4, -90.0, 90.0, 1e4])
def test_the_kernel_of_a_unit_that_moved_beyond_float32_is_zero(log_ratio: float) -> None:
    region = kernel(ratios(log_ratio, advantages_T=[-1.0], dtype=torch.float32), positive=POSITIVE, negative=NEGATIVE)
    assert region.factor_T.tolist() == [0.0]


@pytest.mark.parametrize(
    ("log_ratio", "exponents", "log_factor"), [(-1e4, (0.01, 1.0), -0.8 + 1), (1e4, (0.5, 1e-50), 40)]
)
def test_a_units_weight_ends_at_the_bounds_of_its_logarithm(
    log_ratio: float, exponents: tuple[float, float], log_factor: float
) -> None:
    region = kernel(ratios(log_ratio, advantages_T=[1.0]), positive=exponents, negative=NEGATIVE)
    assert region.factor_T.tolist() == pytest.approx([math.exp(log_factor)])


def test_no_weight_of_exponents_that_a_recipe_may_have_ends_float32() -> None:
    for exponents in ((23.4, 0.3), (0.01, 79.0), (1000.0, 1000.0), (1000.0, 655.0)):
        allowed = KernelConfig(positive=exponents).positive
        peak = math.log(exponents[0] / exponents[1])
        for log_weight in (peak, -80.0, 0.0, 80.0):
            moved = ratios(log_weight, advantages_T=[0.0], dtype=torch.float32)
            factor = kernel(moved, positive=allowed, negative=NEGATIVE).factor_T
            assert (0 * factor).tolist() == [0.0]
    for exponents in ((30.0, 0.1), (1e308, 1e308), (1e-300, 81.0)):
        with pytest.raises(ValueError, match=r"beyond float32|less than or equal to 1000"):
            KernelConfig(negative=exponents)


@pytest.mark.parametrize("share", [0.001, 0.4999999])
def test_ranges_of_any_share_that_a_recipe_may_have_are_numbers(share: float) -> None:
    target, units = (
        ClipTarget.from_config(LossConfig(trust="calibrated", calibrated=CalibratedConfig(clipped=share))),
        4,
    )
    calibration, length_U, half_U = Calibration(), np.full(units, 10.0), np.full(units, 5.0)
    for minibatch in range(30):
        clipped_U = half_U * (minibatch % 2)
        shown = unit_clip_stats(
            Units(np.zeros(units), length_U), np.full(units, 0.01), half_U, half_U, clipped_U, clipped_U, target=target
        )
        calibration = calibration.updated(shown, target)
    assert np.isfinite(calibration.widths(Units(np.zeros(units), length_U), target)).all()
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.001"):
        CalibratedConfig(clipped=1e-17)


def test_a_rejected_unit_has_no_loss_on_either_side() -> None:
    far = ratios(1.0, 1.0, advantages_T=[1, -1])
    region = rejecting(far, within=partial(kernel, positive=POSITIVE, negative=NEGATIVE), limit=2.0)
    assert (region.factor_T.tolist(), region.clipped_T.tolist()) == ([0, 0], [True, True])
    assert is_rejected(torch.tensor([0.4, 0.5, 1.9, 2.0, 2.1]), 2.0).tolist() == [True, False, False, False, True]


@each("region", ["fixed", "token", "kernel", "rejecting"])
def test_a_token_without_an_advantage_leaves_no_region(region: str) -> None:
    for log_ratio in (-1.0, 1.0):
        assert REGIONS[region][0](ratios(log_ratio, advantages_T=[0.0])).clipped_T.tolist() == [False]


@pytest.mark.parametrize("region", [fixed, token])
def test_a_token_at_the_end_of_its_range_is_still_within(region: Callable[..., Region]) -> None:
    for advantage in (1.0, -1.0):
        assert region(ratios(0.0, advantages_T=[advantage]), low=0.0, high=0.0).clipped_T.tolist() == [False]


def test_a_range_may_reach_down_to_zero() -> None:
    assert fixed(ratios(-9.0, advantages_T=[-1.0]), low=1.0, high=0.0).clipped_T.tolist() == [False]


@each("trust", get_args(LossConfig.model_fields["trust"].annotation))
@each("dtype", [torch.float32, torch.float64])
def test_a_recipe_gets_the_region_it_names(trust: str, dtype: torch.dtype) -> None:
    columns = LossColumns(
        advantage_T=f64(1, -1).to(dtype),
        weight_T=f64(0.5, 0.5).to(dtype),
        behavior_T=f64(0, 0).to(dtype),
        unit_T=torch.tensor([0, 0]),
        version_T=torch.tensor([3, 3]),
        trajectory_T=torch.tensor([0, 0]),
    )
    config = LossConfig(trust=trust)
    moved = ratios(0.3, -0.5, advantages_T=[1, -1], dtype=dtype)
    got = trust_region(config, columns, calibration=Calibration(), version=3)(moved)
    assert got.factor_T.dtype == dtype
    assert (
        got.clipped_T.tolist()
        == {
            "fixed": [False, True],  # the mean fell
            "calibrated": [False, True],
            "token": [True, True],
            "kernel": [False, False],
        }[trust]
    )
