"""Environments of OpenEnv servers, over the WebSocket that each session has."""

import contextlib
import json
import urllib.request
from typing import Any

from agentrl import EnvironmentFailure, UserError
from agentrl.env import ToolCallError, arguments_object
from agentrl_envs.adapters.common import ReplayedEnv
from agentrl_envs.options import finite_number

try:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import ClientConnection, connect

    from agentrl_envs.adapters.common import check_arguments
except ModuleNotFoundError as error:
    raise UserError(f"OpenEnv's protocol needs websockets ({error}); pip install 'agentrl[openenv]'") from error

_HIDDEN = {"done", "reward", "metadata"}
_MAX_BYTES = 2**24
_CLOSING_S = 2.0
"""Seconds that the server may take to close a session."""


class OpenEnv(ReplayedEnv):
    """One tool, `act`, whose parameters are the server's actions; its result is the observation, as JSON.

    An environment of a single field (`message`) is also played in text: a turn without a call is that field. Rewards are the
    server's; the task is solved if the last one is at least `goal`. The server gets each task's seed.
    """

    source: ClientConnection | None
    """The session; None before the first one, and in a copy that has not moved yet."""

    def __init__(self, *, url: str, prompt: str = "", goal: float = 1.0, timeout_s: float = 30.0) -> None:
        """Ask the server for its actions.

        Args:
            url: of the server, such as `http://127.0.0.1:8000`.
            prompt: what the first message begins with; OpenEnv has none of its own.
            goal: least last reward of a solved task.
            timeout_s: how long the server may take to connect and to answer.

        Raises:
            UserError: if there is no such server.
        """
        super().__init__()
        self.url = url.rstrip("/")
        self.prompt = prompt
        self.goal = finite_number("goal", goal)
        self.timeout_s = timeout_s
        try:
            with urllib.request.urlopen(f"{self.url}/schema", timeout=timeout_s) as reply:
                action = json.load(reply)["action"]
            fields = action.get("properties", {}).items()  # an action may have none
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"url: {url!r} is no OpenEnv server: {type(error).__name__}: {error}") from error
        properties = {name: schema for name, schema in fields if name != "metadata"}
        self.schema = {**action, "properties": properties}
        self.field = next(iter(properties)) if len(properties) == 1 else None
        function = {"name": "act", "description": "Take an action.", "parameters": self.schema}
        self.tools = [{"type": "function", "function": function}]
        self.seed, self.split = 0, "train"
        self.source = None

    def start(self, options: dict[str, Any]) -> str:
        """Begin an episode in a session of its own; train has even seeds, eval odd ones."""
        self.seed = 2 * int(self.np_random.integers(2**30)) + (options.get("split") == "eval")
        said = self._text(self.begin()["observation"])
        return "\n".join(filter(None, (self.prompt, said)))

    def run_tool(self, name: str, arguments: Any) -> str:
        """Take an action."""
        if name != "act":
            raise ToolCallError(f"unknown tool {name!r}; the tools are act")
        given = arguments_object(name, arguments)
        check_arguments(name, given, self.schema)
        return self._take(given)

    def answer(self, text: str) -> str:
        """Take the text as the only field of an action, if there is only one."""
        if self.field is None or self.schema["properties"][self.field].get("type") != "string":
            return "Call act."
        try:
            return self._take({self.field: text})
        except ToolCallError as error:
            return f"Error: {error}"

    def close(self) -> None:
        """End the session."""
        self._leave()
        super().close()

    def begin_source(self) -> dict[str, Any]:
        """Open a session, and reset it with the seed."""
        self._leave()
        url = self.url.replace("http", "ws", 1) + "/ws"
        try:
            session = connect(
                url, open_timeout=self.timeout_s, close_timeout=_CLOSING_S, max_size=_MAX_BYTES, proxy=None
            )
            self.source = session.__enter__()  # left by close()
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailure(f"the OpenEnv server {self.url} cannot be reached: {error}") from error
        return self._ask("reset", {"seed": self.seed})

    def step_source(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take an action."""
        return self._ask("step", action)

    def _leave(self) -> None:
        """End the session, if there is one: the server closes it, which else logs a traceback for each."""
        if self.source is not None:
            with contextlib.suppress(WebSocketException, OSError):
                self.source.send(json.dumps({"type": "close"}))
                self.source.recv(timeout=_CLOSING_S)
            self.source.close()
            self.source = None

    def _take(self, action: dict[str, Any]) -> str:
        result = self.act(action)
        reward, is_over = result.get("reward"), bool(result.get("done"))
        if reward is not None or is_over:
            self.reward(reward, "server")
        if is_over:
            self.finish(success=None if reward is None else float(reward) >= self.goal)
        return self._text(result["observation"])

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self.source is not None
        try:
            message = json.dumps({"type": kind, "data": data}, allow_nan=False)
        except ValueError as error:
            raise ToolCallError(str(error)) from None
        try:
            self.source.send(message)
            reply = json.loads(self.source.recv(timeout=self.timeout_s))
        except (OSError, WebSocketException, ValueError) as error:  # TimeoutError is an OSError
            self.source.close()
            raise EnvironmentFailure(
                f"the OpenEnv server {self.url} does not answer: {type(error).__name__}: {error}"
            ) from error
        if reply["type"] == "error":
            error_data = reply.get("data", {})
            words = f"{error_data.get('message', 'no message')} ({error_data.get('code', 'no code')})"
            if kind == "step":
                raise ToolCallError(words)
            raise EnvironmentFailure(f"the OpenEnv server {self.url} cannot reset: {words}")
        result: dict[str, Any] = reply["data"]
        return result

    def _text(self, observation: dict[str, Any]) -> str:
        shown = {name: value for name, value in observation.items() if name not in _HIDDEN}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return text
        return json.dumps(shown, ensure_ascii=False)
