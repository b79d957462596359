"""Memory that processes need to tell one another of rollouts: what a step gathers, and what the first process decides.

    python -m benchmarks.gathering [--processes 2 4 6 8] [--megabytes 64]

Each process holds so many megabytes of bytes, tells all others (`all_gather`), and hears as many from the first alone
(`from_rank_zero`); printed is how far the largest resident set rises above what it was before, beyond what is returned.
"""

import argparse
import multiprocessing
import os
import resource
import socket
import time
from itertools import product
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch.distributed as dist

from agentrl.distributed.processes import all_gather, barrier, from_rank_zero, is_main


def peak() -> float:
    """Return the largest resident set so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(rank: int, num: int, port: int, megabytes: int, is_gathered: bool, told: "SimpleQueue[Any]") -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(num)}
    dist.init_process_group("gloo")
    content = os.urandom(megabytes * 2**20)
    all_gather([0])
    before, begin = peak(), time.perf_counter()
    kept: Any = all_gather([content]) if is_gathered else from_rank_zero(lambda: content)
    returned = megabytes * (num - 1 if is_gathered else not is_main())
    told.put((peak() - before - returned, time.perf_counter() - begin))
    del kept
    barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--megabytes", type=int, default=64)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| processes | who tells | MB beyond what is returned, largest | seconds |\n|---|---|---|---|")
    for num, is_gathered in product(options.processes, (False, True)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        told: SimpleQueue[Any] = context.SimpleQueue()
        args = [(rank, num, port, options.megabytes, is_gathered, told) for rank in range(num)]
        processes = [context.Process(target=work, args=one) for one in args]
        for process in processes:
            process.start()
        found = [told.get() for _ in processes]
        for process in processes:
            process.join()
        megabytes, seconds = (max(one) for one in zip(*found, strict=True))
        print(f"| {num} | {'all' if is_gathered else 'the first'} | {megabytes:.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
