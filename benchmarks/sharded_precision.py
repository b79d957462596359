"""What a pass over weights that two processes share out keeps for its backward pass, in bfloat16.

    python -m benchmarks.sharded_precision [--layers 12] [--hidden-size 768]

Prints the weights of the model (float32, whole), and what a forward pass over 64 tokens keeps, each storage once: what the
layers computed, and copies of weights.
"""

import argparse
import multiprocessing
import os
import socket
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.learn.policy_state import PolicyState
from agentrl.learn.train_config import TrainConfig
from agentrl.policy.layout import lay_out
from agentrl.policy.model import Policy


def held(tensors: Sequence[Tensor]) -> float:
    """Return the memory of tensors in MB, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / 2**20


def work(rank: int, port: int, options: argparse.Namespace, told: "SimpleQueue[Any]") -> None:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {k: str(v) for k, v in who.items()}
    torch.set_num_threads(1)
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
        told.put((whole, held(kept), held([t for t in kept if t.numel() >= size * size])))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told: SimpleQueue[Any] = context.SimpleQueue()
    processes = [context.Process(target=work, args=(rank, port, options, told)) for rank in range(2)]
    for process in processes:
        process.start()
    print("| weights, MB | kept for the backward pass, MB | of it in tensors as large as weights, MB |\n|---|---|---|")
    for row in [told.get() for _ in processes]:
        print(f"| {' | '.join(f'{number:.1f}' for number in row)} |")
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
