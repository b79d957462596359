"""Code that can hang or harm, run in a process of its own, which dies with everything that it started.

`CommandResult` is what a command returned; workers answer questions about a model's text, which may keep a reader busy
for ever.
"""

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import UserError

_LAST_OUTPUT_S = 1.0
"""Seconds to wait for the end of the output once the process group is dead."""


_PASSED = (
    "HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "SHELL",
    "SYSTEMROOT", "TEMP", "TERM", "TMP", "TMPDIR", "TZ", "USER",
)  # fmt: skip
"""Variables that a program needs to run, and that hold no key."""


def passed_variables() -> dict[str, str]:
    """Return the variables of this process that programs inherit: none that may hold a key."""
    return {name: os.environ[name] for name in _PASSED if name in os.environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Outcome of a command."""

    returncode: int
    """Exit status; negative: the signal that ended it."""
    output: str
    """Standard output and error, as they came, cut to `max_output` bytes."""


async def run_command(
    argv: Sequence[str],
    *,
    stdin: str = "",
    timeout_s: float = 10.0,
    max_output: int = 10_000,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a program without a shell, in its own process group, for use in coroutine tools.

    The whole group is killed at the deadline, on cancellation, and when the program itself ends, so that nothing it
    started stays behind (but for a daemon that opens a session of its own; against those, use a container). Of this process's
    variables it inherits those that a program needs to run (`PATH`, `HOME`, `LANG` and the like), and no key; `env` has more.

    Raises:
        UserError: on Windows, which has no process groups.
        TimeoutError: after `timeout_s` seconds.
        OSError: when the program cannot be started.
    """
    if not hasattr(os, "killpg"):
        raise UserError("run_command needs process groups, which Windows lacks: train in WSL")
    # A start that is cancelled would kill the program alone, and wait for all that hold its output: it goes on, shielded.
    start = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(
            lambda: _Collector(max_output),
            *argv,
            cwd=cwd,
            env={**passed_variables(), **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    )
    try:
        async with asyncio.timeout(timeout_s):
            transport, protocol = await asyncio.shield(start)
            pipe = transport.get_pipe_transport(0)
            assert isinstance(pipe, asyncio.WriteTransport)
            pipe.write(stdin.encode())
            pipe.write_eof()
            await protocol.exited.wait()
    finally:
        transport, protocol = await start
        with contextlib.suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        await protocol.exited.wait()
        with contextlib.suppress(TimeoutError):  # a child that left the group may still hold the pipe
            await asyncio.wait_for(protocol.drained.wait(), _LAST_OUTPUT_S)
        transport.close()
    returncode = transport.get_returncode()
    assert returncode is not None
    return CommandResult(returncode=returncode, output=protocol.output.decode(errors="replace"))


class _Collector(asyncio.SubprocessProtocol):
    """Keeps the first `limit` bytes of output and reads on: a flood must neither fill memory nor block the program.

    A protocol of our own, because before Python 3.13 `asyncio.subprocess.Process.wait` also waits until every child
    that holds the pipes has ended.
    """

    def __init__(self, limit: int) -> None:
        self.output = bytearray()
        self.exited, self.drained = asyncio.Event(), asyncio.Event()
        self._limit = limit

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002 - there is one output
        self.output += data[: self._limit - len(self.output)]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        if fd == 1:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()


MAX_WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))


class WorkerPool:
    """A few processes of one script, each begun when it is needed and kept while it answers."""

    def __init__(self, script: Path, *, purpose: str) -> None:
        """Begin none yet.

        Args:
            script: reads a question a line, JSON with a `timeout_s`, after which it ends itself; writes an answer a line.
            purpose: what needs it, for the error where it cannot run.
        """
        self._script, self._purpose = script, purpose
        self._begin_again()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_again)

    def check_platform(self) -> None:
        """Refuse a system whose processes cannot end themselves."""
        if not hasattr(signal, "setitimer"):
            raise UserError(f"{self._purpose} ends what takes too long by a timer that Windows lacks: train in WSL")

    def ask(self, question: dict[str, Any]) -> Any:
        """Return the answer of a process that is free. None: it has ended over the question; the next one has another."""
        self.check_platform()
        with self._slots:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = _Worker(self._script)
            answer = worker.ask(question)
            if answer is None:
                worker.close()
            else:
                self._idle.append(worker)
            return answer

    def close(self) -> None:
        """End all that are free."""
        while self._idle:
            self._idle.pop().close()

    def _begin_again(self) -> None:
        """Forget the processes: a forked one has their pipes, but they answer its parent."""
        self._slots = threading.Semaphore(MAX_WORKERS)
        self._idle: list[_Worker] = []


class _Worker:
    """A process that answers one question at a time, and ends itself where one takes too long."""

    def __init__(self, script: Path) -> None:
        # By its path, so that it imports nothing of agentrl; -P: what stands beside it shadows no module.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=passed_variables(),
            start_new_session=True,  # an interrupt is for its parent, whose end it sees
        )

    def ask(self, question: dict[str, Any]) -> Any:
        """Return its answer. None: it has ended over it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
