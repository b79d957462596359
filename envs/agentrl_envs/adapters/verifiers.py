"""Tasksets of verifiers, in a process of a Python that has them, a JSON object a line: its pins clash with ours."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl import EnvironmentFailure, Message, ToolEnv, UserError
from agentrl.data.files import absolute
from agentrl_envs.options import finite_number, whole_number

_SCRIPT = Path(__file__).with_name("verifiers_worker.py")


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
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd=absolute(""),
                start_new_session=True,
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


_workers: dict[tuple[str, ...], Worker] = {}
_lock = threading.Lock()


def _begin_again() -> None:
    """Forget the workers: a forked process has none of its own."""
    global _lock
    _lock = threading.Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class Verifiers(ToolEnv):
    """One task, one turn: the taskset's own reward functions score what the policy says.

    Rewards are the sum of the taskset's, by their weights; a task is solved where that is at least `goal`.
    """

    turn_rewards = False

    def __init__(
        self,
        *,
        taskset: str,
        python: str,
        config: Mapping[str, Any] | None = None,
        goal: float = 1.0,
        max_tasks: int = 1_000,
        start_timeout_s: float = 120.0,
        timeout_s: float = 60.0,
    ) -> None:
        """Start the worker, and list the tasks.

        Args:
            taskset: its id, as verifiers has it: an installed package that exports a Taskset.
            python: interpreter of the virtual environment where verifiers and the taskset are installed.
            config: fields of the taskset's config.
            goal: least reward of a solved task.
            max_tasks: tasks that are taken of a long taskset, or one without end.
            start_timeout_s: how long the worker may take to start.
            timeout_s: how long a score may take.

        Raises:
            UserError: if the taskset cannot be loaded there.
        """
        super().__init__()
        whole_number("max_tasks", max_tasks, at_least=1)
        python = str(absolute(python)) if "/" in python else python
        self._key = (python, taskset, json.dumps(dict(config or {}), sort_keys=True), str(max_tasks))
        self.goal = finite_number("goal", goal)
        self.start_timeout_s = start_timeout_s
        self.timeout_s = timeout_s
        self._is_user = False
        try:
            tasks = self._worker().tasks()
        except WorkerError as error:
            self.close()
            raise UserError(f"taskset: {taskset!r} cannot be loaded by {python}: {error}") from error
        self._numbers: dict[str, list[int]] = {"train": [], "eval": []}
        for number, task in enumerate(tasks):
            is_eval = sha256(json.dumps(task["messages"]).encode()).digest()[0] < 64
            self._numbers["eval" if is_eval else "train"].append(number)
        self._tasks = tasks
        self.number = 0
        self.is_answered = False

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has: a quarter, by the hash of their prompts, is held out."""
        return len(self._numbers[split])

    def start(self, options: dict[str, Any]) -> list[Message]:
        """Choose a task."""
        numbers, index = self._numbers[options.get("split", "train")], options.get("task_index")
        self.number = numbers[int(self.np_random.integers(len(numbers))) if index is None else index]
        self.is_answered = False
        return [dict(message) for message in self._tasks[self.number]["messages"]]

    def answer(self, text: str) -> None:
        """Let the taskset score the answer."""
        result = self._score(text)
        gold = self.gold_answer()
        if "error" in result and gold is not None and "error" not in self._score(gold):
            result = {"rewards": {}, "skipped": []}  # it is the answer: what scorers cannot read is wrong
            self._info["scorer_errors"] = 1
        if "error" in result or result["skipped"]:
            why = result.get("error") or f"{', '.join(result['skipped'])} did not run: it needs a container"
            raise EnvironmentFailure(f"the taskset cannot score: {why}")
        for name, value in result["rewards"].items():
            self.reward(value, name)
        total = float(sum(result["rewards"].values()))
        self.is_answered = True
        self.finish(success=total >= self.goal, score=min(max(total, 0.0), 1.0))

    def state_key(self) -> str:
        """Return the task, and whether there was an answer."""
        return f"{self.number}/{self.is_answered}"

    def gold_answer(self) -> str | None:
        """Return the field `answer` of the task's data, if it has one."""
        answer: str | None = self._tasks[self.number]["answer"]
        return answer

    def close(self) -> None:
        """Leave the worker; it ends with the last environment that uses it."""
        with _lock:
            if self._is_user and self._key in _workers:
                worker = _workers[self._key]
                worker.num_users -= 1
                if worker.num_users == 0:
                    worker.close()
                    del _workers[self._key]
            self._is_user = False
        super().close()

    def _score(self, text: str) -> dict[str, Any]:
        messages = [*self._tasks[self.number]["messages"], {"role": "assistant", "content": text}]
        try:
            return self._worker().score(self.number, messages, timeout_s=self.timeout_s)
        except WorkerError as error:
            raise EnvironmentFailure(f"the worker of verifiers failed: {error}") from error

    def _worker(self) -> Worker:
        with _lock:
            worker = _workers.setdefault(self._key, Worker(*self._key, start_timeout_s=self.start_timeout_s))
            if not self._is_user or worker.num_users == 0:
                worker.num_users += 1
                self._is_user = True
            return worker

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_is_user": False}
