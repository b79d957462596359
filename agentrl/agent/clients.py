"""Programs that play an episode: a function of Python, a command in a folder of its own, a service."""

import asyncio
import inspect
import json
import math
import os
import shutil
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import httpx2

from agentrl.agent.session import AgentSession
from agentrl.env.subprocesses import CommandResult, run_command
from agentrl.errors import AgentRLError

_TAIL = 2000
"""Characters of a command's output that an error shows."""
_MAX_OUTPUT = 2**20
"""Bytes of a command's output that are kept."""


class AgentError(AgentRLError):
    """A program ended otherwise than by saying how it went."""

    def __init__(self, words: str, *, kind: str) -> None:
        """Take the words, and what is the same for the same end."""
        super().__init__(words)
        self.kind = kind


class Client(Protocol):
    """Plays one task after the other, each in a session of its own; many at once."""

    async def run(self, task: dict[str, Any], session: AgentSession) -> object:
        """Play a task, and return what the program says in the end: its reward, None, or a mapping.

        Raises:
            Exception: whatever the program raises; `AgentError` if it has no exceptions.
        """


@dataclass(frozen=True, slots=True)
class Function:
    """A function of Python: a coroutine shares an event loop with others, any other has a thread of its own."""

    function: Callable[..., Any]

    async def run(self, task: dict[str, Any], session: AgentSession) -> object:
        """Call it."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(task, session)
        returned = await _on_thread(lambda: self.function(task, session))
        return await returned if inspect.isawaitable(returned) else returned


async def _on_thread(function: Callable[[], Any]) -> Any:
    """Run a function on a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(error: BaseException | None, returned: Any) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(returned)
        else:
            done.set_exception(error)

    def work() -> None:
        try:
            outcome: tuple[BaseException | None, Any] = None, function()
        except StopIteration as stop:  # no future takes it
            outcome = RuntimeError(f"StopIteration: {stop}"), None
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it is this thread's alone
            outcome = error, None
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await done


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program in a folder of its own, which is deleted afterwards; it is killed with all that it started."""

    argv: Sequence[str]
    """`{prompt}` and `{COLUMN}` stand for texts of the task."""
    variables: Mapping[str, str]
    """Environment variables beside those of the session."""
    files: Path | None = None
    """Folder whose content each run finds in its own. None: it begins empty."""
    prompt: str | None = None
    """Column for which `{prompt}` stands."""
    check: Sequence[str] = ()
    """Command that is run in the folder afterwards: exit status 0 is reward 1, any other 0. Empty: none."""

    async def run(self, task: dict[str, Any], session: AgentSession) -> object:
        """Run it, and then its check, which pays. Without one it returns None: rewards come from elsewhere."""
        with tempfile.TemporaryDirectory(prefix="agentrl-agent-", ignore_cleanup_errors=True) as name:
            if self.files is not None:
                await asyncio.to_thread(shutil.copytree, self.files, name, dirs_exist_ok=True, symlinks=True)
            variables = {"HOME": name, **_variables(session), "AGENTRL_TASK": json.dumps(task), **self.variables}
            texts = {**task, **({"prompt": task[self.prompt]} if self.prompt else {})}
            ended = await _run([_filled(part, texts) for part in self.argv], name, variables)
            if ended.returncode:
                words = f"the command ended with exit status {ended.returncode}: {ended.output.strip()[-_TAIL:]}"
                raise AgentError(words, kind=f"exit status {ended.returncode}")
            if not self.check:
                return None
            passed = (await _run(self.check, name, variables)).returncode == 0
            return {"reward": float(passed), "success": passed}


async def _run(argv: Sequence[str], folder: str, variables: Mapping[str, str]) -> CommandResult:
    """Run a command to its end, however long it takes: whoever waits for it looks for silence."""
    return await run_command(
        dying_with_parent(argv), cwd=folder, env=variables, timeout_s=math.inf, max_output=_MAX_OUTPUT
    )


def _filled(part: str, texts: Mapping[str, Any]) -> str:
    for name, value in texts.items():
        part = part.replace(f"{{{name}}}", value if isinstance(value, str) else json.dumps(value))
    return part


def _variables(session: AgentSession) -> dict[str, str]:
    """Return the variables from which SDKs take address and key."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.anthropic_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_AUTH_TOKEN": session.api_key,
        "AGENTRL_SEED": str(session.seed),
        "AGENTRL_SPLIT": session.split,
    }


_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(argv: Sequence[str]) -> list[str]:
    """Return a command that is killed when this process is, however it ends (Linux)."""
    if not sys.platform.startswith("linux"):
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *argv]


@cache
def _tls() -> ssl.SSLContext:
    """Return what checks certificates; to read those of the system takes tens of milliseconds."""
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A program elsewhere, which plays a task that is posted to it and answers with its reward."""

    url: str
    timeout_s: float

    async def run(self, task: dict[str, Any], session: AgentSession) -> object:
        """Post `{task, base_url, api_key, anthropic_url, seed, split}`; the answer is the reward, or a mapping."""
        body = {
            "task": task,
            "base_url": session.base_url,
            "api_key": session.api_key,
            "anthropic_url": session.anthropic_url,
            "seed": session.seed,
            "split": session.split,
        }
        try:
            async with httpx2.AsyncClient(timeout=self.timeout_s, verify=_tls()) as client:
                response = await client.post(self.url, json=body)
        except httpx2.HTTPError as error:
            raise AgentError(
                f"agent.url: {self.url}: {type(error).__name__} {error}".strip(), kind=type(error).__name__
            ) from None
        if response.status_code >= 400:
            words = f"agent.url: {self.url} answered {response.status_code}: {response.text[:_TAIL]}"
            raise AgentError(words, kind=f"status {response.status_code}")
        try:
            return response.json()
        except ValueError:
            raise AgentError(f"agent.url: {self.url} answered with no JSON", kind="no JSON") from None
