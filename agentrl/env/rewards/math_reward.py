"""A reward for mathematical equality, computed in processes of its own: what a model writes can keep sympy busy for ever."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl.errors import UserError
from agentrl.plain_data import abbreviated

_MAX_WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))


def math(
    completion: str, answer: Any, info: dict[str, Any], *, timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
) -> float:
    r"""Return 1 where the answer is mathematically equal to the right one, as `math-verify` sees it; else 0.

    It reads LaTeX (`$...$`, `\boxed{...}`) and plain expressions anywhere in the text: numbers, fractions, sets, intervals,
    equations, matrices. What cannot be told within `timeout_s` seconds or 2 GiB of memory earns 0, and is counted in the metric
    `episode/math_undecided`.

    Args:
        completion: what was answered.
        answer: the right one, as LaTeX (with or without `$`) or as a number.
        info: gets the count.
        timeout_s: deadline, in seconds.

    Raises:
        ValueError: where the right answer is no mathematics, which is a fault of the table.
    """
    info["math_undecided"] = 0.0
    if completion.strip() == str(answer).strip():
        return 1.0
    if find_spec("math_verify") is None:
        raise UserError("the reward math needs math-verify: pip install 'agentrl[math]'")
    if not hasattr(signal, "setitimer"):
        raise UserError("the reward math ends what takes too long by a timer that Windows lacks: train in WSL")
    result = _pool.ask({"answer": str(answer), "completion": completion, "timeout_s": timeout_s})
    info["math_undecided"] = float(result is None)
    if result == "no mathematics":
        raise ValueError(f"the right answer {abbreviated(answer)} is no mathematics; use exact_match")
    return float(result == "equal")


class _Worker:
    """A process that answers one question at a time, and ends itself where one takes too long."""

    def __init__(self) -> None:
        # By its path, so that it imports nothing of agentrl; -P: what stands beside it shadows no module.
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for its parent, whose end it sees
        )

    def ask(self, question: dict[str, Any]) -> str | None:
        """Return its answer. None: it has ended over it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        return str(json.loads(line)) if line.endswith(b"\n") else None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class _Pool:
    """A few workers, each begun when it is needed and kept while it answers."""

    def __init__(self) -> None:
        self._slots = threading.Semaphore(_MAX_WORKERS)
        self._idle: list[_Worker] = []

    def ask(self, question: dict[str, Any]) -> str | None:
        """Ask a worker that is free; one that ends over the question is replaced."""
        with self._slots:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = _Worker()
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


def _begin_again() -> None:
    """Forget the workers: a forked process has their pipes, but they answer its parent."""
    global _pool
    _pool = _Pool()


_pool = _Pool()
atexit.register(lambda: _pool.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
