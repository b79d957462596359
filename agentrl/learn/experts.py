"""Whether the experts of a policy can be noted and replayed (`loss.routing_replay`)."""

import logging
from contextlib import nullcontext

import numpy as np
import torch

from agentrl.errors import ConfigError, TrainingError
from agentrl.learn.policy_state import PolicyState
from agentrl.policy.layout import lay_out
from agentrl.policy.routing import recording, replaying, routers_of

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
        raise ConfigError(f"loss.routing_replay: {type(model).__name__} is no mixture of experts; set it to false")
    return has_experts
