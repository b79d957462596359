"""What `train.bfloat16_copy` saves and costs in one pass, beside autocast: a JSON line for each model.

    python -m benchmarks.bfloat16_copy

Random tokens, one row, the mean log-probability weighted from -1 to 1. `calls` of ATen in forward and backward, a pass after
the first of a minibatch, with gradient checkpointing: all, those that are no views, and casts. `rounding`: mean |difference|
of log-probabilities from a float32 pass, and the gradient's difference as a share of its norm. `to_engine`: the mean
|difference| from the same model held in bfloat16 without autocast, as an engine computes.
"""

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.models.gguf import SMOLLM2, gguf_folder
from agentrl.policy.layout import lay_out
from agentrl.policy.model import Policy, checkpoint_layers

VIEWS = (
    "view",
    "t",
    "transpose",
    "expand",
    "_unsafe_view",
    "slice",
    "unsqueeze",
    "detach",
    "alias",
    "select",
    "permute",
)
MODELS = {"8 layers of 256": (8, 256, 512), "28 layers of 64": (28, 64, 128), SMOLLM2: (0, 0, 128)}
"""Layers, hidden size and tokens."""


class Calls(TorchDispatchMode):
    """Counts calls of ATen by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function of torch."""
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def counts(self) -> list[int]:
        """Return how many there were, how many were no views, and how many casts."""
        others = sum(count for name, count in self.found.items() if name not in VIEWS)
        return [self.found.total(), others, self.found["_to_copy"]]


def make_model(name: str) -> Any:
    layers, width, _ = MODELS[name]
    if name == SMOLLM2:
        return AutoModelForCausalLM.from_pretrained(str(gguf_folder(name, field="model")), dtype=torch.float32)
    torch.manual_seed(0)
    heads: dict[str, Any] = {
        "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 128),
        "head_dim": 64,
    }
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "vocab_size": 2048,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True))


def run(policy: Policy, weights: list[Tensor], ids: Tensor, *, is_half: bool) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and the whole gradient of one pass."""
    for weight in weights:
        weight.grad = None
    inputs, _ = lay_out([ids.numpy()], "padded")
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        logprobs_T, _ = policy(inputs, torch.arange(len(ids) - 1), ids[1:], 1.0)
    (logprobs_T * torch.linspace(-1, 1, len(logprobs_T))).sum().backward()
    return logprobs_T.detach(), torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])


def measure(name: str) -> dict[str, Any]:
    model = make_model(name).train()
    checkpoint_layers(model, every=1)
    policy = Policy(model)
    weights: list[Tensor] = list(policy.parameters())  # which the copy replaces for a while
    ids = torch.from_numpy(np.random.default_rng(0).integers(2000, size=MODELS[name][2]))
    exact_T, exact = run(policy, weights, ids, is_half=False)
    engine = Policy(copy.deepcopy(model).to(torch.bfloat16).eval()).requires_grad_(False)
    with torch.no_grad():
        inputs, _ = lay_out([ids.numpy()], "padded")
        engine_T, _ = engine(inputs, torch.arange(len(ids) - 1), ids[1:], 1.0)
    found: dict[str, Any] = {"model": name, "tokens": len(ids)}
    for kind, policy.has_copy in (("autocast", False), ("copy", True)):
        with policy.rounding():
            run(policy, weights, ids, is_half=True)
            with Calls() as calls:
                logprobs_T, gradient = run(policy, weights, ids, is_half=True)
        found[kind] = {
            "calls": calls.counts(),
            "rounding": [float((logprobs_T - exact_T).abs().mean()), float((gradient - exact).norm() / exact.norm())],
            "to_engine": float((logprobs_T - engine_T).abs().mean()),
        }
    return found


if __name__ == "__main__":
    for each in MODELS:
        print(json.dumps(measure(each)), flush=True)
