"""An MCP server as one environment uses it: its own in each episode, or one for all environments of the process."""

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

from mcp import StdioServerParameters
from mcp.types import CallToolResult, Tool

from agentrl import EnvironmentFailure
from agentrl.env import ToolCallError
from agentrl_envs.adapters.mcp.connection import Connection, ServerDiedError, ServerOption, target_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerSettings:
    """How to reach a server, and how long to wait for it."""

    option: ServerOption
    """A URL, a command, or a server in this process."""
    lives: Literal["episode", "process"]
    """For how long one serves: one each episode, or all of them."""
    start_timeout_s: float
    call_timeout_s: float
    max_restarts: int
    """How often a server that died is started again in an episode."""

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
        """Of this episode, and whether they were answered: one that took too long may have been carried out."""
        self._num_restarts = 0

    def tools(self) -> list[Tool]:
        """Return the tools that it lists: those of the first start of such a server in this process.

        Raises:
            EnvironmentFailure: where it does not start.
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
        shared, self._shared, self._connection = self._shared, None, None
        if shared is not None and shared.pid == os.getpid():
            with _lock:
                shared.num_users -= 1
                if shared.num_users:
                    return
                _shared.pop(self.settings.key(), None)
            shared.close()

    def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool; where the server dies meanwhile, start it again and call again.

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
