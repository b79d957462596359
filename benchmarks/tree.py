"""How long a forward and backward pass takes over padded rows, and over the same rows as a token tree.

python benchmarks/tree.py [--shares 0.5 0.75 0.9] [--groups 4] [--group_size 8] [--length 512] [--repeats 5]
    [--groups_per_pass 1] [--autocast] [--hybrid]

Rows of a group share their first tokens; the others are trained. A small Qwen3 (hidden 256, 4 layers, vocabulary 2,048;
--hybrid: Qwen3.5, three of whose layers are recurrent) in float32, or under bfloat16 autocast.
Losses and gradients are compared first; times are medians of interleaved runs.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from agentrl.policy.config import Layout
from agentrl.policy.layout import hidden_states, lay_out
from agentrl.policy.layout.tree import IntArray, plan_tree
from agentrl.policy.logprobs import fused_logprobs

VOCAB_SIZE = 2048
RECURRENT = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LAYOUTS: tuple[Layout, ...] = ("padded", "tree")


def make_model(*, is_hybrid: bool) -> Any:
    torch.manual_seed(0)
    kind = transformers.Qwen3_5TextConfig if is_hybrid else transformers.Qwen3Config
    recurrent: dict[str, Any] = RECURRENT if is_hybrid else {}
    config = kind(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        **recurrent,
    )
    config._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config)


def make_groups(groups: int, group_size: int, length: int, shared: int) -> list[list[IntArray]]:
    ids_GRL = np.random.default_rng(0).integers(VOCAB_SIZE, size=(groups, group_size, length))
    ids_GRL[:, :, :shared] = ids_GRL[:, :1, :shared]
    return [list(ids_RL) for ids_RL in ids_GRL]


def trained(rows: Sequence[IntArray], shared: int) -> tuple[IntArray, IntArray, torch.Tensor, torch.Tensor]:
    """Return row, position of the predecessor, target and weight of each trained token."""
    row_T = np.repeat(np.arange(len(rows)), [len(row) - shared for row in rows])
    target_T = np.concatenate([row[shared:] for row in rows])
    position_T = np.concatenate([np.arange(shared, len(row)) for row in rows]) - 1
    weight_T = torch.from_numpy(np.random.default_rng(1).normal(size=len(rows)))[row_T].float()
    return row_T, position_T, torch.from_numpy(target_T), weight_T / len(target_T)


def loss_of(model: Any, rows: Sequence[IntArray], shared: int, layout: Layout) -> torch.Tensor:
    row_T, position_T, target_T, weight_T = trained(rows, shared)
    inputs, index = lay_out(rows, layout)
    hidden_TD = hidden_states(model, inputs)[index(row_T, position_T)]
    logprobs_T, _ = fused_logprobs(hidden_TD, model.get_output_embeddings().weight, target_T)
    return -(weight_T * logprobs_T).sum()


def step(
    layout: Layout, model: Any, passes: Sequence[list[IntArray]], shared: int, *, autocast: bool
) -> tuple[float, torch.Tensor, float]:
    """Return loss, gradient and seconds of one forward and backward pass over all rows."""
    model.zero_grad()
    total = 0.0
    begin = time.perf_counter()
    for rows in passes:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            part = loss_of(model, rows, shared, layout)
        part.backward()
        total += float(part.detach())
    seconds = time.perf_counter() - begin
    return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.75, 0.9])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups_per_pass", type=int, default=1)
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--hybrid", action="store_true")
    options = parser.parse_args()
    model = make_model(is_hybrid=options.hybrid)
    figures = {}
    print(f"seconds for {options.groups} groups of {options.group_size} rows of {options.length} tokens")
    print(f"{'shared':>6} {'tokens':>13} {'loss gap':>9} {'gradient gap':>12} {'padded':>7} {'tree':>7} {'ratio':>6}")
    for share in options.shares:
        shared = int(share * options.length)
        groups = make_groups(options.groups, options.group_size, options.length, shared)
        size = options.groups_per_pass
        passes = [list(chain(*groups[first : first + size])) for first in range(0, len(groups), size)]
        runs = [
            [step(layout, model, passes, shared, autocast=options.autocast) for layout in LAYOUTS]
            for _ in range(options.repeats + 1)
        ]
        (padded, padded_grad, _), (tree, tree_grad, _) = runs[0]
        loss_gap = abs(tree - padded) / abs(padded)
        grad_gap = float((tree_grad - padded_grad).norm() / padded_grad.norm())
        bound = 3e-2 if options.autocast else 1e-4
        assert loss_gap < bound, f"the losses differ: {padded} padded, {tree} as a tree"
        assert grad_gap < bound, f"the gradients differ by {grad_gap:.1e} of their norm"
        times = [median(run[side][2] for run in runs[1:]) for side in (0, 1)]
        tokens = [sum(map(len, chain(*groups))), plan_tree(list(chain(*groups))).num_tokens]
        print(
            f"{share:6.0%} {tokens[0]:6} {tokens[1]:6} {loss_gap:9.1e} {grad_gap:12.1e} "
            f"{times[0]:7.2f} {times[1]:7.2f} {times[0] / times[1]:6.2f}"
        )
        figures[str(share)] = {"padded_s": times[0], "tree_s": times[1], "ratio": times[0] / times[1]}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
