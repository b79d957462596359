"""What each process of a run samples, and on which engine."""

import copy
from pathlib import Path
from typing import Any

import torch

from agentrl.config import Recipe
from agentrl.engine import Engine
from agentrl.engine.idle import IdleEngine
from agentrl.engine.transformers import TransformersEngine
from agentrl.engine.vllm import VLLMEngine, is_installed
from agentrl.engine.vllm_server import VLLMServer
from agentrl.errors import ConfigError
from agentrl.rollout import Share

_LARGE = 10_000_000
"""Parameters from which on vLLM outruns the transformers engine on a CPU (benchmarks/vllm_throughput.py)."""


def share_of(recipe: Recipe, process: int, count: int) -> Share:
    """Deal the tasks out to the processes that have an engine.

    Raises:
        ConfigError: where they cannot be dealt out.
    """
    num_groups = recipe.rollout.num_groups
    if recipe.engine.name == "vllm_server":
        urls = len(recipe.engine.server.urls)
        if urls > count:
            raise ConfigError(f"engine.server.url: {urls} servers for {count} training processes; each serves one")
        count = urls
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
        model: of which it gets a copy.
        device: where it is.
        handover: folder in which weights are handed to a server, where the recipe names none.

    Raises:
        ConfigError: where it cannot be had.
    """
    dtype = torch.bfloat16 if recipe.train.precision == "bfloat16" else model.dtype
    is_auto_of_many = recipe.engine.name == "auto" and share.stride > 1  # where vLLM cannot be
    name, config = "transformers" if is_auto_of_many else engine_name(recipe, model, device), recipe.engine
    if config.lockstep is None:
        config = config.model_copy(update={"lockstep": recipe.rollout.repeats_exactly})
    if name not in ("vllm", "vllm_server") and config.vllm:
        raise ConfigError(f"engine.vllm: {sorted(config.vllm)} are of no use to engine.name: {name}; remove them")
    if name != "vllm" and config.sleep:
        raise ConfigError(
            f"engine.sleep: only vLLM in the trainer's process sleeps, not engine.name: {name}; set it to false"
        )
    if config.sleep and recipe.rollout.samples_during_update:
        raise ConfigError(
            "engine.sleep: rollout.mode: async samples while the policy is updated; set engine.sleep to false"
        )
    if not share.num_groups:
        return IdleEngine()
    if name == "vllm_server":
        server = config.server.model_copy(update={"url": config.server.urls[share.first]})
        return VLLMServer(config.model_copy(update={"server": server}), folder=server.folder or handover)
    if name == "vllm" and share.stride > 1:
        raise ConfigError(
            "engine.name: vllm runs within one process only; with several start a server for each, or for some of them, and "
            "set engine.name: vllm_server and engine.server.url"
        )
    if name == "vllm":
        return VLLMEngine(model, config, dtype=dtype, max_tokens=recipe.rollout.max_context_tokens)
    return TransformersEngine(copy.deepcopy(model).to(device, dtype), config)


def engine_name(recipe: Recipe, model: Any, device: torch.device) -> str:
    """Return the recipe's engine; where it leaves the choice, vLLM on a GPU, and on a CPU what was measured to be faster."""
    if recipe.engine.name != "auto":
        return recipe.engine.name
    if not is_installed():
        return "transformers"
    if device.type == "cuda":
        return "vllm"
    # Heads of less than 32 are beyond vLLM on a CPU.
    is_large = sum(parameter.numel() for parameter in model.parameters()) >= _LARGE
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    return "vllm" if is_large and head_dim >= 32 else "transformers"
