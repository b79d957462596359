"""Deadlines that stand still while the engine is paused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class EngineClock:
    """Tells when an engine has had its time.

    Whoever pauses the engine stops the clock, so that an update may take as long as it likes.
    """

    def __init__(self) -> None:
        self._runs = True
        self._timeouts: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after so many seconds without a stop; after a stop they are counted from 0."""
        async with asyncio.timeout(seconds if self._runs else None) as timeout:
            self._timeouts[timeout] = seconds
            try:
                yield
            finally:
                del self._timeouts[timeout]

    def stop(self) -> None:
        """Stop all deadlines."""
        self._runs = False
        self._reschedule(None)

    def start(self) -> None:
        """Give everyone who waits the whole of their time."""
        if not self._runs:
            self._runs = True
            self._reschedule(asyncio.get_running_loop().time())

    def _reschedule(self, now: float | None) -> None:
        for timeout, seconds in self._timeouts.items():
            if not timeout.expired():
                timeout.reschedule(None if now is None else now + seconds)
