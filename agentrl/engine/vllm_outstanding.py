"""The requests that a vLLM server has, which must give signs of life meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from agentrl.engine.vllm_http import ServerLostError
from agentrl.errors import EngineError

_WATCH_S = 10.0
"""Wait between two questions whether the server is alive."""


class Outstanding:
    """Requests without an answer, by the ids that the server was given.

    Each may take as long as its caller waits: a completion of a busy server takes what it takes. Where the server gives no
    sign of life, all of them fail.
    """

    def __init__(self, check_alive: Callable[[], Awaitable[None]]) -> None:
        """Begin with none.

        Args:
            check_alive: asks the server for a sign of life; raises a ServerLostError where none comes.
        """
        self._check_alive = check_alive
        self._timeouts: dict[str, asyncio.Timeout] = {}
        self._failure: ServerLostError | None = None
        self._is_idle = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._busy_s = 0.0
        self._busy_since = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which there was at least one."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._timeouts else 0.0)

    def __len__(self) -> int:
        return len(self._timeouts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._timeouts)

    @asynccontextmanager
    async def waiting(self, server_id: str) -> AsyncIterator[None]:
        """Count a request until the context ends.

        Raises:
            ServerLostError: when it fails, see `fail`.
        """
        try:
            async with asyncio.timeout(None) as timeout:
                self._begin(server_id, timeout)
                try:
                    yield
                finally:
                    self._end(server_id)
        except TimeoutError:
            raise ServerLostError(str(self._failure)) from self._failure

    def fail(self, error: ServerLostError) -> None:
        """Let all end, because the server is lost."""
        self._failure = error
        now = asyncio.get_running_loop().time()
        for timeout in self._timeouts.values():
            if not timeout.expired():
                timeout.reschedule(now)

    async def wait_until_none(self) -> None:
        """Return when all have ended."""
        if self._timeouts:
            await self._is_idle.wait()

    def _begin(self, server_id: str, timeout: asyncio.Timeout) -> None:
        if not self._timeouts:
            self._busy_since = time.perf_counter()
            self._watching = asyncio.create_task(self._watch())
        self._timeouts[server_id] = timeout
        self._is_idle.clear()

    def _end(self, server_id: str) -> None:
        del self._timeouts[server_id]
        if not self._timeouts:
            assert self._watching is not None, "see `_begin`"
            self._watching.cancel()
            self._busy_s += time.perf_counter() - self._busy_since
            self._is_idle.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                await self._check_alive()
            except ServerLostError as error:
                self.fail(error)
            except EngineError:  # a refusal is a sign of life
                pass
