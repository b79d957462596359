"""A client of an MCP server. All of a process run on one thread, which ends with the last of them."""

import atexit
import contextlib
import logging
import math
import os
import pkgutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any, TypeAlias
from weakref import WeakSet

import anyio
from anyio.from_thread import BlockingPortalProvider
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.types import CONNECTION_CLOSED, CallToolResult, Tool

from agentrl import EnvironmentFailure, UserError
from agentrl.env import ToolCallError
from agentrl.plain_data import line_of

ServerOption: TypeAlias = "str | Sequence[str] | Mapping[str, Any] | MCPServer | Server[Any]"
_GRACE_S = 2.0
"""How long a call that was given up may take to give way, in seconds."""
_CLOSE_S = 10.0
"""How long a server may take to end: the SDK kills its processes after four seconds."""
_MAX_PAGES = 100
"""Pages of a list of tools: a server may page without end."""
_MAX_WORDS = 500
"""Characters of what a server wrote to stderr, the last ones, in an error message."""


def _in_a_line(record: logging.LogRecord) -> bool:
    """Tell of an exception in a line: the SDK logs each line of a server that is no message with its whole traceback."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {line_of(record.exc_info[1])}", None, None
    return True


logging.getLogger("mcp.client.stdio").addFilter(_in_a_line)


class ServerDiedError(Exception):
    """The server is gone; the message is what is known of why."""


def target_of(option: ServerOption) -> str | StdioServerParameters | MCPServer | Server[Any]:
    """Return what the option `server` names: a URL, a command, or a server in this process.

    Raises:
        UserError: naming the option.
    """
    if isinstance(option, MCPServer | Server):
        return option
    if isinstance(option, str) and option.startswith(("http://", "https://")):
        return option
    try:
        if isinstance(option, str):
            found = pkgutil.resolve_name(option) if ":" in option else None
            if isinstance(found, MCPServer | Server):
                return found
        elif isinstance(option, Mapping):
            return StdioServerParameters(**option)
        elif option:
            return StdioServerParameters(command=option[0], args=list(option[1:]))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"server: {option!r} leads to no MCP server: {' '.join(str(error).split())}") from error
    raise UserError(
        f"server: {option!r} names no MCP server; give a URL, a command as a list of words, {{command, args, env, cwd}}, or "
        "module:name of an MCPServer"
    )


class Connection:
    """One client of one server, from its start to `close`.

    Raises:
        ServerDiedError: when the server does not start in time.
    """

    def __init__(self, target: Any, *, start_timeout_s: float) -> None:
        self._portals = _portals
        self._lock = threading.Lock()
        self._is_closed = False
        self._stderr = tempfile.TemporaryFile() if isinstance(target, StdioServerParameters) else None  # noqa: SIM115
        self._portal = self._portals.__enter__()
        try:
            self._task, started = self._portal.start_task(self._serve, target, start_timeout_s)
        except BaseException as error:
            died = self._died(error)
            self._release()
            if isinstance(error, Exception):
                raise died from error
            raise
        self._client: Client
        self._end: anyio.Event
        self.tools: list[Tool]
        self._client, self._end, self.tools = started
        _open.add(self)

    @property
    def is_usable(self) -> bool:
        """False once it is closed, and in a process that was forked after the start: the connection is its parent's."""
        return self._portals is _portals and not self._is_closed

    def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> CallToolResult:
        """Call a tool.

        Raises:
            ToolCallError: where the server refuses the call, or does not answer it in time.
            ServerDiedError: where the server is gone.
            EnvironmentFailure: where its answer breaks the protocol.
        """

        async def bounded() -> CallToolResult:
            with anyio.fail_after(timeout_s):
                return await self._client.call_tool(name, arguments)

        with self._lock:
            if self._is_closed:
                raise ServerDiedError("the server was stopped")
            future: Future[CallToolResult] = self._portal.start_task_soon(bounded)
        try:
            return future.result(timeout_s + _GRACE_S)
        except TimeoutError:
            future.cancel()
            raise ToolCallError(f"{name} timed out") from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise self._died(error) from error
            raise ToolCallError(str(error)) from error
        except (ValueError, RuntimeError) as error:
            raise EnvironmentFailure(
                f"the MCP server's answer to {name} breaks the protocol: {_words(error)}"
            ) from error
        except Exception as error:  # of the transport
            raise self._died(error) from error

    def close(self) -> None:
        """End the session, and the server where it is a process of ours; again changes nothing."""
        with self._lock:
            if not self.is_usable:
                return
            self._is_closed = True
        with contextlib.suppress(Exception):  # a transport that broke says so once more
            self._portal.call(self._end.set)
            self._task.result(_CLOSE_S)
        self._release()

    async def _serve(
        self,
        target: Any,
        start_timeout_s: float,
        *,
        task_status: anyio.abc.TaskStatus[tuple[Client, anyio.Event, list[Tool]]],
    ) -> None:
        """Hold the session open in one task: what it enters must be left by the same."""
        end = anyio.Event()
        client = Client(stdio_client(target, errlog=self._stderr) if self._stderr else target)  # type: ignore[arg-type]
        with anyio.move_on_after(start_timeout_s) as scope:
            async with client:
                tools = await _list_tools(client)
                scope.deadline = math.inf
                task_status.started((client, end, tools))
                await end.wait()
        if scope.cancelled_caught:
            raise TimeoutError(f"no answer within {start_timeout_s:g} s")

    def _died(self, error: BaseException) -> ServerDiedError:
        said = _last_words(self._stderr)
        return ServerDiedError(_words(error) + (f"; its stderr ends: {said}" if said else ""))

    def _release(self) -> None:
        self._portals.__exit__(None, None, None)
        if self._stderr is not None:
            self._stderr.close()


async def _list_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools
    raise ValueError(f"its list of tools has more than {_MAX_PAGES} pages")


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):  # of task groups
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_WORDS]}"


def _last_words(stderr: IO[bytes] | None) -> str:
    if stderr is None or stderr.closed:
        return ""
    size = os.fstat(stderr.fileno()).st_size  # the server's writes have moved our position too
    return " ".join(os.pread(stderr.fileno(), _MAX_WORDS, max(0, size - _MAX_WORDS)).decode(errors="replace").split())


_portals = BlockingPortalProvider()
_open: WeakSet[Connection] = WeakSet()


def _forget_connections() -> None:
    """Forget all connections: a forked process has none of their threads."""
    global _portals
    _portals = BlockingPortalProvider()
    _open.clear()


@atexit.register
def _close_all() -> None:
    for connection in list(_open):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)
