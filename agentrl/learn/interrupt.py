"""An interrupt of an update that runs on another thread: what takes long asks for it where it may end."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from threading import Event
from typing import TypeVar

from agentrl.errors import TrainingError

R = TypeVar("R")

_ASK_S = 0.1
"""How often a coroutine that is waited for asks, in seconds."""

_interrupted: ContextVar[Event | None] = ContextVar("interrupted", default=None)


def run_until(interrupted: Event, work: Callable[[], R]) -> R:
    """Run what ends soon once `interrupted` is set; to be called in a context of its own, as `asyncio.to_thread` does.

    Raises:
        TrainingError: where it ended for that.
    """
    _interrupted.set(interrupted)
    return work()


def check_interrupt() -> None:
    """Go on, unless it was interrupted.

    Raises:
        TrainingError: where it was.
    """
    event = _interrupted.get()
    if event is not None and event.is_set():
        raise TrainingError("the update was interrupted")


async def unless_interrupted(work: Awaitable[R]) -> R:
    """Wait for a coroutine, which is cancelled where the update is interrupted.

    Raises:
        TrainingError: where it was.
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
