"""Loss of one micro-batch as a recipe's loss section composes it, and the observations for metrics.

`T` trained tokens of the micro-batch, `U` ratio units; `P` slots of its pass, `J` routers of a mixture of experts, `X`
experts that each chooses at a slot.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.learn import trust as regions
from agentrl.learn.batch import LossColumns
from agentrl.learn.calibration import Calibration, ClipTarget, units_of
from agentrl.learn.config import GateConfig, KernelConfig, LossConfig
from agentrl.learn.loss import (
    covariance_penalty,
    kl_loss,
    mismatch_weights,
    nll_loss,
    off_policy_keep,
    policy_loss,
)
from agentrl.learn.metrics import Observations
from agentrl.learn.trust import TrustRegion, is_rejected
from agentrl.policy.host_reads import read


class StaleTokens(NamedTuple):
    """Tokens that earlier versions sampled, with log-probabilities under the weights of those versions."""

    is_stale_T: Tensor
    logprobs_T: Tensor
    """Arbitrary for tokens that are not stale."""


class AnchorState(NamedTuple):
    """State of a pass before the first update, as far as the anchor needs it."""

    logprobs_T: Tensor | None = None
    """None: the policy has not been updated yet, so its own log-probabilities are the anchor's."""
    stale: StaleTokens | None = None
    is_start: bool = False
    """Whether the policy has not been updated yet: then no token has moved, whatever the anchor is."""
    experts_JPX: Tensor | None = None
    """Experts that each router of a mixture of experts chose at each slot."""


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
    entropy_T: Tensor | None = None,
) -> Tensor:
    """Return a micro-batch's share of the loss of its global batch, and record its observations.

    Args:
        policy_logprobs_T: log-probabilities under the policy, with a gradient.
        columns: tokens of the micro-batch.
        config: ratio, clip, corrections.
        observations: record of the minibatch, extended in place.
        trust: trust region of the micro-batch (`trust_region`).
        anchor: log-probabilities before the first update.
        version: version of the policy before the step.
        reference_logprobs_T: log-probabilities under the reference policy. None: no KL loss.
        entropy_T: entropies of the tokens' distributions, with a gradient. None: no bonus for them.
    """
    anchor_T = columns.behavior_T if config.anchor == "behavior" else _anchor_logprobs(policy_logprobs_T, anchor)
    result = policy_loss(
        policy_logprobs_T,
        anchor_logprobs_T=anchor_T,
        advantages_T=columns.advantage_T,
        unit_T=columns.unit_T,
        weight_T=_corrected_weights(policy_logprobs_T, anchor_T, columns, config, observations),
        trust=trust,
        count_U=columns.count_U,
    )
    loss = result.loss + _imitation(policy_logprobs_T, columns, config, observations)
    if reference_logprobs_T is not None and config.kl_estimator != "k1_reward":
        loss = loss + kl_loss(
            policy_logprobs_T,
            reference_logprobs_T=reference_logprobs_T,
            weight_T=columns.weight_T,
            coefficient=config.kl_coefficient,
            estimator=config.kl_estimator,
            anchor_logprobs_T=anchor_T,
        )
        observations.add(reference_kl_T=policy_logprobs_T - reference_logprobs_T)
    if entropy_T is not None:
        loss = loss - config.entropy_coefficient * (columns.weight_T * entropy_T).sum()
    if config.covariance is not None and config.covariance.rule == "kl" and columns.selected_T is not None:
        loss = loss + covariance_penalty(
            policy_logprobs_T,
            anchor_logprobs_T=anchor_T,
            weight_T=columns.weight_T,
            selected_T=columns.selected_T,
            coefficient=config.covariance.coefficient,
        )
    if config.reject is not None:
        observations.add(rejected_U=is_rejected(result.ratio_U, config.reject))
    observations.add(
        ratio_U=result.ratio_U,
        clipped_T=result.clipped_T,
        advantage_T=columns.advantage_T,
        unit_T=columns.unit_T,
        log_ratio_T=result.log_ratio_T,
        moved_T=policy_change(policy_logprobs_T, anchor, result.log_ratio_T, columns.version_T == version),
        engine_difference_T=policy_logprobs_T - columns.behavior_T,
        version_T=columns.version_T,
        trajectory_T=columns.trajectory_T,
    )
    read(loss, observations.add_loss)
    return loss


def _imitation(
    policy_logprobs_T: Tensor, columns: LossColumns, config: LossConfig, observations: Observations
) -> Tensor:
    """Return the terms of the loss that draw the policy to successful episodes and to a teacher."""
    loss = policy_logprobs_T.new_zeros(())
    if config.nll is not None and columns.nll_weight_T is not None:
        loss = loss + nll_loss(policy_logprobs_T, weight_T=columns.nll_weight_T, coefficient=config.nll.coefficient)
        observations.add(nll_T=torch.where(columns.nll_weight_T > 0, -policy_logprobs_T, torch.nan))
    if columns.teacher_T is not None:
        loss = loss + kl_loss(
            policy_logprobs_T,
            reference_logprobs_T=columns.teacher_T,
            weight_T=columns.weight_T,
            coefficient=config.distill_coefficient,
        )
        observations.add(teacher_kl_T=policy_logprobs_T - columns.teacher_T)
    return loss


def _anchor_logprobs(policy_logprobs_T: Tensor, anchor: AnchorState) -> Tensor:
    """Return the log-probabilities before the first update; those of stale tokens under the weights that sampled them."""
    anchor_T = policy_logprobs_T.detach() if anchor.logprobs_T is None else anchor.logprobs_T
    if anchor.stale is None:
        return anchor_T
    return torch.where(anchor.stale.is_stale_T, anchor.stale.logprobs_T, anchor_T)


def _corrected_weights(
    policy_logprobs_T: Tensor,
    anchor_T: Tensor,
    columns: LossColumns,
    config: LossConfig,
    observations: Observations,
) -> Tensor:
    """Return the tokens' weights in the policy loss: corrected for mismatch, and 0 for what has no part in it."""
    weight_T = columns.weight_T
    if columns.selected_T is not None:
        observations.add(selected_T=columns.selected_T)
        if config.covariance is not None and config.covariance.rule == "clip":
            weight_T = weight_T * ~columns.selected_T
    if config.off_policy_limit is not None:
        keep_T = off_policy_keep(
            policy_logprobs_T,
            columns.behavior_T,
            columns.advantage_T,
            columns.trajectory_T,
            limit=config.off_policy_limit,
        )
        observations.add(off_policy_T=~keep_T)
        weight_T = weight_T * keep_T
    if config.mismatch == "off":
        return weight_T
    unit_T, count_U = columns.unit_T, columns.count_U
    if config.mismatch_level == "product":  # of the whole trajectory, whatever the ratio's unit
        _, unit_T, count_U = torch.unique(columns.trajectory_T, return_inverse=True, return_counts=True)
    mismatch = mismatch_weights(
        anchor_T,
        columns.behavior_T,
        unit_T,
        mode=config.mismatch,
        limit=config.mismatch_limit,
        level=config.mismatch_level,
        count_U=count_U,
    )
    observations.add(mismatch_U=mismatch.raw_U, limited_U=mismatch.limited_U)
    return weight_T * mismatch.weight_T


def policy_change(policy_logprobs_T: Tensor, anchor: AnchorState, log_ratio_T: Tensor, is_fresh_T: Tensor) -> Tensor:
    """Return the change of log-probabilities since the step began; nan for tokens of which it is not known."""
    if anchor.logprobs_T is not None:
        return policy_logprobs_T.detach() - anchor.logprobs_T
    if anchor.is_start:
        return torch.zeros_like(log_ratio_T)
    return torch.where(is_fresh_T, log_ratio_T, torch.nan)


def trust_region(config: LossConfig, columns: LossColumns, *, calibration: Calibration, version: int) -> TrustRegion:
    """Return the trust region that a recipe configures.

    Args:
        config: kind of the trust region, and its settings.
        columns: tokens of the micro-batch.
        calibration: measurements of `trust: calibrated` so far.
        version: version of the policy before the step.
    """
    low, high = config.clip_range()
    match config.trust:
        case "fixed" if config.clip_by_length is not None:
            low_T, high_T = regions.by_length(
                columns.unit_T, count_U=columns.count_U, low=low, high=high, length=config.clip_by_length
            )
            region: TrustRegion = partial(
                regions.fixed, low=low_T.to(columns.weight_T), high=high_T.to(columns.weight_T)
            )
        case "calibrated":
            units = units_of(columns.unit_T.cpu().numpy(), (version - columns.version_T).cpu().numpy())
            down_U, up_U = (
                torch.from_numpy(width_U).to(columns.weight_T)
                for width_U in calibration.widths(units, ClipTarget.from_config(config))
            )
            low_T, high_T = -torch.expm1(-down_U)[columns.unit_T], torch.expm1(up_U)[columns.unit_T]
            region = partial(regions.fixed, low=low_T, high=high_T)
        case "gate":
            gate = config.gate or GateConfig()
            region = partial(regions.gated, positive=gate.positive, negative=gate.negative)
        case "kernel":
            exponents = config.kernel or KernelConfig()
            region = partial(regions.kernel, positive=exponents.positive, negative=exponents.negative)
        case "none":
            region = regions.unclipped
        case "tv" | "kl" as kind:
            region = partial(regions.divergence, low=low, high=high, kind=kind)
        case _:
            clipped = {
                "fixed": regions.fixed,
                "token": regions.token,
                "geometric": regions.geometric,
                "cap": regions.capped,
            }
            region = partial(clipped[config.trust], low=low, high=high)
    return region if config.reject is None else partial(regions.rejecting, within=region, limit=config.reject)
