"""The loss against slow loops that follow the papers' equations.

`T` action tokens, `U` ratio units, `K` turns, `V` vocabulary. Everything is float64.
"""

import math
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.learn.config import DEFAULT_CLIP
from agentrl.learn.loss import (
    KLEstimator,
    MismatchLevel,
    PolicyLoss,
    kl_loss,
    mismatch_weights,
    off_policy_keep,
    policy_loss,
)
from agentrl.learn.tokens import Aggregation, RatioUnit, aggregation_weights, unit_index
from agentrl.learn.trust import fixed
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

torch.set_num_threads(1)


def gspo(
    policy: list[Tensor], anchor: list[Tensor], advantages: list[float], clip: tuple[float, float]
) -> tuple[Tensor, list[bool]]:
    """GSPO, arXiv 2507.18071 eq. 5-7: differentiates through the mean over the sequence."""
    terms, clipped = [], []
    for policy_T, anchor_T, advantage in zip(policy, anchor, advantages, strict=True):
        ratio = ((policy_T - anchor_T).sum() / len(policy_T)).exp()
        bound = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage
        terms.append(torch.minimum(ratio * advantage, bound))
        clipped.append(bool(bound < ratio * advantage))
    return -torch.stack(terms).mean(), clipped


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), clip=st.sampled_from([(3e-4, 4e-4), (0.02, 0.03)]))
def test_with_constant_advantages_it_is_gspo_in_value_clip_decisions_and_gradient(
    seed: int, clip: tuple[float, float]
) -> None:
    batch = make_batch(seed, spread=3 * clip[0])
    num = int(batch.trajectory_T.max()) + 1
    advantages = np.random.default_rng(seed).normal(size=num)
    policy = [batch.policy_T[torch.from_numpy(batch.trajectory_T == i)].requires_grad_() for i in range(num)]
    anchor = [batch.anchor_T[torch.from_numpy(batch.trajectory_T == i)] for i in range(num)]
    expected, expected_clipped = gspo(policy, anchor, list(advantages), clip)
    expected_gradient = torch.cat(torch.autograd.grad(expected, policy))

    policy_T = batch.policy_T.clone().requires_grad_()
    result = policy_loss(
        policy_T,
        anchor_logprobs_T=batch.anchor_T,
        advantages_T=torch.from_numpy(advantages[batch.trajectory_T]),
        unit_T=torch.from_numpy(batch.trajectory_T),
        weight_T=torch.from_numpy(batch_weights(batch, "trajectory-mean")),
        trust=partial(fixed, low=clip[0], high=clip[1]),
    )
    close(result.loss, expected)
    # Through the stop-gradient at 1/|y_i| a token, or through the mean: the same up to rounding.
    close(torch.autograd.grad(result.loss, policy_T)[0], expected_gradient)
    assert result.clipped_T.tolist() == np.array(expected_clipped)[batch.trajectory_T].tolist()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_with_one_unit_for_each_token_it_is_grpo(seed: int) -> None:
    # arXiv 2402.03300 eq. 3 without its KL term: mean over trajectories of the mean over tokens of PPO's clip.
    batch, (low, high) = make_batch(seed, spread=0.3), (0.2, 0.27)
    policy_T = batch.policy_T.clone().requires_grad_()
    ratio_T = (policy_T - batch.anchor_T).exp()
    clip_T = torch.clamp(ratio_T, 1 - low, 1 + high) * batch.advantages_T
    terms_T = torch.minimum(ratio_T * batch.advantages_T, clip_T)
    means = [terms_T[torch.from_numpy(batch.trajectory_T == i)].mean() for i in np.unique(batch.trajectory_T)]
    expected = -torch.stack(means).mean()
    expected_gradient = torch.autograd.grad(expected, policy_T)[0]

    weight_T = torch.from_numpy(batch_weights(batch, "trajectory-mean"))
    result, gradient = loss_and_gradient(
        batch, "token", weight_T, partial(fixed, low=low, high=high), np.arange(len(weight_T))
    )
    close(result.loss, expected.detach())
    close(gradient, expected_gradient)
    assert torch.equal(result.clipped_T, (clip_T < ratio_T * batch.advantages_T).detach())


# Log-ratios of one trajectory of two turns, and its advantages: the "loss coefficients" example.
LOG_RATIOS = (0.02, 0.04, 0.0, -0.10, 0.02)
ADVANTAGES = (1.0, 1.0, 1.0, -0.5, -0.5)


def coefficients(unit_T: list[int]) -> Tensor:
    """Return what multiplies grad log pi in the objective, for clip .03/.04 and weight 1/5."""
    policy_T = f64(*LOG_RATIOS).requires_grad_()
    result = policy_loss(
        policy_T,
        anchor_logprobs_T=torch.zeros(5, dtype=torch.float64),
        advantages_T=f64(*ADVANTAGES),
        unit_T=torch.tensor(unit_T),
        weight_T=torch.full((5,), 0.2, dtype=torch.float64),
        trust=partial(fixed, low=0.03, high=0.04),
    )
    return -torch.autograd.grad(result.loss, policy_T)[0]


def test_coefficients_of_the_trajectory_unit_are_those_worked_out_by_hand() -> None:
    # Mean log-ratio -.02 / 5 = -.004; exp(-.004) / 5 = .199202; times -.5 = -.099601. Inside the range: none clipped.
    got = coefficients([0, 0, 0, 0, 0])
    close(got, math.exp(-0.004) / 5 * f64(*ADVANTAGES))
    assert got.tolist() == pytest.approx([0.199202, 0.199202, 0.199202, -0.099601, -0.099601], abs=5e-7)


def test_coefficients_of_the_turn_unit_are_those_worked_out_by_hand() -> None:
    # Turn 1: mean .02, exp(.02) / 5 = .204040. Turn 2: mean -.04, .9608 < 1 - .03 with A < 0: clipped.
    got = coefficients([0, 0, 0, 1, 1])
    close(got, math.exp(0.02) / 5 * f64(1, 1, 1, 0, 0))
    assert got.tolist() == pytest.approx([0.204040, 0.204040, 0.204040, 0, 0], abs=5e-7)


def test_coefficients_of_the_token_unit_are_the_tokens_own_ratios() -> None:
    # exp(.04) = 1.0408 > 1.04 with A > 0 and exp(-.10) = .905 < .97 with A < 0 are clipped.
    close(coefficients([0, 1, 2, 3, 4]), f64(math.exp(0.02) / 5, 0, 0.2, 0, -0.1 * math.exp(0.02)))


def test_two_outlier_tokens_among_512_hardly_move_the_sequence_ratio_and_clip_alone_at_token_level() -> None:
    # exp((ln 1.9 + ln .4) / 512) = .76 ** (1 / 512) = .99946: rounded .9995.
    policy_T = torch.zeros(512, dtype=torch.float64)
    policy_T[100], policy_T[300] = math.log(1.9), math.log(0.4)
    advantages_T = torch.ones(512, dtype=torch.float64)
    advantages_T[300] = -1.0

    def loss(unit_T: Tensor, unit: RatioUnit) -> PolicyLoss:
        low, high = DEFAULT_CLIP[unit]
        return policy_loss(
            policy_T,
            anchor_logprobs_T=torch.zeros_like(policy_T),
            advantages_T=advantages_T,
            unit_T=unit_T,
            weight_T=torch.full_like(policy_T, 1 / 512),
            trust=partial(fixed, low=low, high=high),
        )

    sequence = loss(torch.zeros(512, dtype=torch.int64), "trajectory")
    close(sequence.ratio_U, f64(0.76 ** (1 / 512)))
    assert round(float(sequence.ratio_U), 4) == 0.9995
    # Below 1 - 3e-4: only the token of negative advantage is held back.
    assert sequence.clipped_T.nonzero()[:, 0].tolist() == [300]
    token = loss(torch.arange(512), "token")
    assert token.clipped_T.nonzero()[:, 0].tolist() == [100, 300]
    close(token.ratio_U[torch.tensor([100, 300])], f64(1.9, 0.4))


def test_only_the_stop_gradient_keeps_advantages_that_differ_between_tokens() -> None:
    policy_T = f64(0.01, -0.02, 0.03, 0.0)
    advantages_T = f64(1.0, -2.0, 0.5, 3.0)

    def gradient(through_the_mean: bool) -> Tensor:
        leaf_T = policy_T.clone().requires_grad_()
        if through_the_mean:
            objective = (leaf_T.mean().exp() * advantages_T).mean()
            return torch.autograd.grad(objective, leaf_T)[0]
        loss = policy_loss(
            leaf_T,
            anchor_logprobs_T=torch.zeros_like(leaf_T),
            advantages_T=advantages_T,
            unit_T=torch.zeros(4, dtype=torch.int64),
            weight_T=torch.full_like(leaf_T, 0.25),
            trust=partial(fixed, low=0.2, high=0.2),
        ).loss
        return -torch.autograd.grad(loss, leaf_T)[0]

    scale = math.exp(0.005) / 4
    close(gradient(through_the_mean=False), scale * advantages_T)
    close(gradient(through_the_mean=True), scale * torch.full_like(advantages_T, float(advantages_T.mean())))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), unit=st.sampled_from(UNITS))
def test_tokens_of_other_units_and_dropped_tokens_have_no_influence(seed: int, unit: RatioUnit) -> None:
    batch, trust = make_batch(seed, spread=0.1, drop=0.3), partial(fixed, low=0.02, high=0.03)
    kept = np.flatnonzero(batch.keep_T)
    if not len(kept):
        return
    weight_T = torch.from_numpy(batch_weights(batch, "trajectory-mean"))
    before, gradient = loss_and_gradient(batch, unit, weight_T, trust, kept)
    units = slow_units(batch, unit)
    chosen = units[seed % len(units)]

    inside = torch.zeros(len(batch.keep_T), dtype=torch.bool)
    inside[torch.tensor(chosen)] = True
    kept_index = torch.from_numpy(kept)
    with_others = Batch(
        trajectory_T=batch.trajectory_T,
        turn_T=batch.turn_T,
        version_T=batch.version_T,
        keep_T=batch.keep_T,
        policy_T=torch.where(inside, batch.policy_T, batch.policy_T * 3 - 1),
        anchor_T=torch.where(inside, batch.anchor_T, batch.anchor_T - 0.5),
        advantages_T=torch.where(inside, batch.advantages_T, -7 * batch.advantages_T),
    )
    after, gradient_after = loss_and_gradient(with_others, unit, weight_T, trust, kept)
    assert torch.equal(gradient_after[inside[kept_index]], gradient[inside[kept_index]])
    assert torch.equal(after.clipped_T[inside[kept_index]], before.clipped_T[inside[kept_index]])

    dropped = torch.from_numpy(~batch.keep_T)
    without = Batch(
        trajectory_T=batch.trajectory_T,
        turn_T=batch.turn_T,
        version_T=batch.version_T,
        keep_T=batch.keep_T,
        policy_T=torch.where(dropped, math.nan, batch.policy_T),
        anchor_T=torch.where(dropped, math.nan, batch.anchor_T),
        advantages_T=torch.where(dropped, math.nan, batch.advantages_T),
    )
    same, same_gradient = loss_and_gradient(without, unit, weight_T, trust, kept)
    assert torch.equal(same.loss, before.loss)
    assert torch.equal(same_gradient, gradient)


def test_only_the_policy_gets_a_gradient() -> None:
    leaves = [f64(0.1, -0.2).requires_grad_() for _ in range(4)]
    result = policy_loss(
        leaves[0],
        anchor_logprobs_T=leaves[1],
        advantages_T=leaves[2],
        unit_T=torch.tensor([0, 0]),
        weight_T=leaves[3],
        trust=partial(fixed, low=0.2, high=0.2),
    )
    gradients = torch.autograd.grad(result.loss, leaves, allow_unused=True)
    assert gradients[0] is not None
    assert all(gradient is None for gradient in gradients[1:])
    assert not any(tensor.requires_grad for tensor in (result.ratio_U, result.log_ratio_T, result.clipped_T))


def test_on_the_first_pass_the_policy_is_its_own_anchor_and_the_gradient_is_reinforce() -> None:
    policy_T = f64(-0.5, -1.5, -2.5).requires_grad_()
    advantages_T, weight_T = f64(1.0, -2.0, 0.0), f64(0.2, 0.3, 0.5)
    result = policy_loss(
        policy_T,
        anchor_logprobs_T=policy_T.detach(),
        advantages_T=advantages_T,
        unit_T=torch.tensor([0, 0, 1]),
        weight_T=weight_T,
        trust=partial(fixed, low=0.0, high=0.0),
    )
    assert torch.equal(result.ratio_U, f64(1, 1))
    assert not bool(result.clipped_T.any())
    close(torch.autograd.grad(result.loss, policy_T)[0], -advantages_T * weight_T)


def test_no_tokens_give_a_zero_loss_with_a_working_backward() -> None:
    policy_T = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty_T = torch.zeros(0, dtype=torch.float64)
    result = policy_loss(
        policy_T,
        anchor_logprobs_T=empty_T,
        advantages_T=empty_T,
        unit_T=torch.zeros(0, dtype=torch.int64),
        weight_T=empty_T,
        trust=partial(fixed, low=0.1, high=0.1),
    )
    kl = kl_loss(policy_T, reference_logprobs_T=empty_T, weight_T=empty_T, coefficient=0.5)
    (result.loss + kl).backward()
    assert float(result.loss.detach()) == 0.0
    assert result.ratio_U.shape == (0,)
    assert policy_T.grad is not None


def test_the_order_of_tokens_leaves_no_trace_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio_T = 1e-3 * torch.randn(4096, generator=generator)

    def ratio(values_T: Tensor) -> float:
        zeros_T = torch.zeros_like(values_T)
        return float(
            policy_loss(
                values_T,
                anchor_logprobs_T=zeros_T,
                advantages_T=zeros_T,
                unit_T=torch.zeros(len(values_T), dtype=torch.int64),
                weight_T=zeros_T,
                trust=partial(fixed, low=0.1, high=0.1),
            ).ratio_U
        )

    shuffles = [torch.randperm(4096, generator=generator) for _ in range(20)]
    assert {ratio(log_ratio_T[order]) for order in shuffles} == {ratio(log_ratio_T)}


@each(
    ("change", "message"),
    [
        ({"policy_logprobs_T": torch.zeros(2, 1)}, r"rank 1 in float32 or float64 .* torch\.float32 of shape \(2, 1\)"),
        ({"policy_logprobs_T": torch.zeros(2, dtype=torch.bfloat16)}, r"got torch\.bfloat16 of shape \(2,\)"),
        ({"anchor_logprobs_T": torch.zeros(2)}, r"anchor_logprobs_T .* torch\.float64 .* got torch\.float32 of \(2,\)"),
        ({"advantages_T": f64(1)}, r"advantages_T .* shape \(2,\) .* got torch\.float64 of \(1,\)"),
        ({"advantages_T": f64(1, math.inf)}, "finite advantages_T, got inf at token 1"),
        ({"anchor_logprobs_T": f64(-math.inf, 0)}, "finite anchor_logprobs_T, got -inf at token 0"),
        ({"weight_T": f64(1, math.nan)}, "finite weight_T, got nan at token 1"),
        ({"unit_T": torch.zeros(2, dtype=torch.int32)}, r"unit_T int64 .* got torch\.int32"),
        ({"unit_T": torch.tensor([0])}, r"unit_T int64 of shape \(2,\) .* of \(1,\)"),
        ({"unit_T": torch.tensor([-1, 0])}, r"unit_T in 0\.\.U-1, got -1"),
        (
            {"unit_T": torch.tensor([1, 1])},
            r"index 0\.\.1, got no token of unit 0; number the units of each micro-batch again with unit_index$",
        ),
        (
            {"unit_T": torch.tensor([2, 0])},
            "got 2 among 2 tokens; number the units of each micro-batch again with unit_in",
        ),
        ({"unit_T": torch.tensor([0, 2**40])}, "got 1099511627776 among 2 tokens"),
        ({"trust": partial(fixed, low=1.1, high=0.1)}, r"below 1 in \[0, 1\] and one above it >= 0, got 1\.1 and 0\.1"),
        ({"trust": partial(fixed, low=0.1, high=-0.1)}, r"got 0\.1 and -0\.1"),
        ({"trust": partial(fixed, low=-0.1, high=0.1)}, r"got -0\.1 and 0\.1"),
        ({"trust": partial(fixed, low=0.1, high=math.nan)}, r"got 0\.1 and nan"),
    ],
)
def test_wrong_inputs_are_refused_with_what_was_got(change: dict[str, Any], message: str) -> None:
    arguments = {
        "policy_logprobs_T": f64(0, 0),
        "anchor_logprobs_T": f64(0, 0),
        "advantages_T": f64(1, 1),
        "unit_T": torch.tensor([0, 1]),
        "weight_T": f64(1, 1),
        "trust": partial(fixed, low=0.1, high=0.1),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        policy_loss(arguments.pop("policy_logprobs_T"), **arguments)


# --- KL to the reference ---------------------------------------------------------------------------------------------


def test_the_expected_gradient_of_the_kl_loss_is_that_of_a_divergence() -> None:
    generator = torch.Generator().manual_seed(3)
    logits_V = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference_V, anchor_V = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(1)
    policy_V = logits_V.log_softmax(0)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits_V, retain_graph=True)[0]

    divergence = (policy_V.exp() * (policy_V - reference_V)).sum()
    exact, reverse = gradient(divergence), gradient((reference_V.exp() * (reference_V - policy_V)).sum())

    # Enumeration: each token once, weighted by its probability under the policy that sampled it.
    def loss(estimator: KLEstimator, sampled_by_V: Tensor) -> Tensor:
        return kl_loss(
            policy_V,
            reference_logprobs_T=reference_V,
            weight_T=sampled_by_V.detach().exp(),
            coefficient=0.3,
            estimator=estimator,
            anchor_logprobs_T=sampled_by_V.detach(),
        )

    close(gradient(loss("k2", policy_V)), 0.3 * exact)
    close(gradient(loss("k3", policy_V)), 0.3 * reverse)
    close(gradient(loss("unbiased", policy_V)), 0.3 * exact)
    close(gradient(loss("unbiased", anchor_V)), 0.3 * exact)
    for estimate in (loss("k3", policy_V), loss("unbiased", policy_V), loss("unbiased", anchor_V)):
        close(estimate.detach(), 0.3 * divergence.detach())
    squares_V = (policy_V - reference_V).detach() ** 2 / 2
    close(loss("k2", policy_V).detach(), 0.3 * (policy_V.detach().exp() * squares_V).sum())

    # Not of tokens that another policy sampled, and not through the log-ratio itself.
    for of_another in (loss("k2", anchor_V), loss("k3", anchor_V)):
        assert float((gradient(of_another) / 0.3 - exact).norm() / exact.norm()) > 0.1
    k1 = (policy_V.detach().exp() * (policy_V - reference_V)).sum()
    close(gradient(k1), torch.zeros_like(exact))


@each(
    ("estimator", "value", "slope"),
    [
        # d = .5 and -1; k_t is weighed by .1 * .5 and .1 * .25
        ("k2", [0.5**2 / 2, 1 / 2], [0.5, -1.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2], [1 - math.exp(-0.5), 1 - math.e]),
        # r = e^.25 and e^-.5
        (
            "unbiased",
            [math.exp(0.25) * (math.exp(-0.5) - 0.5), math.exp(-0.5) * (math.e - 2)],
            [math.exp(0.25) * 0.5, -math.exp(-0.5)],
        ),
    ],
)
def test_the_kl_loss_of_two_tokens_is_that_worked_out_by_hand(
    estimator: KLEstimator, value: list[float], slope: list[float]
) -> None:
    policy_T = f64(-1.0, -2.0).requires_grad_()
    reference_T, anchor_T = f64(-1.5, -1.0).requires_grad_(), f64(-1.25, -1.5).requires_grad_()
    loss = kl_loss(
        policy_T,
        reference_logprobs_T=reference_T,
        weight_T=f64(0.5, 0.25),
        coefficient=0.1,
        estimator=estimator,
        anchor_logprobs_T=anchor_T,
    )
    close(loss.detach(), f64(0.1 * (0.5 * value[0] + 0.25 * value[1]))[0])
    gradient, *others = torch.autograd.grad(loss, (policy_T, reference_T, anchor_T), allow_unused=True)
    close(gradient, f64(0.05 * slope[0], 0.025 * slope[1]))
    assert others == [None, None]


def test_an_unbiased_estimate_needs_the_anchor() -> None:
    with pytest.raises(ValueError, match="expected anchor_logprobs_T: the estimator 'unbiased' weighs by the ratio"):
        kl_loss(f64(-1), reference_logprobs_T=f64(-2), weight_T=f64(1), coefficient=0.1, estimator="unbiased")


def test_a_kl_loss_refuses_a_negative_coefficient_and_references_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match=r"coefficient >= 0, got -0\.1"):
        kl_loss(f64(0), reference_logprobs_T=f64(0), weight_T=f64(1), coefficient=-0.1)
    with pytest.raises(ValueError, match="finite reference_logprobs_T, got -inf at token 0"):
        kl_loss(f64(0), reference_logprobs_T=f64(-math.inf), weight_T=f64(1), coefficient=0.1)
    with pytest.raises(ValueError, match="finite weight_T, got nan at token 0"):
        kl_loss(f64(0), reference_logprobs_T=f64(0), weight_T=f64(math.nan), coefficient=0.1)
    assert kl_loss(f64(-1), reference_logprobs_T=f64(0), weight_T=f64(1), coefficient=0.0) == 0


# --- engine mismatch -------------------------------------------------------------------------------------------------

# Units of mean log-ratio (1 + 0) / 2 = .5, -2 and 0.
PROXIMAL = f64(-1.0, -3.0, -1.0, -1.0)
BEHAVIOR = f64(-2.0, -1.0, -1.0, -1.0)
MISMATCH_UNITS = torch.tensor([0, 1, 0, 2])


def test_truncated_mismatch_weights_are_cut_from_above_alone() -> None:
    got = mismatch_weights(PROXIMAL.requires_grad_(), BEHAVIOR, MISMATCH_UNITS, mode="truncate", limit=1.5)
    close(got.raw_U, f64(math.exp(0.5), math.exp(-2), 1))
    close(got.weight_T, f64(1.5, math.exp(-2), 1.5, 1))
    assert got.limited_U.tolist() == [True, False, False]
    assert not got.weight_T.requires_grad


def test_masked_mismatch_weights_are_zero_on_both_sides_of_the_range() -> None:
    got = mismatch_weights(PROXIMAL, BEHAVIOR, MISMATCH_UNITS, mode="mask", limit=1.5)
    close(got.raw_U, f64(math.exp(0.5), math.exp(-2), 1))
    close(got.weight_T, f64(0, 0, 0, 1))
    assert got.limited_U.tolist() == [True, True, False]
    wide = mismatch_weights(PROXIMAL, BEHAVIOR, MISMATCH_UNITS, mode="mask", limit=2)
    close(wide.weight_T, f64(math.exp(0.5), 0, math.exp(0.5), 1))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_mismatch_of_exactly_the_limit_is_not_limited(mode: Literal["truncate", "mask"]) -> None:
    got = mismatch_weights(BEHAVIOR, BEHAVIOR, MISMATCH_UNITS, mode=mode, limit=1)
    assert got.weight_T.tolist() == [1, 1, 1, 1]
    assert got.limited_U.tolist() == [False, False, False]


@each(
    ("level", "raw", "truncated", "masked"),
    [
        # tokens differ by 1, -2, 0, 0
        ("token", [math.e, math.exp(-2), 1, 1], [2, math.exp(-2), 1, 1], [0, 0, 1, 1]),
        ("product", [math.e, math.exp(-2), 1], [2, math.exp(-2), 2, 1], [0, 0, 0, 1]),
    ],
)
def test_mismatch_is_corrected_by_token_or_by_the_product_over_the_unit(
    level: MismatchLevel, raw: list[float], truncated: list[float], masked: list[float]
) -> None:
    cut = mismatch_weights(PROXIMAL, BEHAVIOR, MISMATCH_UNITS, mode="truncate", limit=2, level=level)
    kept = mismatch_weights(PROXIMAL, BEHAVIOR, MISMATCH_UNITS, mode="mask", limit=2, level=level)
    for got, expected in ((cut, truncated), (kept, masked)):
        close(got.raw_U, f64(*raw))
        close(got.weight_T, f64(*expected))
    assert cut.limited_U.tolist() == [one > 2 for one in raw]
    assert kept.limited_U.tolist() == [one > 2 or one < 1 / 2 for one in raw]


def test_tokens_that_failed_leave_a_trajectory_that_the_policy_would_hardly_sample() -> None:
    # Means over trajectories 7, 2 and 5 of behavior - policy: (1 + 0 + 0) / 3, .25 and -3.
    policy_T = f64(-2.0, -1.0, -1.25, -1.0, -1.0, -4.0).requires_grad_()
    behavior_T = f64(-1.0, -1.0, -1.0, -4.0, -1.0, -7.0)
    trajectory_T = torch.tensor([7, 7, 2, 5, 7, 5])
    advantage_T = f64(-1.0, 1.0, -1.0, -1.0, 0.0, -1.0)

    def keep(limit: float) -> list[bool]:
        return off_policy_keep(policy_T, behavior_T, advantage_T, trajectory_T, limit=limit).tolist()

    assert keep(0.3) == [False, True, True, True, True, True]
    assert keep(0.2) == [False, True, False, True, True, True]
    assert keep(0.25) == keep(0.3)  # a mean of exactly the limit stays
    assert keep(0.4) == [True] * 6


def test_mismatch_weights_refuse_other_modes_limits_and_lengths() -> None:
    with pytest.raises(ValueError, match="behavior_logprobs_T"):
        mismatch_weights(PROXIMAL, BEHAVIOR[:3], MISMATCH_UNITS, mode="mask", limit=2)
    with pytest.raises(ValueError, match="'truncate' or 'mask', got 'clip'"):
        mismatch_weights(PROXIMAL, BEHAVIOR, MISMATCH_UNITS, mode="clip", limit=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"limit >= 1, .* got 0\.5"):
        mismatch_weights(PROXIMAL, BEHAVIOR, MISMATCH_UNITS, mode="mask", limit=0.5)


# --- weights and units -----------------------------------------------------------------------------------------------


# Two trajectories: one of turns of 2 and 1 tokens, one of 1 token.
TRAJECTORY = [7, 7, 7, 2]
TURN = [0, 0, 1, 0]


@each(
    ("aggregation", "expected"),
    [
        ("trajectory-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),  # N = 2, lengths 3 and 1
        ("turn-mean", [1 / 6, 1 / 6, 1 / 3, 1 / 3]),  # K = 3, lengths 2, 1 and 1
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("constant", [1 / 20, 1 / 20, 1 / 20, 1 / 20]),  # N = 2, L = 10
    ],
)
def test_weights_are_those_worked_out_by_hand(aggregation: Aggregation, expected: list[float]) -> None:
    length = 10 if aggregation == "constant" else None
    got = aggregation_weights(aggregation, trajectory_T=TRAJECTORY, turn_T=TURN, constant_length=length)
    np.testing.assert_allclose(got, expected, rtol=1e-15)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), aggregation=st.sampled_from(AGGREGATIONS))
def test_weights_follow_a_slow_count_and_the_tokens_wherever_they_lie(seed: int, aggregation: Aggregation) -> None:
    batch = make_batch(seed, spread=0.1, drop=0.4)
    got = batch_weights(batch, aggregation)
    lengths: dict[int, int] = {}
    turn_lengths: dict[tuple[int, int], int] = {}
    for trajectory, turn, keep in zip(batch.trajectory_T, batch.turn_T, batch.keep_T, strict=True):
        if keep:
            lengths[int(trajectory)] = lengths.get(int(trajectory), 0) + 1
            turn_lengths[int(trajectory), int(turn)] = turn_lengths.get((int(trajectory), int(turn)), 0) + 1
    for t, keep in enumerate(batch.keep_T):
        key = (int(batch.trajectory_T[t]), int(batch.turn_T[t]))
        expected = 0.0
        if keep:
            expected = {
                "trajectory-mean": 1 / (len(lengths) * lengths[key[0]]),
                "turn-mean": 1 / (len(turn_lengths) * turn_lengths[key]),
                "token-mean": 1 / sum(lengths.values()),
                "constant": 1 / (len(lengths) * 16),
            }[aggregation]
        assert got[t] == pytest.approx(expected, rel=1e-14)

    order = np.random.default_rng(seed).permutation(len(got))
    order = order[batch.keep_T[order]]
    shuffled = aggregation_weights(
        aggregation,
        trajectory_T=batch.trajectory_T[order],
        turn_T=batch.turn_T[order],
        constant_length=16 if aggregation == "constant" else None,
    )
    np.testing.assert_array_equal(shuffled, got[order])


@each("aggregation", ["trajectory-mean", "turn-mean", "token-mean"])
def test_no_tokens_have_no_weights(aggregation: Aggregation) -> None:
    assert aggregation_weights(aggregation, trajectory_T=[], turn_T=[]).tolist() == []


def test_weights_refuse_columns_of_different_length_and_a_constant_length_of_no_use() -> None:
    with pytest.raises(ValueError, match=r"turn_T integers of shape \(2,\), got int64 of \(1,\)"):
        aggregation_weights("token-mean", trajectory_T=[0, 1], turn_T=[0])
    with pytest.raises(ValueError, match="got 'token-mean' and 5"):
        aggregation_weights("token-mean", trajectory_T=[0], turn_T=[0], constant_length=5)
    with pytest.raises(ValueError, match="got 'constant' and None"):
        aggregation_weights("constant", trajectory_T=[0], turn_T=[0])
    with pytest.raises(ValueError, match="constant_length >= 1, got 0"):
        aggregation_weights("constant", trajectory_T=[0], turn_T=[0], constant_length=0)
    assert aggregation_weights("constant", trajectory_T=[0], turn_T=[0], constant_length=1).tolist() == [1]
    with pytest.raises(ValueError, match="got 'mean'"):
        aggregation_weights("mean", trajectory_T=[0], turn_T=[0])  # type: ignore[arg-type]


@each(
    ("unit", "expected"),
    [
        ("trajectory", [1, 1, 1, 1, 1, 0, 0]),
        ("turn", [1, 1, 1, 1, 2, 0, 0]),
        ("version", [1, 1, 2, 3, 4, 0, 0]),  # version 5 comes back: a run of its own; the next turn begins another
        ("token", [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_units_are_numbered_by_trajectory_turn_and_run(unit: RatioUnit, expected: list[int]) -> None:
    got = unit_index(unit, [8, 8, 8, 8, 8, 3, 3], [0, 0, 0, 0, 1, 0, 0], [5, 5, 6, 5, 5, 5, 5])
    assert got.dtype == np.int64
    assert got.tolist() == expected


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), unit=st.sampled_from(UNITS))
def test_units_are_the_same_when_trajectories_lie_interleaved(seed: int, unit: RatioUnit) -> None:
    batch = make_batch(seed, spread=0.1)
    # Shuffles the trajectories among each other, every one still in its own order.
    places = np.argsort(np.random.default_rng(seed).permutation(batch.trajectory_T), kind="stable")
    order = np.argsort(places)
    interleaved = unit_index(unit, batch.trajectory_T[order], batch.turn_T[order], batch.version_T[order])
    groups = {frozenset(int(order[t]) for t in np.flatnonzero(interleaved == u)) for u in range(interleaved.max() + 1)}
    everything = Batch(
        trajectory_T=batch.trajectory_T,
        turn_T=batch.turn_T,
        version_T=batch.version_T,
        keep_T=np.ones_like(batch.keep_T),
        policy_T=batch.policy_T,
        anchor_T=batch.anchor_T,
        advantages_T=batch.advantages_T,
    )
    assert groups == {frozenset(tokens) for tokens in slow_units(everything, unit)}


def test_units_refuse_unknown_names_and_uneven_lengths() -> None:
    with pytest.raises(ValueError, match="got 'step'"):
        unit_index("step", [0], [0], [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"version_T integers of shape \(2,\), got int64 of \(1,\)"):
        unit_index("version", [0, 0], [0, 0], [0])
    with pytest.raises(ValueError, match=r"turn_T integers .* got float64"):
        unit_index("turn", [0, 0], [0.5, 0.5], [0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratios_beyond_the_range_of_numbers_leave_loss_and_gradient_finite(dtype: torch.dtype) -> None:
    policy_T = torch.tensor([-0.1, -0.1, -950.0, -0.5], dtype=dtype, requires_grad=True)
    result = policy_loss(
        policy_T,
        anchor_logprobs_T=torch.tensor([-95.0, -950.0, -0.1, -0.5], dtype=dtype),
        advantages_T=torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=dtype),
        unit_T=torch.arange(4),
        weight_T=torch.full((4,), 0.25, dtype=dtype),
        trust=partial(fixed, low=0.2, high=0.25),
    )
    result.loss.backward()
    assert result.clipped_T.tolist() == [True, False, False, False]
    assert result.loss.item() == pytest.approx(-(1.25 + 0 + 0 + 1) / 4)
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == pytest.approx([0, 0, 0, -0.25])
