"""Tasksets of verifiers, over a process boundary: its pins clash with ours."""

import json
import os
import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl import EnvironmentFailure, Message, ToolEnv, UserError
from agentrl_envs.adapters.verifiers.process import Worker, WorkerError
from agentrl_envs.options import finite_number, whole_number

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
            UserError: where the taskset cannot be loaded there.
        """
        super().__init__()
        whole_number("max_tasks", max_tasks, at_least=1)
        python = str(Path(python).expanduser())
        self._key = (python, taskset, json.dumps(dict(config or {}), sort_keys=True), str(max_tasks))
        self.goal, self.start_timeout_s, self.timeout_s = finite_number("goal", goal), start_timeout_s, timeout_s
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
        """Return the field `answer` of the task's data, where it has one."""
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
