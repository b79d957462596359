"""What each process of a run samples, and on which engine."""

from pathlib import Path
from typing import Any

import torch

from agentrl.config import Recipe
from agentrl.engine import Engine, EngineContext
from agentrl.engine.idle import IdleEngine
from agentrl.errors import ConfigError, TrainingError
from agentrl.routing import experts_of
from agentrl.types import Share


def share_of(recipe: Recipe, process: int, count: int) -> Share:
    """Deal the tasks out to the processes that have an engine.

    Raises:
        ConfigError: where they cannot be dealt out.
    """
    num_groups, count = recipe.rollout.num_groups, recipe.engine.num_sampling(count)
    if num_groups % count:
        raise ConfigError(
            f"rollout.num_groups: {num_groups} cannot be dealt out to {count} processes; set it to a multiple of {count}"
        )
    return Share(num_groups // count, process, count) if process < count else Share(0)


def new_engine(recipe: Recipe, share: Share, model: Any, device: torch.device, *, handover: Path) -> Engine:
    """Make the engine of a process; weights are pushed to it when the run begins.

    Args:
        recipe: names it.
        share: what the process collects.
        model: in training; the engine copies it, or reads its form.
        device: where it is going to be.
        handover: folder for weights on their way to another process.

    Raises:
        ConfigError: where it cannot be had.
    """
    tells_experts = recipe.loss.routing_replay == "engine"
    if tells_experts:
        try:
            experts_of(model)
        except TrainingError as error:
            raise ConfigError(f"loss.routing_replay: {error}; set it to none") from error
    if not share.num_groups:
        return IdleEngine()
    context = EngineContext(
        model=model,
        device=device,
        dtype=torch.bfloat16 if recipe.train.precision == "bfloat16" else model.dtype,
        share=share,
        handover=handover,
        max_context_tokens=recipe.rollout.max_context_tokens,
        repeats_exactly=recipe.rollout.repeats_exactly,
        samples_during_update=recipe.rollout.samples_during_update,
        tells_experts=tells_experts,
    )
    return recipe.engine.build(context)
