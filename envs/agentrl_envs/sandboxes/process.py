"""Run a program that may do anything, and be rid of it by a deadline."""

import atexit
import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CHUNK = 1 << 16
_POLL_S = 0.05
"""How often to look whether the program has ended, where something it started holds its outputs open."""
_CLOSED_POLL_S = 0.001
"""The same, where nothing will tell."""
_LAST_OUTPUT_S = 1.0
"""How long to wait for the end of the outputs once the program is dead, in seconds."""

_running: set[int] = set()
"""Process groups of what runs now, on threads that the end of this process does not wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a program did."""

    returncode: int
    """Exit status; negative: the signal that ended it."""
    output: bytes
    """Of its first output."""
    num_cut: int
    """Bytes of it that are left out."""
    second: bytes
    """Of its standard error."""
    is_cut: bool
    """True where standard error was longer than asked for, so that the program was killed."""
    timed_out: bool


def run_process(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout_s: float,
    max_output: int,
    max_second: int,
    environment: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
) -> Finished:
    """Run a program in its own session and process group, and kill the group at the deadline and when the program ends.

    The end of this process kills it too, where that is not killed itself.
    Its environment is the one given, and it inherits no descriptor but `pass_fds`. Outputs are read on to the end, but no more
    of them is kept than asked for.

    Raises:
        OSError: when it cannot be started.
    """
    deadline = time.monotonic() + timeout_s
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
        bufsize=0,
    ) as process:
        _running.add(process.pid)
        try:
            with contextlib.closing(_Pipes(process, stdin, (max_output, max_second))) as pipes:
                while not (has_ended := _has_ended(process.pid)) and not pipes.is_over and time.monotonic() < deadline:
                    pipes.move(_POLL_S if pipes.are_open else _CLOSED_POLL_S)
                returncode = _end(process)
                last = time.monotonic() + _LAST_OUTPUT_S
                while pipes.are_open and time.monotonic() < last:
                    pipes.move(_POLL_S)
        finally:
            _end(process)
    (output, second), (num_cut, num_over) = pipes.kept, pipes.num_cut
    return Finished(
        returncode=returncode,
        output=bytes(output),
        num_cut=num_cut,
        second=bytes(second),
        is_cut=num_over > 0,
        timed_out=not has_ended and num_over == 0,
    )


def limit(name: str, value: int) -> str:
    """Return an option of the program prlimit, no higher than this process itself may have."""
    import resource

    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    return f"--{name}={value if most == resource.RLIM_INFINITY else min(value, most)}"


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kill the process group, and collect the status: only then can another process have its number."""
    if process.returncode is None:
        _kill(process.pid)
        _running.discard(process.pid)
    return process.wait()


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@atexit.register
def _kill_all() -> None:
    for group in tuple(_running):
        _kill(group)


def _has_ended(pid: int) -> bool:
    """Tell whether a child has ended, without collecting its status."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Pipes:
    """Feeds a program's input and reads its two outputs, a little at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]", stdin: bytes, limits: tuple[int, int]) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.kept = (bytearray(), bytearray())
        self.num_cut = [0, 0]
        self._limits = limits
        self._stdin, self._left = process.stdin.fileno(), memoryview(stdin)
        self._process = process
        self._selector = selectors.DefaultSelector()
        self._open = {process.stdout.fileno(): 0, process.stderr.fileno(): 1}
        for number in self._open:
            self._selector.register(number, selectors.EVENT_READ)
        os.set_blocking(self._stdin, False)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)

    @property
    def are_open(self) -> bool:
        """True while an output may have more to say."""
        return bool(self._open)

    @property
    def is_over(self) -> bool:
        """True where standard error has said too much."""
        return self.num_cut[1] > 0

    def move(self, timeout_s: float) -> None:
        """Wait for a pipe that is ready, and read or write a piece of it."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._stdin:
                self._feed()
            else:
                self._read(key.fd, self._open[key.fd])

    def close(self) -> None:
        self._selector.close()

    def _feed(self) -> None:
        try:
            self._left = self._left[os.write(self._stdin, self._left[:_CHUNK]) :] if self._left else self._left
        except BrokenPipeError:
            self._left = self._left[:0]
        if not self._left:
            assert self._process.stdin
            self._selector.unregister(self._stdin)
            self._process.stdin.close()

    def _read(self, number: int, which: int) -> None:
        if not (data := os.read(number, _CHUNK)):
            self._selector.unregister(number)
            del self._open[number]
            return
        kept = self.kept[which]
        piece = data[: max(0, self._limits[which] - len(kept))]
        kept += piece
        self.num_cut[which] += len(data) - len(piece)
