"""Memory that processes need to tell one another of rollouts: what a step gathers, and what the first process decides.

    python -m benchmarks.gathering [--processes 2 4 6 8] [--megabytes 64]
    python -m benchmarks.gathering --sync 64

Each process holds so many megabytes of bytes, tells all others (`all_gather`), and hears as many from the first alone
(`from_rank_zero`); printed is how far the largest resident set rises above what it was before, beyond what is returned.

`--sync`: bytes that a weight sync of a Qwen3-8B in bfloat16 gathers over so many ranks, without any (a fake process group).
"""

import argparse
import os
import resource
import time
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3ForCausalLM

from agentrl.distributed.processes import all_gather, from_rank_zero, is_main, num_processes
from agentrl.distributed.sharding import gather_to
from agentrl.engine.base import sent_dtype
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--sync", type=int, metavar="RANKS")
    options = parser.parse_args()
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
