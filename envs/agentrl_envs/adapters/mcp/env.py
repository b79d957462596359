"""An environment whose tools are those of an MCP server, beside its own."""

from collections.abc import Sequence
from typing import Any, Literal

from mcp.types import Tool

from agentrl import Message, ToolEnv, UserError
from agentrl.env import TaskEnv, ToolCallError
from agentrl_envs.adapters.mcp.connection import ServerOption
from agentrl_envs.adapters.mcp.results import checked_arguments, offered, result_text, schema_of
from agentrl_envs.adapters.mcp.server import McpServer, ServerSettings


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
            server: a URL (streamable HTTP), a command as a list of words or as {command, args, env, cwd} (stdio), or
                `module:name` of a server in this process.
            server_lives: "episode" starts one for each episode, so that nothing that it remembers goes from one to the next,
                and a fork is a server that was told the same; "process" uses one for all environments of the process.
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
            EnvironmentFailure: where the server is gone and does not come back.
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
