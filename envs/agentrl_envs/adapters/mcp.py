"""Environment whose tools are those of an MCP server, beside its own.

A server belongs to one episode, or to all environments of the process. All clients of a process run on one thread, which
ends with the last of them.
"""

from agentrl import UserError

try:
    import mcp.types
except ModuleNotFoundError as error:
    raise UserError(f"MCP servers need the package mcp, version 2 ({error}); pip install 'agentrl[mcp]'") from error
if not hasattr(mcp, "Client"):
    raise UserError("MCP servers need the package mcp, version 2; pip install 'agentrl[mcp]'")

import atexit
import contextlib
import json
import logging
import math
import os
import pkgutil
import re
import tempfile
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import IO, Any, Literal, TypeAlias
from weakref import WeakSet

import anyio
from anyio.from_thread import BlockingPortalProvider
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.types import (
    CONNECTION_CLOSED,
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
    Tool,
)

from agentrl import EnvironmentFailure, Message, ToolEnv, UserError
from agentrl.data.files import absolute
from agentrl.data.plain import line_of
from agentrl.env import TaskEnv, ToolCallError, arguments_object
from agentrl.env.subprocesses import passed_variables
from agentrl_envs.adapters.common import check_arguments

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 64


def offered(tools: Sequence[Tool], patterns: Sequence[str] | None) -> dict[str, Tool]:
    """Return the tools whose names match one of the patterns, by the names that models may call them by.

    Raises:
        UserError: for a pattern that matches none, and for two tools of one name.
    """
    found: dict[str, Tool] = {}
    for pattern in patterns or ():
        if not any(fnmatchcase(tool.name, pattern) for tool in tools):
            raise UserError(
                f"tool_names: {pattern!r} matches none of {', '.join(tool.name for tool in tools) or 'no tools'}"
            )
    for tool in tools:
        if patterns is None or any(fnmatchcase(tool.name, pattern) for pattern in patterns):
            name = _NOT_IN_NAMES.sub("_", tool.name)[:_MAX_NAME]
            if name in found:
                raise UserError(
                    f"tool_names: {tool.name!r} and {found[name].name!r} are both offered as {name!r}; leave one out"
                )
            found[name] = tool
    return found


def schema_of(name: str, tool: Tool) -> dict[str, Any]:
    """Return a tool's schema, OpenAI style."""
    function = {
        "name": name,
        "description": tool.description or tool.title or tool.name,
        "parameters": {"type": "object", "properties": {}} | tool.input_schema,
    }
    return {"type": "function", "function": function}


def checked_arguments(name: str, tool: Tool, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        ToolCallError: if they do not fit the tool's schema.
    """
    given = arguments_object(name, arguments)
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ToolCallError(f"wrong arguments for {name}: {error}") from None
    check_arguments(name, given, tool.input_schema)
    return given


def result_text(result: CallToolResult) -> str:
    """Return what a tool's message says: its texts, a note for what is none, and structured data if there is no text."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text, result.content))


def _text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        return f"[{block.type}: {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
    if isinstance(block, EmbeddedResource):
        content = block.resource
        if isinstance(content, TextResourceContents):
            return content.text
        return f"[resource: {content.uri}, {content.mime_type}, {len(content.blob) * 3 // 4} bytes]"
    return f"[resource: {block.uri}, {block.name}]"


ServerOption: TypeAlias = "str | Sequence[str] | Mapping[str, Any] | MCPServer | Server[Any]"
_GRACE_S = 2.0
"""Seconds that a call that was given up may take to give way."""
_CLOSE_S = 10.0
"""Seconds that a server may take to end: the SDK kills its processes after four seconds."""
_MAX_PAGES = 100
"""Pages of a list of tools: a server may page without end."""
_MAX_WORDS = 500
"""Characters of what a server wrote to stderr, the last ones, in an error message."""


def _in_a_line(record: logging.LogRecord) -> bool:
    """Reduce an exception to a line: the SDK logs each line of a server that is no message with its whole traceback."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg = f"{record.getMessage()}: {line_of(record.exc_info[1])}"
        record.args = None
        record.exc_info = None
    return True


logging.getLogger("mcp.client.stdio").addFilter(_in_a_line)


class ServerDiedError(Exception):
    """The server is gone; the message is what is known of why."""


def _command(
    *, pass_env: Sequence[str] = (), env: Mapping[str, str] | None = None, cwd: str | None = None, **fields: Any
) -> StdioServerParameters:
    """Return how to start a server. It inherits the SDK's short list of variables, and those that `pass_env` names."""
    if missing := [name for name in pass_env if name not in os.environ]:
        raise ValueError(f"pass_env: the variable {missing[0]} is not set")
    passed = {**passed_variables(), **{name: os.environ[name] for name in pass_env}, **(env or {})}
    return StdioServerParameters(env=passed, cwd=absolute(cwd or ""), **fields)


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
            return _command(**option)
        elif option:
            return _command(command=option[0], args=list(option[1:]))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"server: {option!r} leads to no MCP server: {' '.join(str(error).split())}") from error
    raise UserError(
        f"server: {option!r} names no MCP server; give a URL, a command as a list of words, {{command, args, env, pass_env, "
        "cwd}}, or module:name of an MCPServer"
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
            ToolCallError: if the server refuses the call, or does not answer it in time.
            ServerDiedError: if the server is gone.
            EnvironmentFailure: if its answer breaks the protocol.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerSettings:
    """Address of a server, and how long to wait for it."""

    option: ServerOption
    """A URL, a command, or a server in this process."""
    lives: Literal["episode", "process"]
    """For how long one serves: one each episode, or all of them."""
    start_timeout_s: float
    call_timeout_s: float
    max_restarts: int
    """Times that a server that died is started again in an episode."""

    def __deepcopy__(self, memo: object) -> "ServerSettings":
        return self  # a server in this process cannot be copied, and need not be

    def connect(self) -> Connection:
        """Start it."""
        return Connection(target_of(self.option), start_timeout_s=self.start_timeout_s)

    def key(self) -> Hashable:
        """Return what two settings of one server share."""
        target = target_of(self.option)
        return target.model_dump_json() if isinstance(target, StdioServerParameters) else target


class _Shared:
    """The connection of all environments that use one server."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self.num_users = 0
        self.pid = os.getpid()
        self._connect = connect
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def connection(self) -> Connection:
        """Return it; whoever needs it first after a death starts the server again."""
        with self._lock:
            if self._connection is None or not self._connection.is_usable:
                self._connection = self._connect()
            return self._connection

    def close(self) -> None:
        """End the server."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class McpServer:
    """A server that is started when it is first needed, and again when it dies, `max_restarts` times an episode.

    One that serves an episode alone follows from the calls made of it: a copy of the environment's moment, and a server
    that was started again, get those calls again before the next one.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._connection: Connection | None = None
        self._shared: _Shared | None = None
        self._calls: list[tuple[str, dict[str, Any], bool]] = []
        """Calls of this episode, and whether they were answered: one that took too long may have been carried out."""
        self._num_restarts = 0

    def tools(self) -> list[Tool]:
        """Return the tools that it lists: those of the first start of such a server in this process.

        Raises:
            EnvironmentFailure: if it does not start.
        """
        key = self.settings.key()
        with _lock:
            if key not in _tools:
                _tools[key] = self._ready().tools
                self.end()
            return _tools[key]

    def begin(self) -> None:
        """Begin an episode."""
        self.end()
        self._calls, self._num_restarts = [], 0

    def end(self) -> None:
        """End an episode, and its server."""
        if self._connection is not None and self._shared is None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Leave a server that is shared, and end one that is not; whoever leaves last ends it."""
        self.end()
        shared = self._shared
        self._shared = None
        self._connection = None
        if shared is not None and shared.pid == os.getpid():
            with _lock:
                shared.num_users -= 1
                if shared.num_users:
                    return
                _shared.pop(self.settings.key(), None)
            shared.close()

    def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool; if the server dies meanwhile, start it again and call again.

        Raises:
            ToolCallError: see `Connection.call`. So is EnvironmentFailure, and for a server that dies too often.
        """
        while True:
            connection = self._ready()
            try:
                result = connection.call(name, arguments, timeout_s=self.settings.call_timeout_s)
            except ServerDiedError as error:
                self._bury(connection, error)
                continue
            except ToolCallError:
                self._calls.append((name, arguments, False))
                raise
            self._calls.append((name, arguments, True))
            return result

    def _ready(self) -> Connection:
        """Return a connection to a server that has seen the calls of this episode.

        Raises:
            EnvironmentFailure: for a server that dies too often, or does not take those calls again.
        """
        while self._connection is None or not self._connection.is_usable:
            connection = None
            try:
                connection = self._connect()
                if self.settings.lives == "episode":
                    self._repeat_calls(connection)
                self._connection = connection
            except ServerDiedError as error:
                self._bury(connection, error)
            except ToolCallError as error:
                raise EnvironmentFailure(
                    f"a new MCP server does not take the episode's calls again: {error}"
                ) from error
            finally:  # what failed in whatever way is not left running
                if connection is not None and connection is not self._connection:
                    connection.close()
        return self._connection

    def _repeat_calls(self, connection: Connection) -> None:
        for name, arguments, was_answered in self._calls:
            try:
                connection.call(name, arguments, timeout_s=self.settings.call_timeout_s)
            except ToolCallError:
                if was_answered:
                    raise

    def _connect(self) -> Connection:
        if self.settings.lives == "episode":
            return self.settings.connect()
        if self._shared is None or self._shared.pid != os.getpid():
            with _lock:
                self._shared = _shared.setdefault(self.settings.key(), _Shared(self.settings.connect))
                self._shared.num_users += 1
        return self._shared.connection()

    def _bury(self, dead: Connection | None, error: ServerDiedError) -> None:
        if dead is not None:
            dead.close()
        self._connection = None
        self._num_restarts += 1
        if self._num_restarts > self.settings.max_restarts:
            raise EnvironmentFailure(f"the MCP server died, or does not start: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None, "_shared": None}


_lock = threading.RLock()
_shared: dict[Hashable, _Shared] = {}
_tools: dict[Hashable, list[Tool]] = {}


def _forget_shared() -> None:
    """Forget what a forked process does not have."""
    global _lock
    _lock = threading.RLock()
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_shared)


class McpEnv(ToolEnv):
    """A `ToolEnv` with the tools of an MCP server, beside its own methods marked with `@tool`.

    Subclass it, or combine it with another one (`class MyEnv(McpEnv, TaskEnv)`), and define the task: `start` and `answer`. A
    call whose arguments do not fit the tool's schema, that the server refuses or answers with an error, or that is not
    answered in time, becomes a message that begins with `Error:`. A server that dies is started again and called again; where
    it dies too often, that is the environment's fault, and the episode fails.
    """

    def __init__(
        self,
        *,
        server: ServerOption,
        server_lives: Literal["episode", "process"] = "episode",
        tool_names: Sequence[str] | None = None,
        start_timeout_s: float = 30.0,
        call_timeout_s: float = 10.0,
        max_restarts: int = 2,
        **options: Any,
    ) -> None:
        """Reach the server, and list its tools.

        Args:
            server: a URL (streamable HTTP), a command as a list of words or as {command, args, env, pass_env, cwd} (stdio), or
                `module:name` of a server in this process.
            server_lives: "episode" starts one for each episode, so that nothing that it remembers goes from one to the next,
                and a fork is a server that got the same calls; "process" uses one for all environments of the process.
            tool_names: which of its tools to offer; `*` stands for any letters. None: all.
            start_timeout_s: how long the server may take to start and to list its tools.
            call_timeout_s: how long a call may take.
            max_restarts: how often a server that died is started again in one episode.
            options: of the next class in the method resolution order.
        """
        super().__init__(**options)
        if server_lives not in ("episode", "process"):
            raise UserError(f"server_lives: give 'episode' or 'process', got {server_lives!r}")
        if isinstance(tool_names, str):
            raise UserError(f"tool_names: give a list of names, got {tool_names!r}")
        self._server = McpServer(
            ServerSettings(
                option=server,
                lives=server_lives,
                start_timeout_s=start_timeout_s,
                call_timeout_s=call_timeout_s,
                max_restarts=max_restarts,
            )
        )
        self._remote: dict[str, Tool] = offered(self._server.tools(), tool_names)
        if twice := sorted(self._remote.keys() & {schema["function"]["name"] for schema in self.tools}):
            raise UserError(f"tool_names: the environment has a tool {twice[0]!r} of its own; leave the server's out")
        self.tools = [*self.tools, *(schema_of(name, tool) for name, tool in self._remote.items())]

    def call_server(self, name: str, /, **arguments: Any) -> str:
        """Call a tool of the server for the environment itself, offered or not: to set a task up, or to see how it ended.

        Raises:
            ToolCallError: with the server's words, where it answers with an error.
            EnvironmentFailure: if the server is gone and does not come back.
        """
        result = self._server.call(name, arguments)
        if result.is_error:
            raise ToolCallError(result_text(result) or f"{name} failed")
        return result_text(result)

    def run_tool(self, name: str, arguments: Any) -> str:
        """Carry out a call, by the server where the tool is one of its."""
        tool = self._remote.get(name)
        if tool is None:
            return super().run_tool(name, arguments)
        return self.call_server(tool.name, **checked_arguments(name, tool, arguments))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Begin a task, with a new server where each episode has its own."""
        self._server.begin()
        return super().reset(seed=seed, options=options)

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Carry out an assistant message; the episode's own server ends with the task."""
        result = super().step(action)
        if result[2]:
            self._server.end()
        return result

    def close(self) -> None:
        """Leave the server."""
        self._server.close()
        super().close()


class McpTaskEnv(McpEnv, TaskEnv):
    """A table of tasks that is played with the tools of an MCP server; its options are those of both."""
