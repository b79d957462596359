"""What all processes sample between two steps: an evaluation, a proof of the engine."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.distributed.processes import all_gather, num_processes
from agentrl.rollout import RolloutPool

T = TypeVar("T")


def sampled_by_all(pool: RolloutPool, runner: asyncio.Runner, sampling: Coroutine[Any, Any, list[T]]) -> list[T]:
    """Sample something on this process's engine, while the others do on theirs; return what all have sampled.

    Episodes that a step interrupted are continued meanwhile. While other processes are waited for the engine is paused,
    so that no deadline passes; and it stays so where episodes are to wait for the next step.
    """
    waits_for_others, continues = num_processes() > 1, pool.context.config.samples_during_update
    runner.run(pool.resume())
    sampled = runner.run(sampling)
    if waits_for_others or not continues:
        runner.run(pool.pause())
    sampled = all_gather(sampled)
    if waits_for_others and continues:
        runner.run(pool.resume())
    return sampled
