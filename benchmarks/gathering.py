"""Memory that processes need to tell one another of rollouts: what a step gathers, and what the first process decides.

    python -m benchmarks.gathering [--processes 2 4 6 8] [--megabytes 64]

Each process holds so many megabytes of bytes, tells all others (`all_gather`), and hears as many from the first alone
(`from_rank_zero`); printed is how far the largest resident set rises above what it was before, beyond what is returned.
"""

import argparse
import os
import resource
import time
from itertools import product
from typing import Any

import torch.distributed as dist

from agentrl.distributed.processes import all_gather, from_rank_zero, is_main, num_processes
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--megabytes", type=int, default=64)
    options = parser.parse_args()
    print("| processes | who tells | MB beyond what is returned, largest | seconds |\n|---|---|---|---|")
    for num, is_gathered in product(options.processes, (False, True)):
        found = together(num, work, options.megabytes, is_gathered)
        megabytes, seconds = (max(one) for one in zip(*found, strict=True))
        print(f"| {num} | {'all' if is_gathered else 'the first'} | {megabytes:.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
