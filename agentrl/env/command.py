"""Run what can hang or harm in a process of its own, which dies with everything that it started."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import UserError

_LAST_OUTPUT_S = 1.0
"""How long to wait for the end of the output once the process group is dead, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command did."""

    returncode: int
    """Exit status; negative: the signal that ended it."""
    output: str
    """Standard output and error, as they came, cut to `max_output` bytes."""


async def run_command(
    argv: Sequence[str], *, stdin: str = "", timeout_s: float = 10.0, max_output: int = 10_000, cwd: str | None = None
) -> CommandResult:
    """Run a program without a shell, in its own process group, for use in coroutine tools.

    The whole group is killed at the deadline, on cancellation, and when the program itself ends, so that nothing it
    started stays behind (but for a daemon that opens a session of its own; against those, use a container).

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
