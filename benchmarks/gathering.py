"""Memory that processes need to tell one another of rollouts: what a step gathers, and what the first process decides.

    python -m benchmarks.gathering [--processes 2 4 6 8] [--megabytes 64]
    python -m benchmarks.gathering --sync 64
    python -m benchmarks.gathering --collectives 64 [--replicas 8]

Each process holds so many megabytes of bytes, tells all others (`all_gather`), and hears as many from the first alone
(`from_rank_zero`); printed is how far the largest resident set rises above what it was before, beyond what is returned.

`--sync`: bytes that a weight sync of a Qwen3-8B in bfloat16 gathers over so many ranks, without any (a fake process group).

`--collectives`: bytes of all collectives of a step of that model on so many ranks of a fake process group, by kind: of a pass
with its backward one, counted on a small model of the same form and scaled by the numbers of weights; and of the rollouts.
"""

import argparse
import os
import pickle
import resource
import time
from collections import Counter
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3ForCausalLM

from agentrl.distributed.processes import all_gather, from_rank_zero, is_main, num_processes
from agentrl.distributed.sharding import gather_to, shard
from agentrl.engine.base import sent_dtype
from agentrl.policy.layout import lay_out
from agentrl.policy.model import Policy
from benchmarks.scaling import played
from tests.support.qwen3 import config_of
from tests.support.several import together


def peak() -> float:
    """Return the largest resident set so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(megabytes: int, is_gathered: bool) -> tuple[float, float]:
    """Tell as one of several processes; return MB beyond what is returned, and seconds."""
    dist.init_process_group("gloo")
    content = os.urandom(megabytes * 2**20)
    all_gather([0])
    before, begin = peak(), time.perf_counter()
    kept: Any = all_gather([content]) if is_gathered else from_rank_zero(lambda: content)
    returned = megabytes * (num_processes() - 1 if is_gathered else not is_main())
    found = peak() - before - returned, time.perf_counter() - begin
    del kept
    return found


def count_sync(num_ranks: int) -> None:
    """Print what a rank that does not send the weights has part in."""
    dist.init_process_group("fake", rank=1, world_size=num_ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (num_ranks,))
    with torch.device("meta"):
        weights = Qwen3ForCausalLM(config_of("8B")).state_dict()

    def sharded(weight: Tensor) -> DTensor:
        rows = -(-len(weight) // num_ranks)
        own = torch.empty(max(0, min(rows, len(weight) - rows)), *weight.shape[1:], device="meta")
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())

    sent = ((name, sharded(weight)) for name, weight in weights.items())
    sizes = list[int]()
    with patch.object(dist, "gather", lambda own, *_, **__: sizes.append(own.nbytes)):
        for _ in gather_to(0, ((name, tensor.to(sent_dtype(name, tensor, torch.bfloat16))) for name, tensor in sent)):
            pass
    whole_gb = sum(4 * weight.numel() for weight in weights.values()) / 1e9
    print("| gathers | GB that each rank sends | GB on the rank that gets all |\n|---|---|---|")
    print(f"| each weight in float32, on every rank: {len(weights)} | {whole_gb / num_ranks:.2f} | {whole_gb:.1f} |")
    print(f"| buckets as sent: {len(sizes)} | {sum(sizes) / 1e9:.2f} | {num_ranks * sum(sizes) / 1e9:.1f} |")


class Bytes(TorchDispatchMode):
    """Counts the bytes of the largest tensor of each collective, by kind and size of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            size = max((leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), default=0)
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = dist.ProcessGroup.unbox(group).size()
            self.counts[func.__name__.partition(".")[0].strip("_"), ranks] += size
        return func(*args, **(kwargs or {}))


_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 4096,
}


def count_collectives(num_ranks: int, replicas: int) -> None:
    """Print the bytes of a step's collectives on one rank."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    with torch.device("meta"):
        whole = sum(weight.numel() for weight in Qwen3ForCausalLM(config_of("8B")).parameters())
    policy = Policy(Qwen3ForCausalLM(config_of("8B", **_SMALL)), layout="padded")
    small = sum(weight.numel() for weight in policy.parameters())
    inputs, _ = lay_out([np.arange(64)], "padded")
    cpu = torch.device("cpu")
    shard(policy, policy.model._no_split_modules, cpu, replicas=replicas, compute_dtype=torch.bfloat16)
    with Bytes() as sent:
        policy(inputs, torch.arange(63), torch.arange(63), 1.0)[0].sum().backward()
    print("| collective | ranks | GB |\n|---|---|---|")
    for (kind, ranks), size in sorted(sent.counts.items()):
        print(f"| a pass and its backward one: {kind} | {ranks} | {size * whole / small / 1e9:.2f} |")
    groups = [played(0, number, turns=16) for number in range(4)]
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    num_tokens = sum(len(turn.observation_ids) + len(turn.action_ids) for turn in turns)
    a_token = len(pickle.dumps(groups, protocol=pickle.HIGHEST_PROTOCOL)) / num_tokens
    print(f"| rollouts to the first: {a_token:.1f} bytes a token, of a million tokens | 2 | {a_token / 1e3:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--sync", type=int, metavar="RANKS")
    parser.add_argument("--collectives", type=int, metavar="RANKS")
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    if options.collectives:
        count_collectives(options.collectives, options.replicas)
        return
    if options.sync:
        count_sync(options.sync)
        return
    print("| processes | who tells | MB beyond what is returned, largest | seconds |\n|---|---|---|---|")
    for num, is_gathered in product(options.processes, (False, True)):
        found = together(num, work, options.megabytes, is_gathered)
        megabytes, seconds = (max(one) for one in zip(*found, strict=True))
        print(f"| {num} | {'all' if is_gathered else 'the first'} | {megabytes:.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
