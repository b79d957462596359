"""Processes that answer questions about what a model writes, which may keep whoever reads it busy for ever."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from agentrl.errors import UserError

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
