"""Trust regions against plain loops, in float64."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

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
from agentrl.learn.trust import (
    Ratios,
    Region,
    TrustRegion,
    by_length,
    capped,
    divergence,
    fixed,
    gated,
    geometric,
    is_rejected,
    kernel,
    rejecting,
    token,
    unclipped,
)
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
TAUS = (1.0, 1.6)
MOST_TV, MOST_KL = (0.02, 0.03), (0.002, 0.003)


class Place(NamedTuple):
    """A token in its ratio unit."""

    log_ratios: list[float]
    """Of all tokens of the unit."""
    number: int
    """The token among them."""
    logprob: float
    """Under the policy."""
    advantages: list[float]
    """Of all tokens of the unit."""

    @property
    def advantage(self) -> float:
        """Advantage of the token."""
        return self.advantages[self.number]

    @property
    def ratio(self) -> float:
        """Ratio of the unit."""
        return math.exp(sum(self.log_ratios) / len(self.log_ratios))

    @property
    def own(self) -> float:
        """Ratio of the token."""
        return math.exp(self.log_ratios[self.number])

    def is_beyond(self, ratio: float, low: float = LOW, high: float = HIGH) -> bool:
        return ratio > 1 + high if self.advantage > 0 else self.advantage < 0 and ratio < 1 - low


Slow = Callable[[Place], tuple[float, float, bool]]
"""Value and gradient's factor of a token, and whether it has left."""


def slow_unclipped(place: Place) -> tuple[float, float, bool]:
    return place.logprob, 1.0, False


def slow_fixed(place: Place) -> tuple[float, float, bool]:
    ratio, advantage = place.ratio, place.advantage
    bound = min(max(ratio, 1 - LOW), 1 + HIGH)
    return (bound, 0.0, True) if bound * advantage < ratio * advantage else (ratio, ratio, False)


def slow_token(place: Place) -> tuple[float, float, bool]:
    has_left = place.is_beyond(place.own)
    return place.ratio, 0.0 if has_left else place.ratio, has_left


def slow_geometric(place: Place) -> tuple[float, float, bool]:
    product = 1.0
    for log_ratio, advantage in zip(place.log_ratios, place.advantages, strict=True):
        ratio = math.exp(log_ratio)
        bound = min(max(ratio, 1 - LOW), 1 + HIGH)
        product *= min(ratio, bound) if advantage > 0 else max(ratio, bound) if advantage < 0 else ratio
    mean = product ** (1 / len(place.log_ratios))
    has_left = place.is_beyond(place.own)
    return mean, 0.0 if has_left else mean, has_left


def slow_capped(place: Place) -> tuple[float, float, bool]:
    factor = min(max(place.ratio, 1 - LOW), 1 + HIGH)
    return factor * place.logprob, factor, False


def slow_gated(place: Place) -> tuple[float, float, bool]:
    tau = TAUS[0] if place.advantage > 0 else TAUS[1]
    gate = 1 / (1 + math.exp(-tau * (place.ratio - 1)))
    return 4 / tau * gate, 4 * gate * (1 - gate) * place.ratio, False


def slow_divergence(place: Place, *, kind: str) -> tuple[float, float, bool]:
    pi, mu = math.exp(place.logprob), math.exp(place.logprob - place.log_ratios[place.number])
    moved, (low, high) = {
        "tv": (abs(pi - mu), MOST_TV),
        "kl": (mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi)), MOST_KL),
    }[kind]
    is_up, is_down = place.advantage > 0 and pi > mu, place.advantage < 0 and pi < mu
    if (is_up and moved > high) or (is_down and moved > low):
        return 0.0, 0.0, True
    factor = min(place.ratio, 20.0)
    return factor * place.logprob, factor, False


def slow_kernel(place: Place) -> tuple[float, float, bool]:
    weight = math.prod(math.exp(one) for one in place.log_ratios)
    power, rate = NEGATIVE if place.advantage < 0 else POSITIVE
    factor = weight**power * math.exp(rate * (1 - weight))
    return factor * place.logprob, factor, False


def slow_rejecting(place: Place) -> tuple[float, float, bool]:
    if place.ratio > 1.05 or place.ratio < 1 / 1.05:
        return 0.0, 0.0, place.advantage != 0
    return slow_fixed(place)


REGIONS: dict[str, tuple[TrustRegion, Slow]] = {
    "unclipped": (unclipped, slow_unclipped),
    "fixed": (partial(fixed, low=LOW, high=HIGH), slow_fixed),
    "token": (partial(token, low=LOW, high=HIGH), slow_token),
    "geometric": (partial(geometric, low=LOW, high=HIGH), slow_geometric),
    "capped": (partial(capped, low=LOW, high=HIGH), slow_capped),
    "gated": (partial(gated, positive=TAUS[0], negative=TAUS[1]), slow_gated),
    "tv": (partial(divergence, low=MOST_TV[0], high=MOST_TV[1], kind="tv"), partial(slow_divergence, kind="tv")),
    "kl": (partial(divergence, low=MOST_KL[0], high=MOST_KL[1], kind="kl"), partial(slow_divergence, kind="kl")),
    "kernel": (partial(kernel, positive=POSITIVE, negative=NEGATIVE), slow_kernel),
    "rejecting": (partial(rejecting, within=partial(fixed, low=LOW, high=HIGH), limit=1.05), slow_rejecting),
}


def slow_loss(batch: Batch, unit: RatioUnit, weights: torch.Tensor, slow: Slow) -> tuple[float, list[float], set[int]]:
    """Loss, gradient and tokens that have left, one token at a time, from the equations."""
    loss, gradient, left = 0.0, [0.0] * len(batch.keep_T), set()
    for tokens in slow_units(batch, unit):
        log_ratios = [float(batch.policy_T[t] - batch.anchor_T[t]) for t in tokens]
        advantages = [float(batch.advantages_T[t]) for t in tokens]
        for number, t in enumerate(tokens):
            advantage, weight = advantages[number], float(weights[t])
            value, factor, has_left = slow(Place(log_ratios, number, float(batch.policy_T[t]), advantages))
            loss -= weight * value * advantage
            gradient[t] = -weight * factor * advantage
            if has_left:
                left.add(t)
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


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    unit=st.sampled_from([unit for unit in UNITS if unit != "token"]),
    length=st.integers(1, 40),
    num_micro=st.integers(1, 4),
)
def test_a_range_by_length_is_that_of_a_slow_count_however_the_batch_is_split(
    seed: int, unit: RatioUnit, length: int, num_micro: int
) -> None:
    batch = make_batch(seed, spread=0.1, drop=0.2)
    weight_T, kept = torch.from_numpy(batch_weights(batch, "trajectory-mean")), np.flatnonzero(batch.keep_T)
    loss, gradient, left = 0.0, [0.0] * len(batch.keep_T), set()
    for tokens in slow_units(batch, unit):
        mean = sum(float(batch.policy_T[t] - batch.anchor_T[t]) for t in tokens) / len(tokens)
        widening = math.sqrt(length / len(tokens))
        low, high = min(1.0, LOW * widening), HIGH * widening
        for t in tokens:
            ratio, push = math.exp(mean), float(weight_T[t] * batch.advantages_T[t])
            is_out = ratio > 1 + high if push > 0 else ratio < 1 - low
            loss -= push * (ratio if not is_out else 1 + high if push > 0 else 1 - low)
            gradient[t] = 0.0 if is_out else -push * ratio
            left |= {t} if is_out else set()

    def trust(found: Ratios) -> Region:
        low_T, high_T = by_length(found.unit_T, count_U=torch.bincount(found.unit_T), low=LOW, high=HIGH, length=length)
        return fixed(found, low=low_T, high=high_T)

    home = np.random.default_rng(seed).integers(num_micro, size=batch.trajectory_T.max() + 1)
    orders = [kept[home[batch.trajectory_T[kept]] == micro] for micro in range(num_micro)]
    parts = [loss_and_gradient(batch, unit, weight_T, trust, order) for order in orders]
    close(sum((part.loss.detach() for part, _ in parts), torch.zeros((), dtype=torch.float64)), f64(loss)[0])
    for order, (part, got) in zip(orders, parts, strict=True):
        close(got, f64(*gradient)[torch.from_numpy(order)])
        assert part.clipped_T.tolist() == [int(t) in left for t in order]


def test_a_range_by_length_is_the_papers_at_that_length_and_wider_by_the_square_root_of_the_quotient() -> None:
    # Units of 4, 1 and 16 tokens.
    unit_T = torch.tensor([0] * 4 + [1] + [2] * 16)
    low_T, high_T = by_length(unit_T, count_U=torch.bincount(unit_T), low=0.03, high=0.04, length=4)
    close(low_T[[0, 4, 5]], f64(0.03, 0.06, 0.015))
    close(high_T[[0, 4, 5]], f64(0.04, 0.08, 0.02))
    of_one, _ = by_length(unit_T, count_U=torch.bincount(unit_T), low=0.03, high=0.04, length=10_000)
    close(of_one[[0, 4, 5]], f64(1, 1, 0.75))  # a ratio has no room below 0


def ratios(*log_ratio_T: float, advantages_T: list[float], dtype: torch.dtype = torch.float64) -> Ratios:
    """Ratios of tokens of one unit, which were sampled with a probability of e^-1."""
    tokens_T = torch.tensor(log_ratio_T, dtype=dtype)
    unit_T = torch.zeros(len(tokens_T), dtype=torch.int64)
    advantage_T = torch.tensor(advantages_T, dtype=dtype)
    return Ratios(tokens_T - 1, tokens_T, unit_T, tokens_T.mean()[None].exp(), advantage_T)


def test_a_token_that_moved_far_leaves_alone_by_its_own_ratio_and_with_its_whole_unit_by_the_units() -> None:
    moved = ratios(0.5, 0.0, 0.0, 0.0, advantages_T=[1, 1, 1, 1])
    assert token(moved, low=0.2, high=0.27).clipped_T.tolist() == [True, False, False, False]
    assert fixed(moved, low=3e-4, high=4e-4).clipped_T.tolist() == [True] * 4


def test_the_kernel_is_one_at_the_sampling_policy_and_largest_at_the_quotient_of_its_exponents() -> None:
    weights = torch.linspace(0.05, 4, 400, dtype=torch.float64)
    factors = [
        float(kernel(ratios(math.log(w), advantages_T=[1.0]), positive=(3.0, 2.0), negative=NEGATIVE).factor_T)
        for w in weights
    ]
    assert float(weights[int(np.argmax(factors))]) == pytest.approx(1.5, abs=0.01)
    assert float(kernel(ratios(0.0, advantages_T=[1.0]), positive=POSITIVE, negative=NEGATIVE).factor_T) == 1


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
    assert (region.value_T.tolist(), region.factor_T.tolist(), region.clipped_T.tolist()) == (
        [0, 0],
        [0, 0],
        [True, True],
    )
    assert is_rejected(torch.tensor([0.4, 0.5, 1.9, 2.0, 2.1]), 2.0).tolist() == [True, False, False, False, True]


def test_a_divergence_bounds_the_weight_of_a_token_that_rose_from_almost_nothing() -> None:
    # From e^-4.5 to e^-.5, and pushed down: it is within, and its ratio of e^4 is cut at 20.
    logprobs_T, log_ratio_T, unit_T = f64(-0.5), f64(4.0), torch.tensor([0])
    risen = Ratios(logprobs_T, log_ratio_T, unit_T, log_ratio_T.exp(), f64(-1.0))
    for kind in ("tv", "kl"):
        region = divergence(risen, low=0.1, high=0.1, kind=kind)
        assert [part.tolist() for part in region] == [[-10.0], [20.0], [False]]


@each("region", REGIONS)
@each("dtype", [torch.float32, torch.float64])
def test_tokens_that_moved_beyond_all_numbers_have_finite_values_and_factors(region: str, dtype: torch.dtype) -> None:
    for logprob, log_ratio in ((-0.0, 1e4), (-1e-9, 200.0), (-1e4, -1e4), (-200.0, -199.0), (-0.0, 0.0)):
        for advantage in (-1.0, 0.0, 1.0):
            logprobs_T, log_ratio_T, advantage_T = (
                torch.tensor([one], dtype=dtype) for one in (logprob, log_ratio, advantage)
            )
            ratio_U = log_ratio_T.clamp(-80, 80).exp()
            found = REGIONS[region][0](Ratios(logprobs_T, log_ratio_T, torch.tensor([0]), ratio_U, advantage_T))
            assert found.value_T.dtype == found.factor_T.dtype == dtype
            assert bool(found.value_T.isfinite()), (logprob, log_ratio, advantage)
            assert bool(found.factor_T.isfinite()), (logprob, log_ratio, advantage)


@each("region", REGIONS)
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
def test_a_recipe_gets_the_region_it_names(trust: Any, dtype: torch.dtype) -> None:
    columns = LossColumns(
        advantage_T=f64(1, -1).to(dtype),
        weight_T=f64(0.5, 0.5).to(dtype),
        behavior_T=f64(0, 0).to(dtype),
        unit_T=torch.tensor([0, 0]),
        count_U=torch.tensor([2]),
        version_T=torch.tensor([3, 3]),
        trajectory_T=torch.tensor([0, 0]),
    )
    config = LossConfig.model_validate({"trust": trust, **({"unit": "token"} if trust in ("tv", "kl") else {})})
    moved = ratios(0.3, -0.5, advantages_T=[1, -1], dtype=dtype)
    got = trust_region(config, columns, calibration=Calibration(), version=3)(moved)
    assert got.factor_T.dtype == dtype
    assert got.clipped_T.tolist() == {
        "fixed": [False, True],  # the mean fell
        "calibrated": [False, True],
        "token": [True, True],
        "geometric": [False, True],  # 1.35 is below e^.4, .61 below e^-.4
        "tv": [False, False],  # from .37 to .50 and .22: .13 and .145, below .15
        "kl": [False, True],  # .0352 and .0509: above .05
    }.get(trust, [False, False])
