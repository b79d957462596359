"""What a pass over weights that two processes share out keeps for its backward pass, in bfloat16.

    python -m benchmarks.sharded_precision [--layers 12] [--hidden-size 768]

Prints the weights of the model (float32, whole), and what a forward pass over 64 tokens keeps, each storage once: what the
layers computed, and copies of weights.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.learn.config import TrainConfig
from agentrl.learn.policy_state import PolicyState
from agentrl.policy.layout import lay_out
from agentrl.policy.model import Policy
from benchmarks.several import together


def held(tensors: Sequence[Tensor]) -> float:
    """Return the memory of tensors in MB, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / 2**20


def work(options: argparse.Namespace) -> tuple[float, ...]:
    """Compute a pass as one of two processes; return MB of weights, of what is kept, and of that as large as weights."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    size = options.hidden_size
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512,
            hidden_size=size,
            num_hidden_layers=options.layers,
            num_attention_heads=size // 64,
            num_key_value_heads=size // 64,
            head_dim=64,
            intermediate_size=4 * size,
            tie_word_embeddings=True,
        )
    )
    whole = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    config = TrainConfig(device="cpu", precision="bfloat16", sharding="full")
    state = PolicyState(Policy(model), accelerator=accelerator, config=config)
    inputs, _ = lay_out([np.arange(64)], "padded")
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with accelerator.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        state.wrapped(inputs, torch.arange(63), torch.arange(63), 1.0)
        return whole, held(kept), held([t for t in kept if t.numel() >= size * size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    options = parser.parse_args()
    print("| weights, MB | kept for the backward pass, MB | of it in tensors as large as weights, MB |\n|---|---|---|")
    for row in together(2, work, options):
        print(f"| {' | '.join(f'{number:.1f}' for number in row)} |")


if __name__ == "__main__":
    main()
