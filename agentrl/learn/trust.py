"""Trust regions: the factor of each token's gradient, and the tokens that have moved far enough.

`T` action tokens of a micro-batch, `U` ratio units. One pure function for each; nothing here carries a gradient.

A further one is a function here, its name in `Trust` and its words in `LossConfig.describe_ratio` (`learn/config.py`), and a
branch of `trust_region` (`learn/micro_batch_loss.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST_LOG_WEIGHT = 80.0
"""float32 ends at e^88."""


class Ratios(NamedTuple):
    """Inputs of a trust region."""

    log_ratio_T: Tensor
    """policy_logprob - anchor_logprob of each token."""
    unit_T: Tensor
    """Ratio unit of each token, 0..U-1."""
    ratio_U: Tensor
    """exp of the mean log-ratio of each unit: s_u."""
    advantages_T: Tensor


class Region(NamedTuple):
    """Result of a trust region."""

    factor_T: Tensor
    """f_t: the gradient of the objective is the sum of weight_t A_t f_t grad log pi_t over the tokens that are left."""
    clipped_T: Tensor
    """Tokens that have left the region: no gradient."""


TrustRegion = Callable[[Ratios], Region]


def fixed(ratios: Ratios, *, low: float | Tensor, high: float | Tensor) -> Region:
    """Clip the ratio of the unit, on the side to which the advantage pushes.

        f_t = s_u(t); a token leaves if A_t > 0 and s_u > 1 + high, or A_t < 0 and s_u < 1 - low

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
    return Region(torch.where(clipped_T, _clamped(ratio_T, 1 - low, 1 + high), ratio_T), clipped_T)


def token(ratios: Ratios, *, low: float, high: float) -> Region:
    """Weigh by the ratio of the unit; a token leaves by its own.

        f_t = s_u(t); a token leaves if A_t > 0 and r_t > 1 + high, or A_t < 0 and r_t < 1 - low

    r_t is the ratio of the token alone. The weight of a long unit is then as quiet as GSPO's, and one token that moved
    far stops alone, without the rest of its unit.

    Raises:
        ValueError: as `fixed`.
    """
    _check_range(low, high)
    return Region(
        ratios.ratio_U[ratios.unit_T], _pushed_beyond(ratios.log_ratio_T.exp(), ratios.advantages_T, low, high)
    )


def kernel(ratios: Ratios, *, positive: tuple[float, float], negative: tuple[float, float]) -> Region:
    """Weigh by a soft function of the unit's whole importance weight; no token leaves.

        W_u = product over the tokens of unit u of r_t, log W_u within -80..80
        f_t = W_u^c1 exp(c2 (1 - W_u)), (c1, c2) by the sign of A_t

    f is 1 at W = 1, largest at W = c1 / c2, and falls to 0 on both sides. The weight of a unit is a product, not a mean:
    on units of hundreds of tokens it is far from 1 after small changes.

    Source: VESPO, arXiv 2602.10693, if the unit is the trajectory; (2, 3) and (3, 2) are its authors'.
    """
    sums_U = torch.zeros(len(ratios.ratio_U), dtype=torch.float64, device=ratios.ratio_U.device)
    sums_U.index_add_(0, ratios.unit_T, ratios.log_ratio_T.double())
    log_weight_T = sums_U.clamp(-_LARGEST_LOG_WEIGHT, _LARGEST_LOG_WEIGHT)[ratios.unit_T]
    exponents = torch.tensor([positive, negative], dtype=torch.float64, device=sums_U.device)
    powers_T, rates_T = exponents[(ratios.advantages_T < 0).long()].unbind(1)
    factor_T = (powers_T * log_weight_T + rates_T * (1 - log_weight_T.exp())).exp()
    return Region(factor_T.to(ratios.ratio_U.dtype), torch.zeros_like(ratios.unit_T, dtype=torch.bool))


def rejecting(ratios: Ratios, *, within: TrustRegion, limit: float) -> Region:
    """Take whole units out whose ratio is beyond any use, whatever the sign of their advantages.

        f_t = 0 if s_u > limit or s_u < 1 / limit; else that of `within`

    A rejected token stays in the denominators of the aggregation.

    Args:
        ratios: of the micro-batch.
        within: the trust region of the other units.
        limit: above 1.
    """
    region = within(ratios)
    rejected_T = is_rejected(ratios.ratio_U, limit)[ratios.unit_T]
    stopped_T = rejected_T & (ratios.advantages_T != 0)
    return Region(region.factor_T.masked_fill(rejected_T, 0), region.clipped_T | stopped_T)


def is_rejected(ratio_U: Tensor, limit: float) -> Tensor:
    """Return whether the ratio of each unit is beyond the limit, or below one over it."""
    return (ratio_U > limit) | (ratio_U < 1 / limit)


def _pushed_beyond(ratio_T: Tensor, advantages_T: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    return ((advantages_T > 0) & (ratio_T > 1 + high)) | ((advantages_T < 0) & (ratio_T < 1 - low))


def _clamped(values_T: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        return values_T.clamp(low, high)
    return values_T.clamp(float(low), float(high))


def _check_range(low: float | Tensor, high: float | Tensor) -> None:
    low_T, high_T = torch.as_tensor(low), torch.as_tensor(high)
    if not bool(((low_T >= 0) & (low_T <= 1)).all() and (high_T >= 0).all()):
        raise ValueError(f"expected a width below 1 in [0, 1] and one above it >= 0, got {low} and {high}")
