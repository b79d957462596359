"""The loss: GSPO-token, its per-turn and per-version forms, GRPO and PPO as one pure function.

`T` action tokens of a micro-batch, `U` ratio units (the tokens that share one importance ratio).

The loss is a plain sum over tokens. The weights of the tokens, which make it a mean, are computed once over the whole
minibatch (`aggregation_weights` in `learn/tokens.py`), so no split into micro-batches and no number of ranks changes it.
Tokens that leave the loss are dropped by the caller before `unit_index` and `policy_loss`: they enter no ratio and no
denominator.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from agentrl.learn.trust import Ratios, TrustRegion

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
) -> PolicyLoss:
    """Surrogate with one stop-gradient importance ratio for each unit, within a trust region.

        log s_u = mean over the tokens t of unit u of (policy_logprob_t - anchor_logprob_t), within -80..80
        f_t     = factor from the trust region; s_u(t) in that of GSPO
        loss    = -sum_t weight_t * A_t * f_t * exp(policy_logprob_t - sg(policy_logprob_t))

    If a token has left the trust region, the last factor is 1: no gradient. With `fixed` it is

        loss    = -sum_t weight_t * min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t),  s_t = sg(s_u(t)) * exp(...)

    It is GSPO-token, arXiv 2507.18071 eq. 13-17, if the unit is the trajectory. With an advantage that is constant in each
    trajectory it is GSPO (eq. 5-7) in value, clip decisions and gradient; with one unit for each token it is PPO and
    GRPO (the gradient of s_t is r_t times that of the log-probability).

    Shapes: all `(T,)`; T = 0 gives a zero loss with a working backward. `unit_T` is int64 and uses every index 0..U-1,
    in any order. Every token given counts in its unit's mean: drop the tokens that leave the loss before the call. A
    unit must be whole in one call.

    Raises:
        ValueError: for a wrong rank, dtype or length, a number in anchor, advantages or weights that is not finite, or
            a unit index without tokens. (A policy log-probability that is not finite shows in the loss.)
    """
    _check_tokens(policy_logprobs_T, anchor_logprobs_T=anchor_logprobs_T, advantages_T=advantages_T, weight_T=weight_T)
    counts_U = _count_units(unit_T, policy_logprobs_T)

    # Detached: whatever a caller's graph holds, the only gradient is that of policy_logprobs_T in s_t.
    log_ratio_T = (policy_logprobs_T - anchor_logprobs_T).detach()
    # An infinite ratio would make 0 * inf of the gradient of a clipped token, or of an advantage of 0.
    ratio_U = _unit_mean(log_ratio_T, unit_T, counts_U).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    advantages_T = advantages_T.detach()
    factor_T, clipped_T = trust(Ratios(log_ratio_T, unit_T, ratio_U, advantages_T))
    # One decision for value, gradient and metric: torch.minimum would halve a gradient at a tie.
    bounded_T = torch.where(clipped_T, factor_T, factor_T * _score(policy_logprobs_T))
    loss = -(weight_T.detach() * bounded_T * advantages_T).sum()
    return PolicyLoss(loss=loss, ratio_U=ratio_U, log_ratio_T=log_ratio_T, clipped_T=clipped_T)


def kl_loss(policy_logprobs_T: Tensor, *, reference_logprobs_T: Tensor, weight_T: Tensor, coefficient: float) -> Tensor:
    """KL divergence of the policy from a reference, at sampled tokens, with the gradient of the divergence itself.

        value    = coefficient * sum_t weight_t * (policy_logprob_t - reference_logprob_t)
        gradient = coefficient * sum_t weight_t * sg(policy_logprob_t - reference_logprob_t) * grad policy_logprob_t

    Over tokens sampled from the policy the value's expectation is KL(pi || ref) (the "k1" estimate) and the gradient's
    is grad KL(pi || ref) at each context visited. Back-propagation through a sampled estimate is another thing: through
    k1 it is 0 in expectation, and through k3 = exp(-d) - 1 + d it is the gradient of KL(ref || pi). A token's effect
    on the divergence of later contexts is no part of it, and tokens sampled by older weights are not reweighted.

    Shapes: `(T,)` each; returns a scalar to be added to the policy loss.

    Raises:
        ValueError: for a wrong rank, dtype or length, numbers that are not finite, or a negative coefficient.
    """
    _check_tokens(policy_logprobs_T, reference_logprobs_T=reference_logprobs_T, weight_T=weight_T)
    if not (isfinite(coefficient) and coefficient >= 0):
        raise ValueError(f"expected a finite coefficient >= 0, got {coefficient}")
    log_ratio_T = (policy_logprobs_T - reference_logprobs_T).detach()
    return coefficient * (weight_T.detach() * log_ratio_T * _score(policy_logprobs_T)).sum()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MismatchWeights:
    """Correction for an engine whose distribution differs from the trainer's under the same weights. No gradient."""

    weight_T: Tensor
    """Factor of each token, after the limit: multiply the tokens' aggregation weights by it."""
    raw_U: Tensor
    """Factor of each unit before the limit, for metrics."""
    limited_U: Tensor
    """Units whose factor the limit changed."""


def mismatch_weights(
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    unit_T: Tensor,
    *,
    mode: Literal["truncate", "mask"],
    limit: float,
) -> MismatchWeights:
    """Importance weight of each unit between the trainer's and the engine's view of the policy that sampled it.

        w_u = sg[exp(mean over the tokens of unit u of (proximal_logprob - behavior_logprob))]
        truncate: min(w_u, limit)          mask: w_u if 1 / limit <= w_u <= limit, else 0

    `proximal` are the log-probabilities that the trainer recomputes under the weights that sampled, `behavior` those
    the engine recorded. It is no part of the clipped ratio, and a masked token stays in the aggregation's denominators.

    Shapes: `(T,)` each, `unit_T` as in `policy_loss`.

    Raises:
        ValueError: for a wrong rank, dtype or length, numbers that are not finite, an unknown mode, or a limit below 1.
    """
    _check_tokens(proximal_logprobs_T, behavior_logprobs_T=behavior_logprobs_T)
    if mode not in ("truncate", "mask"):
        raise ValueError(f"expected mode 'truncate' or 'mask', got {mode!r}")
    if not limit >= 1:
        raise ValueError(f"expected a limit >= 1, the largest factor of a unit, got {limit}")
    counts_U = _count_units(unit_T, proximal_logprobs_T)
    raw_U = _unit_mean((proximal_logprobs_T - behavior_logprobs_T).detach(), unit_T, counts_U).exp()
    limited_U = raw_U > limit
    if mode == "mask":
        limited_U = limited_U | (raw_U < 1 / limit)
    factor_U = torch.where(limited_U, limit if mode == "truncate" else 0.0, raw_U)
    return MismatchWeights(weight_T=factor_U[unit_T], raw_U=raw_U, limited_U=limited_U)


def _score(logprobs_T: Tensor) -> Tensor:
    """Return 1 for each token, with the gradient of its log-probability."""
    return torch.exp(logprobs_T - logprobs_T.detach())


def _unit_mean(values_T: Tensor, unit_T: Tensor, counts_U: Tensor) -> Tensor:
    """Mean over each unit, added up in float64: the order of the tokens then leaves no trace in float32."""
    sums_U = torch.zeros(len(counts_U), dtype=torch.float64, device=values_T.device)
    return (sums_U.index_add_(0, unit_T, values_T.double()) / counts_U).to(values_T.dtype)


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
    counts_U = torch.bincount(unit_T)
    if bool((counts_U == 0).any()):
        missing = int((counts_U == 0).nonzero()[0])
        raise ValueError(
            f"expected unit_T to use every index 0..{len(counts_U) - 1}, got no token of unit {missing}; number the "
            "units of each micro-batch again with unit_index"
        )
    return counts_U


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
        if not bool(torch.isfinite(tensor).all()):
            index = int((~torch.isfinite(tensor)).nonzero()[0])
            raise ValueError(f"expected finite {name}, got {float(tensor[index])} at token {index}")
