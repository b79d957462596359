"""The same in several processes of one machine (gloo), for benchmarks."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def together(count: int, work: Callable[..., T], *arguments: Any) -> list[T]:
    """Call a function in new processes, which find one another as those of `agentrl launch` do; return what each returns.

    Raises:
        RuntimeError: with what was raised in one of them; the others are ended.
    """
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
    found = []
    for _ in processes:
        worked, result = told.get()
        if not worked:
            for process in processes:
                process.terminate()
            raise RuntimeError(f"one of {count} processes failed:\n{result}")
        found.append(result)
    for process in processes:
        process.join()
    return found


def _enter(
    rank: int, count: int, port: int, told: "SimpleQueue[Any]", work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {k: str(v) for k, v in who.items()}
    torch.set_num_threads(1)
    try:
        told.put((True, work(*arguments)))
    except Exception:
        told.put((False, traceback.format_exc()))
        raise
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
