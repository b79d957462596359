"""Members of a deployment: servers and trainers that are started, watched and ended together."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from agentrl.errors import TrainingError
from agentrl.run.launch import USER_MISTAKE

_POLL_S = 0.5
_END_S = 60.0
"""Seconds that a process that is interrupted may take to end."""
_LONGEST_WAIT_S = 60.0
"""Longest wait before a server is started again; the first takes a second, each further one twice as long."""
_SERVES = b"serving at "


def start(*arguments: Any, **options: Any) -> Any:
    """Start a command; see `agentrl.compare.runner.start`, which loads torch."""
    from agentrl.compare.runner import start as begin

    return begin(*arguments, **options)


class Member:
    """A process of a deployment, with all that it has started. It is interrupted if this process ends, however that ends."""

    def __init__(
        self, name: str, arguments: Callable[[], list[str]], log: IO[bytes], *, gpus: Sequence[str] | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            name: for messages.
            arguments: returns those of `agentrl`, at each start.
            log: file for its output.
            gpus: GPUs that it sees. None: all.
        """
        self.name = name
        self.failures = 0
        """Times in a row that it ended before it served."""
        self.next_start = 0.0
        """Time before which it is not started again."""
        self._arguments, self._log = arguments, log
        self._environment = {**os.environ} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        self._process: Any = None
        self._family: set[psutil.Process] = set()
        self._begin = 0

    @property
    def is_running(self) -> bool:
        """Whether it was started, and its end has not been seen."""
        return self._process is not None

    def start(self) -> None:
        """Start it."""
        self._log.flush()
        self._begin = os.fstat(self._log.fileno()).st_size
        self._process = start(self._arguments(), log=self._log, environment=self._environment)

    def poll(self) -> int | None:
        """Return the exit status of a process that has ended since; what it had started ends too. None: it has not."""
        if self._process is None:
            return None
        with suppress(psutil.NoSuchProcess):
            self._family |= {*psutil.Process(self._process.pid).children(recursive=True)}
        status: int | None = self._process.poll()
        if status is not None:
            self._clear()
        return status

    def has_served(self) -> bool:
        """Return whether a server has said that it serves."""
        return self.is_running and _SERVES in self._written()

    def last_words(self) -> str:
        """Return the last line of its output."""
        lines = self._written().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"{lines[-1].removeprefix('agentrl: ')} (log: {self._log.name})"

    def interrupt(self) -> None:
        """Let it end as Ctrl-C would."""
        self.poll()
        if self._process is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Wait for its end, and after a while end it."""
        end = time.monotonic() + _END_S
        while self.poll() is None and self.is_running:
            if time.monotonic() > end:
                self._process.kill()
            time.sleep(0.05)

    def _written(self) -> bytes:
        return Path(self._log.name).read_bytes()[self._begin :]

    def _clear(self) -> None:
        """End what it has started, in other sessions too, whatever it could do about that itself."""
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # of another process with this number there is none: psutil knows when it began
        psutil.wait_procs(self._family, timeout=_END_S)
        self._process.stdin.close()
        self._process, self._family = None, set()


def watch(
    servers: Sequence[Member], trainers: Member, *, max_restarts: int, say: Callable[[str], object] = lambda _: None
) -> None:
    """Keep servers up, and resume the trainers once these serve, until the run ends; then end everything.

    Raises:
        TrainingError: if the trainers fail, or a server cannot serve, more often than `max_restarts`.
        SystemExit: with 2 for a mistake, which a trainer has printed.
    """
    restarts = 0
    try:
        while True:
            for server in servers:
                _keep_up(server, max_restarts=max_restarts, say=say)
            if not trainers.is_running:
                if all(server.has_served() for server in servers):
                    trainers.start()
            elif (status := trainers.poll()) is not None:
                if status == 0:
                    return
                if status == USER_MISTAKE:
                    sys.exit(USER_MISTAKE)
                restarts += 1
                if restarts > max_restarts:
                    raise TrainingError(
                        f"the trainers ended {restarts} times (deployment.max_restarts: {max_restarts})"
                    )
                say(f"the trainers ended with status {status}: resuming ({restarts} of {max_restarts})")
            time.sleep(_POLL_S)
    finally:
        for member in (trainers, *servers):
            member.interrupt()
        for member in (trainers, *servers):
            member.end()


def _keep_up(server: Member, *, max_restarts: int, say: Callable[[str], object]) -> None:
    """Start a server that is due; note the end of one that has ended."""
    has_served = server.has_served()
    if (status := server.poll()) is not None:
        server.failures = 1 if has_served else server.failures + 1
        if not has_served and (status == USER_MISTAKE or server.failures > max_restarts):
            raise TrainingError(f"{server.name} does not start: {server.last_words()}")
        wait_s = min(_LONGEST_WAIT_S, 2.0 ** (server.failures - 1))
        server.next_start = time.monotonic() + wait_s
        say(f"{server.name} ended with status {status}: starting it again in {wait_s:g} s; a weight sync fills it")
    if not server.is_running and time.monotonic() >= server.next_start:
        server.start()
