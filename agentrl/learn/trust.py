"""Trust regions: the value and the gradient's factor of each token, and the tokens that have moved far enough.

`T` action tokens of a micro-batch, `U` ratio units. One pure function for each; nothing here carries a gradient.

A further one is a function here; in `learn/config.py` its name in `Trust`, its range in `_TRUST_CLIP` or `_WITHOUT_RANGE` and
its words in `LossConfig.describe`; and a branch of `trust_region` (`learn/micro_batch_loss.py`).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.policy.host_reads import require

_LARGEST_LOG_WEIGHT = 80.0
"""float32 ends at e^88."""
_LARGEST_RATIO = 20.0
"""Largest ratio of a token that `divergence` weighs with (the authors' code)."""


class Ratios(NamedTuple):
    """Inputs of a trust region."""

    logprobs_T: Tensor
    """policy_logprob of each token."""
    log_ratio_T: Tensor
    """policy_logprob - anchor_logprob of each token."""
    unit_T: Tensor
    """Ratio unit of each token, 0..U-1."""
    ratio_U: Tensor
    """exp of the mean log-ratio of each unit: s_u."""
    advantages_T: Tensor


class Region(NamedTuple):
    """Result of a trust region."""

    value_T: Tensor
    """v_t: the objective is the sum of weight_t A_t v_t."""
    factor_T: Tensor
    """f_t: its gradient is the sum of weight_t A_t f_t grad log pi_t; 0 for a token that has left the region."""
    clipped_T: Tensor
    """Tokens that have left the region: no gradient."""


TrustRegion = Callable[[Ratios], Region]


def unclipped(ratios: Ratios) -> Region:
    """Leave the ratio out: every token pushes alike, wherever the policy has gone.

        v_t = log pi_t,  f_t = 1

    Source: REINFORCE, Williams 1992.
    """
    return _weighted(ratios, torch.ones_like(ratios.log_ratio_T))


def fixed(ratios: Ratios, *, low: float | Tensor, high: float | Tensor) -> Region:
    """Clip the ratio of the unit, on the side to which the advantage pushes.

        v_t = f_t = s_u(t); a token leaves if A_t > 0 and s_u > 1 + high, or A_t < 0 and s_u < 1 - low: v_t is that end

    Source: PPO, arXiv 1707.06347 eq. 7, with the ratio of GSPO, arXiv 2507.18071 eq. 5.

    Args:
        ratios: of the micro-batch.
        low: width below 1, in [0, 1]; a number, or one for each token.
        high: width above 1, at least 0; likewise.

    Raises:
        ValueError: for a number out of these bounds.
    """
    _check_range(low, high)
    ratio_T = ratios.ratio_U[ratios.unit_T]
    clipped_T = _pushed_beyond(ratio_T, ratios.advantages_T, low, high)
    value_T = torch.where(clipped_T, _clamped(ratio_T, 1 - low, 1 + high), ratio_T)
    return _without(clipped_T, value_T, ratio_T)


def by_length(unit_T: Tensor, *, count_U: Tensor, low: float, high: float, length: int) -> tuple[Tensor, Tensor]:
    """Return the clip range of each token's unit, if `low` and `high` are those of a unit of `length` tokens.

        low_u = min(1, low sqrt(length / n_u)),  high_u = high sqrt(length / n_u),  n_u the tokens of unit u

    log s_u is a mean of n_u terms: its spread falls with the square root of their number, and the range with it.
    """
    width_T = (length / count_U.double()).sqrt()[unit_T]
    return (low * width_T).clamp(max=1), high * width_T


def token(ratios: Ratios, *, low: float, high: float) -> Region:
    """Weigh by the ratio of the unit; a token leaves by its own.

        v_t = f_t = s_u(t); a token leaves if A_t > 0 and r_t > 1 + high, or A_t < 0 and r_t < 1 - low

    r_t is the ratio of the token alone. The weight of a long unit is then as quiet as GSPO's, and one token that moved
    far stops alone, without the rest of its unit. In no paper: `geometric` (GMPO) is the nearest relative.

    Raises:
        ValueError: as `fixed`.
    """
    _check_range(low, high)
    ratio_T = ratios.ratio_U[ratios.unit_T]
    return _without(_pushed_beyond(ratios.log_ratio_T.exp(), ratios.advantages_T, low, high), ratio_T, ratio_T)


def geometric(ratios: Ratios, *, low: float, high: float) -> Region:
    """Weigh by the geometric mean of the unit's clipped token ratios; a token leaves by its own.

        v_t = exp(mean over the tokens of unit u of log r'_t),  r'_t = r_t clipped on the side to which A_t pushes
        f_t = v_t; a token leaves if A_t > 0 and r_t > 1 + high, or A_t < 0 and r_t < 1 - low

    Source: GMPO, arXiv 2507.20673, if the unit is the trajectory; its range is e^-0.4 to e^0.4.

    Raises:
        ValueError: as `fixed`.
    """
    _check_range(low, high)
    clipped_T = _pushed_beyond(ratios.log_ratio_T.exp(), ratios.advantages_T, low, high)
    lowest = math.log1p(-low) if low < 1 else -math.inf
    log_ratio_T = _by_sign(ratios, math.log1p(high), lowest).where(clipped_T, ratios.log_ratio_T)
    mean_U = _unit_sums(log_ratio_T, ratios) / _unit_sums(torch.ones_like(log_ratio_T), ratios)
    value_T = mean_U.clamp(-_LARGEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT).exp().to(log_ratio_T.dtype)[ratios.unit_T]
    return _without(clipped_T, value_T, value_T)


def capped(ratios: Ratios, *, low: float, high: float) -> Region:
    """Weigh by the clipped ratio of the unit; no token leaves.

        v_t = f_t log pi_t,  f_t = clip(s_u(t), 1 - low, 1 + high)

    Source: CISPO (MiniMax-M1), arXiv 2506.13585 eq. 4 and 5, if the unit is the token. It has no lower bound (low 1); its upper
    one is not published: a ratio of 5 is that of ScaleRL, arXiv 2510.13786.

    Raises:
        ValueError: as `fixed`.
    """
    _check_range(low, high)
    return _weighted(ratios, _clamped(ratios.ratio_U[ratios.unit_T], 1 - low, 1 + high))


def gated(ratios: Ratios, *, positive: float, negative: float) -> Region:
    """Weigh by a soft gate on the ratio of the unit, which closes on both sides; no token leaves.

        v_t = 4 / tau * p,  p = sigmoid(tau (s_u(t) - 1))
        f_t = 4 p (1 - p) s_u(t), the derivative of v_t by log pi_t;  tau by the sign of A_t

    Source: SAPO, arXiv 2511.20347, if the unit is the token; temperatures 1 and 1.05 are its authors'.
    """
    ratio_T = ratios.ratio_U[ratios.unit_T]
    tau_T = _by_sign(ratios, positive, negative)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    # (1 - p) s is 0 * inf at its far end, written so: the gate is closed there.
    factor_T = 4 * gate_T * torch.sigmoid(-tau_T * (ratio_T - 1)) * ratio_T
    return Region(4 / tau_T * gate_T, factor_T, torch.zeros_like(ratios.unit_T, dtype=torch.bool))


def divergence(ratios: Ratios, *, low: float, high: float, kind: Literal["tv", "kl"]) -> Region:
    """Weigh by the ratio of the unit; a token leaves by how far its probability moved, not by its ratio.

        v_t = f_t log pi_t,  f_t = min(s_u(t), 20)
        a token leaves if A_t > 0, pi_t > mu_t and D_t > high, or A_t < 0, pi_t < mu_t and D_t > low
        tv: D_t = |pi_t - mu_t|       kl: D_t = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

    mu_t and pi_t are the anchor's and the policy's probability of the token: the divergence is that of two coins.

    Source: DPPO, arXiv 2602.04879, Binary-TV and Binary-KL, if the unit is the token.

    Raises:
        ValueError: as `fixed`.
    """
    _check_range(low, high)
    policy_T, anchor_T = ratios.logprobs_T.double(), (ratios.logprobs_T - ratios.log_ratio_T).double()
    pi_T, mu_T = policy_T.exp(), anchor_T.exp()
    if kind == "tv":
        moved_T = (pi_T - mu_T).abs()
    else:
        rest_T = torch.special.xlogy(1 - mu_T, (1 - mu_T) / (1 - pi_T).clamp(min=1e-300))
        moved_T = mu_T * (anchor_T - policy_T) + rest_T
    up_T, down_T = (ratios.advantages_T > 0) & (pi_T > mu_T), (ratios.advantages_T < 0) & (pi_T < mu_T)
    clipped_T = (up_T & (moved_T > high)) | (down_T & (moved_T > low))
    value_T, factor_T, _ = _weighted(ratios, ratios.ratio_U[ratios.unit_T].clamp(max=_LARGEST_RATIO))
    return Region(value_T.masked_fill(clipped_T, 0), factor_T.masked_fill(clipped_T, 0), clipped_T)


def kernel(ratios: Ratios, *, positive: tuple[float, float], negative: tuple[float, float]) -> Region:
    """Weigh by a soft function of the unit's whole importance weight; no token leaves.

        v_t = f_t log pi_t,  f_t = W_u^c1 exp(c2 (1 - W_u)), (c1, c2) by the sign of A_t
        W_u = product over the tokens of unit u of r_t, log W_u within -80..80

    f is 1 at W = 1, largest at W = c1 / c2, and falls to 0 on both sides. The weight of a unit is a product, not a mean:
    on units of hundreds of tokens it is far from 1 after small changes.

    Source: VESPO, arXiv 2602.10693, if the unit is the trajectory; (2, 3) and (3, 2) are its authors'.
    """
    sums_U = _unit_sums(ratios.log_ratio_T, ratios)
    log_weight_T = sums_U.clamp(-_LARGEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT)[ratios.unit_T]
    exponents = torch.tensor([positive, negative], dtype=torch.float64, device=sums_U.device)
    powers_T, rates_T = exponents[(ratios.advantages_T < 0).long()].unbind(1)
    factor_T = (powers_T * log_weight_T + rates_T * (1 - log_weight_T.exp())).exp()
    return _weighted(ratios, factor_T.to(ratios.ratio_U.dtype))


def rejecting(ratios: Ratios, *, within: TrustRegion, limit: float) -> Region:
    """Take whole units out whose ratio is beyond any use, whatever the sign of their advantages.

        v_t = f_t = 0 if s_u > limit or s_u < 1 / limit; else those of `within`

    A rejected token stays in the denominators of the aggregation.

    Args:
        ratios: of the micro-batch.
        within: the trust region of the other units.
        limit: above 1.
    """
    region = within(ratios)
    rejected_T = is_rejected(ratios.ratio_U, limit)[ratios.unit_T]
    stopped_T = rejected_T & (ratios.advantages_T != 0)
    value_T, factor_T = (column_T.masked_fill(rejected_T, 0) for column_T in region[:2])
    return Region(value_T, factor_T, region.clipped_T | stopped_T)


def is_rejected(ratio_U: Tensor, limit: float) -> Tensor:
    """Return whether the ratio of each unit is beyond the limit, or below one over it."""
    return (ratio_U > limit) | (ratio_U < 1 / limit)


def _weighted(ratios: Ratios, factor_T: Tensor) -> Region:
    """Return the region of a weighted log-likelihood, which no token leaves."""
    none_T = torch.zeros_like(ratios.unit_T, dtype=torch.bool)
    return Region(factor_T * ratios.logprobs_T, factor_T, none_T)


def _by_sign(ratios: Ratios, positive: float, other: float) -> Tensor:
    """Return a number for each token: `positive` for those of positive advantage."""
    advantages_T = ratios.advantages_T
    return torch.full_like(advantages_T, other).masked_fill(advantages_T > 0, positive)


def _without(clipped_T: Tensor, value_T: Tensor, factor_T: Tensor) -> Region:
    return Region(value_T, factor_T.masked_fill(clipped_T, 0), clipped_T)


def _unit_sums(values_T: Tensor, ratios: Ratios) -> Tensor:
    """Sum over each unit, added up in float64."""
    sums_U = torch.zeros(len(ratios.ratio_U), dtype=torch.float64, device=values_T.device)
    return sums_U.index_add_(0, ratios.unit_T, values_T.double())


def _pushed_beyond(ratio_T: Tensor, advantages_T: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    return ((advantages_T > 0) & (ratio_T > 1 + high)) | ((advantages_T < 0) & (ratio_T < 1 - low))


def _clamped(values_T: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        return values_T.clamp(low, high)
    return values_T.clamp(float(low), float(high))


def _check_range(low: float | Tensor, high: float | Tensor) -> None:
    def error() -> Exception:
        return ValueError(f"expected a width below 1 in [0, 1] and one above it >= 0, got {low} and {high}")

    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low_T, high_T = torch.as_tensor(low), torch.as_tensor(high)
        require(((low_T >= 0) & (low_T <= 1)).all() & (high_T >= 0).all(), error)
    elif not (0 <= low <= 1 and high >= 0):
        raise error()
