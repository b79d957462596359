"""The same in several processes of one machine (gloo), for benchmarks."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def together(count: int, work: Callable[..., T], *arguments: Any) -> list[T]:
    """Call a function in new processes, which find one another as those of `agentrl launch` do; return what each returns."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told: SimpleQueue[Any] = context.SimpleQueue()
    processes = [
        context.Process(target=_enter, args=(rank, count, port, told, work, arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    found = [told.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def _enter(
    rank: int, count: int, port: int, told: "SimpleQueue[Any]", work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {k: str(v) for k, v in who.items()}
    torch.set_num_threads(1)
    told.put(work(*arguments))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
