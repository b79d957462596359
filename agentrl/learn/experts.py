"""The experts of a policy: whether they can be noted and replayed (`loss.routing_replay`), and what a step tells of them.

`J` routers of a model, `P` slots of a pass, `X` experts that each chooses at a slot.
"""

import logging
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import ConfigError, TrainingError
from agentrl.learn.plan import MicroBatch
from agentrl.learn.policy_state import PolicyState
from agentrl.policy.layout import lay_out
from agentrl.routing import UNKNOWN, changed_share, recording, replaying, routers_of

log = logging.getLogger(__name__)


def is_routed(state: PolicyState, *, must_be: bool) -> bool:
    """Tell whether the experts of the policy can be noted; a model without any has none.

    Raises:
        ConfigError: where they must be.
    """
    policy = state.policy
    model, device = policy.model, state.device
    try:
        with torch.no_grad(), recording(model) as experts:
            if has_experts := bool(routers_of(model)):
                inputs, _ = lay_out([np.zeros(2, dtype=np.int64)], policy.layout, device=device)
                slot_1 = target_1 = torch.zeros(1, dtype=torch.long, device=device)
                policy(inputs, slot_1, target_1, 1.0)
                with replaying(model, experts[0]) if must_be else nullcontext():
                    pass
    except TrainingError as error:
        if must_be:
            raise ConfigError(f"loss.routing_replay: {error}") from error
        log.info("the experts of this model are not reported: %s", error)
        return False
    if must_be and not has_experts:
        raise ConfigError(f"loss.routing_replay: {type(model).__name__} is no mixture of experts; set it to none")
    return has_experts


def expert_metrics(micro: MicroBatch, before_JPX: Tensor, after_JPX: Tensor) -> dict[str, float]:
    """Return what a step tells of the experts at the slots where trained tokens are read, of one pass.

    Args:
        micro: the pass.
        before_JPX: what the policy itself chose before the first update.
        after_JPX: what it chose after it.
    """
    slots_Q = micro.slot_T
    metrics = {"moe/changed_experts": float(changed_share(before_JPX, after_JPX, slots_Q=slots_Q).mean())}
    if micro.experts_JPX is not None:
        told_JPX = micro.experts_JPX.to(before_JPX)
        is_told_Q = (told_JPX[:, slots_Q] != UNKNOWN).all(-1).all(0)
        metrics["moe/told"] = float(is_told_Q.double().mean())
        if is_told_Q.any():
            unlike_Q = changed_share(told_JPX, before_JPX, slots_Q=slots_Q[is_told_Q])
            metrics["moe/unlike_engine"] = float(unlike_Q.mean())
    return metrics
