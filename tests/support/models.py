"""Small models of several families, and rows for them."""

from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from agentrl.policy.layout.tree import IntArray
from agentrl.types import Trajectory

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 20}),
    "gemma3": (
        "Gemma3Text",
        {**SIZES, "head_dim": 8, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2": (
        "GPT2",
        {**GPT2_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 1, "bos_token_id": 1},
    ),
}
"""Family and sizes; the rows below are up to 90 tokens long, so that windows of 20 cut them."""


def tiny(name: str, *, init: float = 0.2, **changes: Any) -> Any:
    family, sizes = MODELS[name]
    return made(family, initializer_range=init, **sizes | changes)


def made(family: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))


def in_float64(model: Any) -> Any:
    """The model with nothing left that computes in float32 between float64 layers."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model.double()


class AllFloat64(TorchFunctionMode):
    """Within it, what a model of float64 weights casts to float32 (norms, routers, sinks) stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function of torch with float64 wherever float32 is named."""
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _not_float32(value) for name, value in (kwargs or {}).items()}
        return func(*map(_not_float32, args), **named)


def _not_float32(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def action_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """Log-probability of each action token, by a pass for each turn."""
    ids: list[int] = []
    found = []
    for turn in trajectory.turns:
        ids = [*(ids if turn.extends else ()), *turn.observation_ids]
        start = len(ids)
        ids += turn.action_ids
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found += [table[start + j - 1, token] for j, token in enumerate(turn.action_ids)]
    return torch.stack(found)


def branching_rows() -> list[IntArray]:
    """Forks at several depths, of forks, a row that another continues, a row twice, and one that shares nothing."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(97, size=length) for length in (90, 80, 70, 60, 30, 30, 25)]
    for row, (source, fork) in zip(rows[1:], [(0, 40), (1, 60), (0, 10), (0, 30), (4, 30), (0, 0)], strict=True):
        row[:fork] = rows[source][:fork]
    return rows
