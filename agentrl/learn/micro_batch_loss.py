"""The loss of one micro-batch as a recipe's loss section puts it together, and what it shows.

`T` trained tokens of the micro-batch, `U` ratio units; `P` slots of its pass, `J` routers of a mixture of experts, `X`
experts that each chooses at a slot.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.learn.batch import LossColumns
from agentrl.learn.calibration import Calibration, ClipTarget, units_of
from agentrl.learn.config import KernelConfig, LossConfig
from agentrl.learn.loss import kl_loss, mismatch_weights, policy_loss
from agentrl.learn.metrics import Observations
from agentrl.learn.trust import TrustRegion, fixed, is_rejected, kernel, rejecting, token


class StaleTokens(NamedTuple):
    """Tokens that earlier versions sampled, with log-probabilities under the weights of those versions."""

    is_stale_T: Tensor
    logprobs_T: Tensor
    """Of the others, whatever."""


class AnchorState(NamedTuple):
    """A pass's outcome before the first update, as far as the anchor needs it."""

    logprobs_T: Tensor | None = None
    """None: the policy has not been updated yet, and they are its own."""
    stale: StaleTokens | None = None
    is_start: bool = False
    """The policy has not been updated yet, so that nothing has moved, whatever the anchor is."""
    experts_JPX: Tensor | None = None
    """Of the model's J routers at each slot, in a mixture of experts."""


def micro_batch_loss(
    policy_logprobs_T: Tensor,
    columns: LossColumns,
    *,
    config: LossConfig,
    observations: Observations,
    trust: TrustRegion,
    anchor: AnchorState,
    version: int,
    reference_logprobs_T: Tensor | None = None,
) -> Tensor:
    """Return a micro-batch's share of the loss of its global batch, and add what it shows to the observations.

    Args:
        policy_logprobs_T: with a gradient.
        columns: of the micro-batch.
        config: ratio, clip, corrections.
        observations: of the minibatch.
        trust: of the micro-batch (`trust_region`).
        anchor: log-probabilities before the first update.
        version: of the policy that is updated.
        reference_logprobs_T: the KL target's. None: no divergence is added.
    """
    weight_T, anchor_T = columns.weight_T, columns.behavior_T
    if config.anchor != "behavior":
        anchor_T = policy_logprobs_T.detach() if anchor.logprobs_T is None else anchor.logprobs_T
        if anchor.stale is not None:
            anchor_T = torch.where(anchor.stale.is_stale_T, anchor.stale.logprobs_T, anchor_T)
    if config.mismatch != "off":
        mismatch = mismatch_weights(
            anchor_T, columns.behavior_T, columns.unit_T, mode=config.mismatch, limit=config.mismatch_limit
        )
        weight_T = weight_T * mismatch.weight_T
        observations.add(mismatch_U=mismatch.raw_U, limited_U=mismatch.limited_U)
    result = policy_loss(
        policy_logprobs_T,
        anchor_logprobs_T=anchor_T,
        advantages_T=columns.advantage_T,
        unit_T=columns.unit_T,
        weight_T=weight_T,
        trust=trust,
    )
    loss = result.loss
    if reference_logprobs_T is not None:
        loss = loss + kl_loss(
            policy_logprobs_T,
            reference_logprobs_T=reference_logprobs_T,
            weight_T=columns.weight_T,
            coefficient=config.kl_coefficient,
        )
        observations.add(reference_kl_T=policy_logprobs_T - reference_logprobs_T)
    if config.reject is not None:
        observations.add(rejected_U=is_rejected(result.ratio_U, config.reject))
    if anchor.logprobs_T is not None:
        moved_T = policy_logprobs_T.detach() - anchor.logprobs_T
    elif anchor.is_start:
        moved_T = torch.zeros_like(result.log_ratio_T)
    else:  # the part of the tokens that the present version sampled
        moved_T = torch.where(columns.version_T == version, result.log_ratio_T, torch.nan)
    observations.add(
        ratio_U=result.ratio_U,
        clipped_T=result.clipped_T,
        advantage_T=columns.advantage_T,
        unit_T=columns.unit_T,
        log_ratio_T=result.log_ratio_T,
        moved_T=moved_T,
        engine_difference_T=policy_logprobs_T - columns.behavior_T,
        version_T=columns.version_T,
        trajectory_T=columns.trajectory_T,
    )
    observations.loss += float(loss.detach())
    return loss


def trust_region(config: LossConfig, columns: LossColumns, *, calibration: Calibration, version: int) -> TrustRegion:
    """Return the trust region that a recipe asks for.

    Args:
        config: which, and its settings.
        columns: of the micro-batch.
        calibration: what `trust: calibrated` measured so far.
        version: of the policy that is updated.
    """
    low, high = config.clip_range()
    region = partial(fixed, low=low, high=high)
    if config.trust == "calibrated":
        units = units_of(columns.unit_T.cpu().numpy(), (version - columns.version_T).cpu().numpy())
        down_U, up_U = (
            torch.from_numpy(width_U).to(columns.weight_T)
            for width_U in calibration.widths(units, ClipTarget.from_config(config))
        )
        region = partial(fixed, low=-torch.expm1(-down_U)[columns.unit_T], high=torch.expm1(up_U)[columns.unit_T])
    elif config.trust == "token":
        region = partial(token, low=low, high=high)
    elif config.trust == "kernel":
        exponents = config.kernel or KernelConfig()
        region = partial(kernel, positive=exponents.positive, negative=exponents.negative)
    return region if config.reject is None else partial(rejecting, within=region, limit=config.reject)
