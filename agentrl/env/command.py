"""Run what can hang or harm in a process of its own, which dies with everything that it started."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass


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
    started stays behind.

    Raises:
        TimeoutError: after `timeout_s` seconds.
        OSError: when the program cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reader = asyncio.create_task(_read(process.stdout, max_output))
    try:
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may end without reading its input
                process.stdin.write(stdin.encode())
                await process.stdin.drain()
            process.stdin.close()
            returncode = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children that hold the pipe open would keep the reader waiting
        await process.wait()
        output = await reader
    return CommandResult(returncode=returncode, output=output.decode(errors="replace"))


async def _read(stream: asyncio.StreamReader, limit: int) -> bytes:
    """Read to the end, keeping the first `limit` bytes: a program that floods its output must not fill memory."""
    kept = bytearray()
    while chunk := await stream.read(65536):
        kept += chunk[: limit - len(kept)]
    return bytes(kept)
