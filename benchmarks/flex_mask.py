"""What FlexAttention's block mask of a token tree costs: seconds and memory, from the tree's segments and from all pairs.

    python -m benchmarks.flex_mask [--tokens 4096 16384 32768] [--pairs-up-to 16384]

A tree of one prompt and eight branches; each measurement in a process of its own. `all pairs` is torch's `create_block_mask`.
"""

import argparse
import multiprocessing
import resource
import time
from typing import Any

import numpy as np
import torch

from agentrl.policy.layout.tree import plan_tree
from agentrl.policy.layout.tree_attention import TreeLayout

BRANCHES = 8


def measure(num_tokens: int, from_pairs: bool, told: Any) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    prompt = rng.integers(1000, size=num_tokens // (BRANCHES + 1))
    layout = TreeLayout(
        plan_tree([np.concatenate([prompt, rng.integers(1000, size=len(prompt))]) for _ in range(BRANCHES)])
    )
    layout.flex_mask(1)  # imports
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    mask = layout.flex_mask(None)
    if from_pairs:
        from torch.nn.attention.flex_attention import create_block_mask

        begin, size = time.perf_counter(), layout.num_tokens
        mask = create_block_mask(mask.mask_mod, None, None, size, size, device="cpu")
    seconds = time.perf_counter() - begin
    told.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--pairs-up-to", type=int, default=16384)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| tokens | made from | seconds | MB |\n|---|---|---|---|")
    for num_tokens in options.tokens:
        for from_pairs in (False, True)[: 1 + (num_tokens <= options.pairs_up_to)]:
            told = context.SimpleQueue()
            process = context.Process(target=measure, args=(num_tokens, from_pairs, told))
            process.start()
            seconds, megabytes = told.get()
            process.join()
            print(
                f"| {num_tokens} | {'all pairs' if from_pairs else 'segments'} | {seconds:.3f} | {megabytes:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
