"""Requests to vLLM's HTTP server, with retries; and the pending completions of a server, which is checked meanwhile."""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2

from agentrl.engine.base import retry_wait_s
from agentrl.engine.vllm.common import ServerConfig
from agentrl.errors import EngineError

_T = TypeVar("_T")
_FIRST_WAIT_S = 0.25
"""Wait before a request is made again; doubles each time, up to a minute."""
_MAX_WORDS = 1000
"""Largest number of characters of an answer in an error."""
_NO_ROUTE = ". Start it by `agentrl serve RECIPE`, or with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"


_START = "Is it running? `agentrl serve RECIPE` starts it"
_OUT_OF_FILES = (
    "This process has no room for another connection: raise its limit of open files (`ulimit -n`), or lower "
    "engine.server.max_connections or rollout.max_live_episodes"
)
_NOT_ACCEPTED = (
    "It is down, out of reach, too busy or out of open files: raise that limit where it runs (`ulimit -n`), or lower "
    "engine.server.max_connections"
)
_OTHERS = 16
"""Further connections, so that a pause need not wait for completions."""


class ServerLostError(EngineError):
    """A server no longer answers, or was restarted and has other weights."""


class Fault(Exception):  # noqa: N818  # it becomes an error after too many retries
    """A failure that a retry may mend: no answer, half of one, or an error of the server's own."""

    def __init__(self, words: str, *, fix: str = _START) -> None:
        """Take the message, and the advice for the user."""
        super().__init__(words)
        self.fix = fix


class Http:
    """HTTP client of one server, with retries."""

    def __init__(self, config: ServerConfig) -> None:
        """Create a client that connects at the first request."""
        self._config = config
        self._client: httpx2.AsyncClient | None = None

    async def request(
        self,
        what: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        parse: Callable[[Any], _T] = lambda answer: answer,
    ) -> _T:
        """Make a request, retry it after faults, and return its parsed answer."""
        return await self.with_retries(what, lambda: self.request_once(method, path, body, parse=parse))

    async def with_retries(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of an attempt; after a fault wait and retry.

        Raises:
            ServerLostError: after too many faults, with the last one's message.
        """
        num = 1 + self._config.max_retries
        for remaining in reversed(range(num)):
            try:
                return await attempt()
            except Fault as fault:
                if not remaining:
                    raise ServerLostError(
                        f"vLLM's server at {self._config.urls[0]}, asked {num} times for {what}, did not answer as it "
                        f"should; the last time: {fault}. {fault.fix}"
                    ) from fault
            await asyncio.sleep(retry_wait_s(num - 1 - remaining, first_s=_FIRST_WAIT_S))
        raise AssertionError("unreachable")

    async def request_once(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        parse: Callable[[Any], _T] = lambda answer: answer,
        is_text: bool = False,
    ) -> _T:
        """Make a request once, and return its parsed answer, of JSON or of text.

        Raises:
            Fault: if a retry may help.
            EngineError: if the server refuses the request (4xx).
        """
        try:
            response = await self._connected().request(method, path, json=body)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise _fault(error) from error
        if response.status_code >= 500:
            raise Fault(f"HTTP {response.status_code}: {_words(response)}")
        if response.status_code >= 300:
            raise EngineError(
                f"vLLM's server at {self._config.urls[0]} refused {method} {path}: HTTP {response.status_code}: "
                + _words(response)
                + (_NO_ROUTE if response.status_code == 404 else "")
            )
        try:
            return parse(response.text if is_text else response.json())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Fault(
                f"an answer that is none ({type(error).__name__}: {error}): {response.text[:_MAX_WORDS]!r}"
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _connected(self) -> httpx2.AsyncClient:
        """Return the client, made within the event loop. Callers set the deadlines."""
        if self._client is None:
            self._client = httpx2.AsyncClient(
                base_url=self._config.urls[0],
                timeout=httpx2.Timeout(None, connect=min(10.0, self._config.timeout_s)),
                # The server drops a connection that was idle for 5 s; a drop during use would be a fault.
                limits=httpx2.Limits(max_connections=self._config.max_connections + _OTHERS, keepalive_expiry=2.0),
                trust_env=False,  # proxies are for the Internet, not for this server
            )
        return self._client


def _fault(error: Exception) -> Fault:
    """Return the fault of a failed request, from its first cause."""
    fix = _NOT_ACCEPTED if isinstance(error, httpx2.ConnectTimeout) else _START
    fault = Fault(f"{type(error).__name__}: {error}", fix=fix)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            fault = Fault(str(cause), fix=_OUT_OF_FILES)
        cause = cause.__cause__ or cause.__context__
    return fault


def _words(response: httpx2.Response) -> str:
    """Return the message in a server's error response."""
    try:
        found = response.json()
    except ValueError:
        found = response.text
    for key in ("error", "detail", "message"):
        if isinstance(found, dict):
            found = found.get(key, found)
    return str(found)[:_MAX_WORDS]


_WATCH_S = 10.0
"""Wait between two health checks of the server."""


class PendingRequests:
    """Unanswered completion requests, by the ids that the server was given.

    Each may take as long as its caller waits. If the server fails a health check, all of them fail.
    """

    def __init__(self, check_alive: Callable[[], Awaitable[None]]) -> None:
        """Create an empty set; `check_alive` raises a ServerLostError if the server does not answer."""
        self._check_alive = check_alive
        self._timeouts: dict[str, asyncio.Timeout] = {}
        self._failure: ServerLostError | None = None
        self._is_idle = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._busy_s = 0.0
        self._busy_since = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._timeouts else 0.0)

    def __len__(self) -> int:
        return len(self._timeouts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._timeouts)

    @asynccontextmanager
    async def waiting(self, server_id: str) -> AsyncIterator[None]:
        """Count a request as pending until the context ends.

        Raises:
            ServerLostError: after `fail`.
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
        """Fail all pending requests."""
        self._failure = error
        now = asyncio.get_running_loop().time()
        for timeout in self._timeouts.values():
            if not timeout.expired():
                timeout.reschedule(now)

    async def wait_until_none(self) -> None:
        """Wait until no request is pending."""
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
