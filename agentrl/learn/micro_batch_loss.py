"""The loss of one micro-batch as a recipe's loss section puts it together, and what it shows.

`T` trained tokens of the micro-batch, `U` ratio units.
"""

from torch import Tensor

from agentrl.learn.batch import LossColumns
from agentrl.learn.loss import LossConfig, kl_loss, mismatch_weights, policy_loss
from agentrl.learn.metrics import Tally


def micro_batch_loss(
    policy_logprobs_T: Tensor,
    columns: LossColumns,
    *,
    config: LossConfig,
    tally: Tally,
    proximal_logprobs_T: Tensor | None = None,
    reference_logprobs_T: Tensor | None = None,
) -> Tensor:
    """Return a micro-batch's share of the loss of its global batch, and add what it shows to the tally.

    Args:
        policy_logprobs_T: with a gradient.
        columns: of the micro-batch.
        config: ratio, clip, corrections.
        tally: of the minibatch.
        proximal_logprobs_T: those before the first update. None: the policy has not been updated yet, and they are its own.
        reference_logprobs_T: the KL target's. None: no divergence is added.
    """
    weight_T, anchor_T = columns.weight_T, columns.behavior_T
    if config.anchor == "recomputed":
        anchor_T = policy_logprobs_T.detach() if proximal_logprobs_T is None else proximal_logprobs_T
    if config.mismatch != "off":
        mismatch = mismatch_weights(
            anchor_T, columns.behavior_T, columns.unit_T, mode=config.mismatch, limit=config.mismatch_limit
        )
        weight_T = weight_T * mismatch.weight_T
        tally.add(mismatch_U=mismatch.raw_U, limited_U=mismatch.limited_U)
    clip_low, clip_high = config.clip_range()
    result = policy_loss(
        policy_logprobs_T,
        anchor_logprobs_T=anchor_T,
        advantages_T=columns.advantage_T,
        unit_T=columns.unit_T,
        weight_T=weight_T,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    loss = result.loss
    if reference_logprobs_T is not None:
        loss = loss + kl_loss(
            policy_logprobs_T,
            reference_logprobs_T=reference_logprobs_T,
            weight_T=columns.weight_T,
            coefficient=config.kl_coefficient,
        )
        tally.add(reference_kl_T=policy_logprobs_T - reference_logprobs_T)
    tally.add(
        ratio_U=result.ratio_U,
        clipped_T=result.clipped_T,
        advantage_T=columns.advantage_T,
        unit_T=columns.unit_T,
        log_ratio_T=result.log_ratio_T,
        engine_difference_T=policy_logprobs_T - columns.behavior_T,
        version_T=columns.version_T,
    )
    tally.loss += float(loss.detach())
    return loss
