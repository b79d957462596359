"""The loss: GSPO-token, its per-turn and per-version forms, GRPO and PPO as one pure function.

`T` action tokens of a micro-batch, `U` ratio units (the tokens that share one importance ratio).

The loss is a plain sum over tokens. The weights of the tokens, which make it a mean, are computed once over the whole
minibatch (`aggregation_weights` in `learn/tokens.py`), so no split into micro-batches and no number of ranks changes it.
Tokens that leave the loss are dropped by the caller before `unit_index` and `policy_loss`: they enter no ratio and no
denominator.
"""

from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from agentrl.learn.trust import Ratios, TrustRegion
from agentrl.policy.host_reads import require

_LARGEST_LOG_RATIO = 80.0
"""float32 ends at e^88."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    """The loss of a micro-batch and the inputs of its metrics. Only `loss` carries a gradient."""

    loss: Tensor
    """Scalar, to be minimised; the losses of a global batch's micro-batches add up."""
    ratio_U: Tensor
    """Importance ratio s_u of each unit."""
    log_ratio_T: Tensor
    """policy_logprob - anchor_logprob of each token, before the mean over its unit."""
    clipped_T: Tensor
    """Tokens that have left the trust region, so that their gradient is zero."""


def policy_loss(
    policy_logprobs_T: Tensor,
    *,
    anchor_logprobs_T: Tensor,
    advantages_T: Tensor,
    unit_T: Tensor,
    weight_T: Tensor,
    trust: TrustRegion,
    count_U: Tensor | None = None,
) -> PolicyLoss:
    """Surrogate with one stop-gradient importance ratio for each unit, within a trust region.

        log s_u  = mean over the tokens t of unit u of (policy_logprob_t - anchor_logprob_t), within -80..80
        loss     = -sum_t weight_t * A_t * v_t
        gradient = -sum_t weight_t * A_t * f_t * grad policy_logprob_t

    Value v_t and factor f_t are those of the trust region (`learn/trust.py`). With `fixed` it is

        loss     = -sum_t weight_t * min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)
        s_t      = sg(s_u(t)) * exp(policy_logprob_t - sg(policy_logprob_t))

    It is GSPO-token, arXiv 2507.18071 eq. 13-17, if the unit is the trajectory. With an advantage that is constant in each
    trajectory it is GSPO (eq. 5-7) in value, clip decisions and gradient; with one unit for each token it is PPO and
    GRPO (the gradient of s_t is r_t times that of the log-probability).

    Shapes: all `(T,)`; T = 0 gives a zero loss with a working backward. `unit_T` is int64 and uses every index 0..U-1,
    in any order. Every token given counts in its unit's mean: drop the tokens that leave the loss before the call. A
    unit must be whole in one call. `count_U` are the tokens of each unit, if they were counted before (`LossColumns`), which
    spares a wait for the device: `unit_T` is then not checked.

    Raises:
        ValueError: for a wrong rank, dtype or length, a number in anchor, advantages or weights that is not finite, or
            a unit index without tokens. (A policy log-probability that is not finite shows in the loss.)
    """
    _check_tokens(policy_logprobs_T, anchor_logprobs_T=anchor_logprobs_T, advantages_T=advantages_T, weight_T=weight_T)
    count_U = _count_units(unit_T, policy_logprobs_T) if count_U is None else count_U

    # Detached: whatever a caller's graph holds, the only gradient is that of policy_logprobs_T in s_t.
    log_ratio_T = (policy_logprobs_T - anchor_logprobs_T).detach()
    # An infinite ratio would make 0 * inf of the gradient of a clipped token, or of an advantage of 0.
    ratio_U = _unit_mean(log_ratio_T, unit_T, count_U).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    advantages_T = advantages_T.detach()
    ratios = Ratios(policy_logprobs_T.detach(), log_ratio_T, unit_T, ratio_U, advantages_T)
    # One decision for value, gradient and metric: torch.minimum would halve a gradient at a tie.
    value_T, factor_T, clipped_T = trust(ratios)
    surrogate_T = value_T + factor_T * (_score(policy_logprobs_T) - 1)
    loss = -(weight_T.detach() * surrogate_T * advantages_T).sum()
    return PolicyLoss(loss=loss, ratio_U=ratio_U, log_ratio_T=log_ratio_T, clipped_T=clipped_T)


KLEstimator = Literal["k2", "k3", "unbiased"]
"""Estimates of a KL divergence whose gradients differ."""
CovarianceRule = Literal["clip", "kl"]
"""Restraint on tokens whose advantage and log-probability are high together: no gradient, or a penalty."""


def kl_loss(
    policy_logprobs_T: Tensor,
    *,
    reference_logprobs_T: Tensor,
    weight_T: Tensor,
    coefficient: float,
    estimator: KLEstimator = "k2",
    anchor_logprobs_T: Tensor | None = None,
) -> Tensor:
    """KL divergence of the policy from a reference, estimated at sampled tokens.

        d_t      = policy_logprob_t - reference_logprob_t,  r_t = exp(policy_logprob_t - anchor_logprob_t)
        loss     = coefficient * sum_t weight_t * k_t
        k2       k_t = d_t^2 / 2                       gradient d_t grad log pi_t
        k3       k_t = exp(-d_t) - 1 + d_t             gradient (1 - exp(-d_t)) grad log pi_t
        unbiased k_t = r_t (exp(-d_t) - 1 + d_t)       gradient r_t d_t grad log pi_t

    Over tokens sampled from the policy the gradient of k2 is grad KL(pi || ref) at each context visited, and that of k3 is
    the gradient of KL(ref || pi); over tokens sampled from the anchor that of `unbiased` is grad KL(pi || ref). A token's
    effect on the divergence of later contexts is no part of it.

    Source: "Approximating KL divergence", J. Schulman, 2020; `unbiased`: DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

    Shapes: `(T,)` each; returns a scalar to be added to the policy loss.

    Raises:
        ValueError: for a wrong rank, dtype or length, numbers that are not finite, a negative coefficient, or `unbiased`
            without an anchor.
    """
    _check_tokens(policy_logprobs_T, reference_logprobs_T=reference_logprobs_T, weight_T=weight_T)
    _check_coefficient(coefficient)
    log_ratio_T = (policy_logprobs_T - reference_logprobs_T).detach()
    if estimator == "k2":
        value_T, factor_T = log_ratio_T**2 / 2, log_ratio_T
    else:
        value_T = torch.expm1(-log_ratio_T) + log_ratio_T
        factor_T = -torch.expm1(-log_ratio_T)
    if estimator == "unbiased":
        if anchor_logprobs_T is None:
            raise ValueError("expected anchor_logprobs_T: the estimator 'unbiased' weighs by the ratio to the anchor")
        ratio_T = (policy_logprobs_T - anchor_logprobs_T).detach().clamp(max=_LARGEST_LOG_RATIO).exp()
        value_T, factor_T = ratio_T * value_T, ratio_T * log_ratio_T
    return coefficient * (weight_T.detach() * (value_T + factor_T * (_score(policy_logprobs_T) - 1))).sum()


def nll_loss(policy_logprobs_T: Tensor, *, weight_T: Tensor, coefficient: float) -> Tensor:
    """Negative log-likelihood of tokens that the policy is to imitate: successful episodes, or demonstrations.

        loss     = -coefficient * sum_t weight_t * log pi_t

    Source: the positive-example language-model loss of VAPO, arXiv 2504.05118, whose weights are those of `token-mean`.

    Shapes: `(T,)` each; a token of weight 0 has no part in it. Returns a scalar to be added to the policy loss.

    Raises:
        ValueError: for a wrong rank, dtype or length, numbers that are not finite, or a negative coefficient.
    """
    _check_tokens(policy_logprobs_T, weight_T=weight_T)
    _check_coefficient(coefficient)
    return -coefficient * (weight_T.detach() * policy_logprobs_T).sum()


def select_by_covariance(
    advantages_T: Tensor,
    logprobs_T: Tensor,
    *,
    rule: CovarianceRule,
    share: float,
    band: tuple[float, float],
    generator: torch.Generator,
) -> Tensor:
    """Return the tokens that lower the entropy most: those whose advantage and log-probability are high together.

        c_t      = (A_t - mean A) (logprob_t - mean logprob), the means over all tokens
        clip     max(1, floor(share T)) tokens at random among those with band[0] < c_t < band[1], or all of them
        kl       the max(1, floor(share T)) tokens of the largest c_t

    Source: Clip-Cov and KL-Cov, arXiv 2505.22617, section 4. Tokens are those of a whole minibatch, and log-probabilities
    those at sampling, so that no split and no number of ranks changes the choice. (verl takes the present ones of a
    micro-batch, and its Clip-Cov draws from the tokens that the clip range leaves.)

    Shapes: `(T,)` each; returns bool `(T,)`.

    Raises:
        ValueError: for a wrong rank, dtype or length, numbers that are not finite, or a share beyond 0..1.
    """
    _check_tokens(logprobs_T, advantages_T=advantages_T)
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and at most 1, got {share}")
    selected_T = torch.zeros(len(logprobs_T), dtype=torch.bool, device=logprobs_T.device)
    if not len(logprobs_T):
        return selected_T
    covariance_T = (advantages_T - advantages_T.mean()) * (logprobs_T - logprobs_T.mean())
    if rule == "clip":
        within = ((covariance_T > band[0]) & (covariance_T < band[1])).nonzero().flatten()
        order = within[torch.randperm(len(within), generator=generator)]
    else:
        order = torch.argsort(covariance_T, descending=True, stable=True)
    selected_T[order[: max(1, int(share * len(logprobs_T)))]] = True
    return selected_T


def covariance_penalty(
    policy_logprobs_T: Tensor, *, anchor_logprobs_T: Tensor, weight_T: Tensor, selected_T: Tensor, coefficient: float
) -> Tensor:
    """Penalty on selected tokens that leave the anchor, whichever way.

        loss     = coefficient * sum over selected t of weight_t * |log pi_t - anchor_logprob_t|
        gradient   coefficient * weight_t * sign(log pi_t - anchor_logprob_t) grad log pi_t; 0 at the anchor

    Source: KL-Cov, arXiv 2505.22617, section 4, in the form of the authors' code. The trust region stays as it is (the
    authors' has none).

    Shapes: `(T,)` each, `selected_T` bool; returns a scalar to be added to the policy loss.

    Raises:
        ValueError: for a wrong rank, dtype or length, numbers that are not finite, or a negative coefficient.
    """
    _check_tokens(policy_logprobs_T, anchor_logprobs_T=anchor_logprobs_T, weight_T=weight_T)
    _check_coefficient(coefficient)
    distance_T = (policy_logprobs_T - anchor_logprobs_T.detach()).abs()
    return coefficient * (weight_T.detach() * selected_T * distance_T).sum()


def off_policy_keep(
    policy_logprobs_T: Tensor, behavior_logprobs_T: Tensor, advantages_T: Tensor, trajectory_T: Tensor, *, limit: float
) -> Tensor:
    """Return which tokens stay in the loss: not those that failed, in a trajectory that the policy would hardly sample.

        keep_t = A_t >= 0, or mean over the trajectory's tokens of (behavior_logprob - policy_logprob) <= limit

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

    Shapes: `(T,)` each, `trajectory_T` int64 of any numbers; returns bool `(T,)`.
    """
    _, index_T = torch.unique(trajectory_T, return_inverse=True)
    distance_T = (behavior_logprobs_T - policy_logprobs_T).detach()
    mean_U = _unit_mean(distance_T, index_T, torch.bincount(index_T))
    return (advantages_T >= 0) | (mean_U <= limit)[index_T]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MismatchWeights:
    """Correction for an engine whose distribution differs from the trainer's under the same weights. No gradient."""

    weight_T: Tensor
    """Factor of each token, after the limit: multiply the tokens' aggregation weights by it."""
    raw_U: Tensor
    """Factor of each unit before the limit, for metrics."""
    limited_U: Tensor
    """Units whose factor the limit changed."""


MismatchLevel = Literal["unit", "token", "product"]
"""Tokens whose mismatch is corrected together, and how."""


def mismatch_weights(
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    unit_T: Tensor,
    *,
    mode: Literal["truncate", "mask"],
    limit: float,
    level: MismatchLevel = "unit",
    count_U: Tensor | None = None,
) -> MismatchWeights:
    """Importance weight of each unit between the trainer's and the engine's view of the policy that sampled it.

        d_t     = proximal_logprob_t - behavior_logprob_t
        unit    w_u = sg[exp(mean over the tokens of unit u of d_t)]
        product w_u = sg[exp(sum over the tokens of unit u of d_t)]
        token   w_t = sg[exp(d_t)], whatever the unit
        truncate: min(w, limit)          mask: w if 1 / limit <= w <= limit, else 0

    `proximal` are the log-probabilities that the trainer recomputes under the weights that sampled, `behavior` those
    the engine recorded. It is no part of the clipped ratio, and a masked token stays in the aggregation's denominators.

    Source: truncated (TIS) and masked (MIS, IcePop) importance sampling, arXiv 2505.24298 and 2510.18855; `product` is that
    of whole sequences (TRL's `sequence_truncate` and `sequence_mask`), exact, and far from 1 on long ones.

    Shapes: `(T,)` each, `unit_T` and `count_U` as in `policy_loss`.

    Raises:
        ValueError: for a wrong rank, dtype or length, numbers that are not finite, an unknown mode, or a limit below 1.
    """
    _check_tokens(proximal_logprobs_T, behavior_logprobs_T=behavior_logprobs_T)
    if mode not in ("truncate", "mask"):
        raise ValueError(f"expected mode 'truncate' or 'mask', got {mode!r}")
    if not limit >= 1:
        raise ValueError(f"expected a limit >= 1, the largest factor of a unit, got {limit}")
    if level == "token":
        unit_T, count_U = torch.arange(len(unit_T), device=unit_T.device), torch.ones_like(unit_T)
    count_U = _count_units(unit_T, proximal_logprobs_T) if count_U is None else count_U
    log_U = _unit_mean((proximal_logprobs_T - behavior_logprobs_T).detach(), unit_T, count_U)
    if level == "product":
        log_U = log_U * count_U
    raw_U = log_U.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    limited_U = raw_U > limit
    if mode == "mask":
        limited_U = limited_U | (raw_U < 1 / limit)
    factor_U = torch.where(limited_U, limit if mode == "truncate" else 0.0, raw_U)
    return MismatchWeights(weight_T=factor_U[unit_T], raw_U=raw_U, limited_U=limited_U)


def _score(logprobs_T: Tensor) -> Tensor:
    """Return 1 for each token, with the gradient of its log-probability."""
    return torch.exp(logprobs_T - logprobs_T.detach())


def _unit_mean(values_T: Tensor, unit_T: Tensor, count_U: Tensor) -> Tensor:
    """Mean over each unit, added up in float64: the order of the tokens then leaves no trace in float32."""
    sums_U = torch.zeros(len(count_U), dtype=torch.float64, device=values_T.device)
    return (sums_U.index_add_(0, unit_T, values_T.double()) / count_U).to(values_T.dtype)


def _count_units(unit_T: Tensor, like_T: Tensor) -> Tensor:
    """Count the tokens of each unit, after checking the indices."""
    if unit_T.dtype != torch.int64 or unit_T.shape != like_T.shape or unit_T.device != like_T.device:
        raise ValueError(
            f"expected unit_T int64 of shape {tuple(like_T.shape)} on {like_T.device}, "
            f"got {unit_T.dtype} of {tuple(unit_T.shape)} on {unit_T.device}"
        )
    if len(unit_T) and int(unit_T.min()) < 0:
        raise ValueError(f"expected unit_T in 0..U-1, got {int(unit_T.min())}")
    # A sparse index would be as long as its largest value: bounded before the count.
    if len(unit_T) and int(unit_T.max()) >= len(unit_T):
        raise ValueError(
            f"expected unit_T to use every index 0..U-1, got {int(unit_T.max())} among {len(unit_T)} tokens; number "
            "the units of each micro-batch again with unit_index"
        )
    count_U = torch.bincount(unit_T)
    if bool((count_U == 0).any()):
        missing = int((count_U == 0).nonzero()[0])
        raise ValueError(
            f"expected unit_T to use every index 0..{len(count_U) - 1}, got no token of unit {missing}; number the "
            "units of each micro-batch again with unit_index"
        )
    return count_U


def _check_coefficient(coefficient: float) -> None:
    if not (isfinite(coefficient) and coefficient >= 0):
        raise ValueError(f"expected a finite coefficient >= 0, got {coefficient}")


def _check_tokens(logprobs_T: Tensor, **others: Tensor) -> None:
    """Check log-probabilities, and tensors that must be finite and of the same shape, dtype and device."""
    if logprobs_T.ndim != 1 or logprobs_T.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected log-probabilities of rank 1 in float32 or float64 (half precision is coarser than the clip "
            f"range), got {logprobs_T.dtype} of shape {tuple(logprobs_T.shape)}"
        )
    for name, tensor in others.items():
        got = (tensor.dtype, tuple(tensor.shape), tensor.device)
        expected = (logprobs_T.dtype, tuple(logprobs_T.shape), logprobs_T.device)
        if got != expected:
            raise ValueError(
                f"expected {name} like the policy's log-probabilities, {expected[0]} of shape {expected[1]} on "
                f"{expected[2]}, got {got[0]} of {got[1]} on {got[2]}"
            )
        require(torch.isfinite(tensor).all(), partial(_not_finite, name, tensor))


def _not_finite(name: str, tensor: Tensor) -> Exception:
    index = int((~torch.isfinite(tensor)).nonzero()[0])
    return ValueError(f"expected finite {name}, got {float(tensor[index])} at token {index}")
