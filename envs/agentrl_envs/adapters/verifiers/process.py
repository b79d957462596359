"""A process of a Python that has verifiers, and its protocol: a JSON object a line."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from agentrl import Message, UserError

_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerError(Exception):
    """The worker is gone, hangs or says nothing that can be read."""


class Worker:
    """A process of a Python that has verifiers: one for all environments of a taskset, started again when it dies."""

    def __init__(self, python: str, *arguments: str, start_timeout_s: float) -> None:
        if not hasattr(os, "killpg"):
            raise UserError("verifiers is run in a process group of its own, which Windows lacks: train in WSL")
        self.num_users = 0
        # -P: the folder of the script is no place for imports; its neighbours bear the names of libraries.
        self._argv, self._start_timeout_s = (python, "-P", str(_SCRIPT), *arguments), start_timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: list[dict[str, Any]] = []

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks."""
        with self._lock:
            self._start()
            return self._tasks

    def score(self, task: int, messages: list[Message], *, timeout_s: float) -> dict[str, Any]:
        """Return the score of a dialogue; a worker that died since the last one is started again."""
        line = json.dumps({"task": task, "messages": messages}).encode() + b"\n"
        with self._lock:
            process = self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError as error:
                raise self._lost(str(error)) from error
            return self._line(process, timeout_s)

    def close(self) -> None:
        """End the process and whatever it started."""
        with self._lock:
            self._stop()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerError(str(error)) from error
        reply = self._line(self._process, self._start_timeout_s)
        if "error" in reply:
            self._stop()
            raise WorkerError(reply["error"])
        self._tasks = reply["tasks"]
        return self._process

    def _line(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        text, deadline = b"", time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._lost(f"no answer within {timeout_s:g} s")
                piece = os.read(process.stdout.fileno(), 2**20)
                if not piece:
                    raise self._lost("it ended")
                text += piece
        reply: dict[str, Any] = json.loads(text)
        return reply

    def _lost(self, why: str) -> WorkerError:
        size = os.fstat(self._stderr.fileno()).st_size
        said = os.pread(self._stderr.fileno(), 500, max(0, size - 500)).decode(errors="replace")
        self._stop()
        return WorkerError(f"{why}; its stderr ends: {' '.join(said.split())}")

    def _stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not flushed
                    pipe.close()
        self._stderr.close()
        self._process = None
