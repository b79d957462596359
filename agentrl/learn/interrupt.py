"""Interrupts of an update that runs on another thread: long work asks from time to time whether it is to end."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from threading import Event
from typing import TypeVar

from agentrl.errors import TrainingError

R = TypeVar("R")

_ASK_S = 0.1
"""Interval at which a waiting coroutine checks for an interrupt, in seconds."""

_interrupted: ContextVar[Event | None] = ContextVar("interrupted", default=None)


def run_until(interrupted: Event, work: Callable[[], R]) -> R:
    """Run work that ends soon once `interrupted` is set; call it in a context of its own, as `asyncio.to_thread` does.

    Raises:
        TrainingError: if the work was interrupted.
    """
    _interrupted.set(interrupted)
    return work()


def check_interrupt() -> None:
    """Raise if the update was interrupted.

    Raises:
        TrainingError: if the update was interrupted.
    """
    event = _interrupted.get()
    if event is not None and event.is_set():
        raise TrainingError("the update was interrupted")


async def unless_interrupted(work: Awaitable[R]) -> R:
    """Wait for a coroutine, and cancel it if the update is interrupted.

    Raises:
        TrainingError: if the update was interrupted.
    """
    future = asyncio.ensure_future(work)
    try:
        while not future.done():
            check_interrupt()
            await asyncio.wait([future], timeout=_ASK_S)
        return future.result()
    finally:
        future.cancel()
        await asyncio.gather(future, return_exceptions=True)
