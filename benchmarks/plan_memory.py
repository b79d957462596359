"""`agentrl plan` against what an update and an engine take: models of 5 to 150 million weights, on a CPU.

    python -m benchmarks.plan_memory [--only WORD ...]

Each case is a process of its own, or two (`ddp`, `fsdp`): a step of two minibatches of two micro-batches each, filled to
the budget, on made-up trajectories that share nothing. Printed: megabytes that the plan counts for training (no engine), by how
much the resident set rose over that of a process that has trained a model of nothing, at its highest in the updates (of two,
where it rose most), and their ratio. Cases of sampling are of the `transformers` engine alone (weights, keys and values, its
largest pass; not the trainer's model): all of its rows get the longest contexts. Memory that is freed goes back at once
(`MALLOC_MMAP_THRESHOLD_`), so that the highest is not what allocators keep; nor are kernels kept, of which a CPU compiles one
for each shape in bfloat16 (`LRU_CACHE_CAPACITY`). `--only` takes the cases whose `how` has each of these words.
"""

import argparse

from tests.support.plan_memory import CASES, planned_and_measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words of the cases to measure; all by default")
    options = parser.parse_args()
    print("| hidden size | layers | vocabulary | tokens | how | planned, MB | measured, MB | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if not set(options.only) <= set(case.how.split()):
            continue
        planned, measured = planned_and_measured(case)
        cells = [case.hidden_size, case.num_layers, case.vocab_size, case.tokens, case.how]
        print(
            f"| {' | '.join(map(str, cells))} | {planned:.0f} | {measured:.0f} | {planned / measured:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
