"""How a step is dealt out to processes: seconds that planning takes, and how much more the dearest share costs than the mean.

    python -m benchmarks.planning [--groups 4 256] [--group-size 8] [--tokens 512] [--processes 1 2 8 64]

Groups of random tokens whose members share a quarter (a prompt) and part at random places. No model runs; the cost is that
which the planner counts (`Planner.pairs_per_token` of a hidden size of 1,024).
"""

import argparse
import time
from collections.abc import Sequence
from itertools import product
from typing import get_args

import numpy as np

from agentrl.learn.batch import Row, TokenBatch
from agentrl.learn.plan import Planner, _Plan
from agentrl.policy.config import Layout
from agentrl.policy.layout.tree import plan_tree

PAIRS_PER_TOKEN = 6 * 1024


def batch(num_groups: int, group_size: int, num_tokens: int) -> TokenBatch:
    """Return groups of which all tokens but the prompt's are trained."""
    rng = np.random.default_rng(0)
    rows, ids = [], []
    for group in range(num_groups):
        first_L = rng.integers(50_000, size=num_tokens)
        for _ in range(group_size):
            ids_L = rng.integers(50_000, size=rng.integers(num_tokens // 2, num_tokens))
            fork = rng.integers(num_tokens // 4, len(ids_L))
            ids_L[:fork] = first_L[:fork]
            positions_T = np.arange(num_tokens // 4, len(ids_L))
            rows.append([Row(ids_L=ids_L, positions_T=positions_T, turn_T=np.zeros_like(positions_T))])
            ids.append(str(group))
    return TokenBatch.from_rows(rows, group_ids=ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 256])
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 8, 64])
    options = parser.parse_args()
    print("| layout | groups | processes | seconds | passes | dearest share over an even one |")
    print("|---|---|---|---|---|---|")
    for layout, num_groups in product(get_args(Layout), options.groups):
        tokens = batch(num_groups, options.group_size, options.tokens)
        for num_processes in options.processes:
            planner = Planner(max_tokens=options.budget, layout=layout, pairs_per_token=PAIRS_PER_TOKEN)
            begin = time.perf_counter()
            shares = _Plan(tokens, planner).shares(list(range(tokens.num_trajectories)), num_processes)
            seconds = time.perf_counter() - begin
            costs = [cost(tokens, layout, [i for one in share for i in one]) for share in shares]
            mean = cost(tokens, layout, range(tokens.num_trajectories)) / num_processes
            passes = max(map(len, shares))
            cells = [layout, num_groups, num_processes, f"{seconds:.2f}", passes, f"{max(costs) / mean:.2f}"]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def cost(tokens: TokenBatch, layout: Layout, trajectories: Sequence[int]) -> float:
    """Return what trajectories cost on one process, each group once."""
    rows = [tokens.rows[i] for i in trajectories]
    if not rows:
        return 0.0
    if layout != "tree":
        return sum(len(row) * ((len(row) + 1) / 2 + PAIRS_PER_TOKEN) for row in rows)
    tree = plan_tree(rows)
    return tree.attention_cost + PAIRS_PER_TOKEN * tree.num_tokens


if __name__ == "__main__":
    main()
