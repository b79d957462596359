"""A function that plays in processes of its own: `Workers` has them, and each runs this module.

    python -m agentrl.agent.worker module:function

A worker reads a task and its session a line, as JSON, plays all of them at once, and writes a line about the end of each.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TextIO

import httpx2

from agentrl.agent.clients import AgentError, Function, dying_with_parent
from agentrl.agent.session import AgentSession
from agentrl.data.plain import line_of
from agentrl.endpoint.call import RefusalKind, RefusedError, Report
from agentrl.recipe.registry import import_attribute

_GRACE_S = 2.0
"""Seconds that a worker may take to give up a task."""
_numbers = itertools.count(1)


class Workers:
    """A function that plays in other processes: one that ends, or in which a coroutine blocks all others, is replaced."""

    def __init__(self, function: str, *, num: int) -> None:
        """Start none yet.

        Args:
            function: `module:function`.
            num: largest number of processes.
        """
        self._function = function
        self._num = num
        self._workers: list[_Worker] = []

    async def run(self, task: dict[str, Any], session: AgentSession) -> object:
        """Play in the process that has the fewest tasks."""
        self._workers = [worker for worker in self._workers if worker.is_alive]
        if len(self._workers) < self._num:
            self._workers.append(_Worker(self._function))
        worker = min(self._workers, key=lambda each: len(each.waiting))
        number, ended = worker.play(task, session)
        try:
            said = await asyncio.wrap_future(ended)
        except asyncio.CancelledError:
            worker.give_up(number)
            raise
        if "error" in said:
            raise AgentError(said["error"], kind=said["kind"])
        return said["returned"]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()


class _Worker:
    """A process, and a thread that starts it and reads what it writes."""

    def __init__(self, function: str) -> None:
        self.is_alive = True
        self.waiting: dict[int, Future[dict[str, Any]]] = {}
        """Ends of the tasks that are played."""
        self._number = next(_numbers)
        started: Future[None] = Future()
        threading.Thread(target=self._read, args=(function, started), name="agent worker", daemon=True).start()
        started.result()

    def play(self, task: dict[str, Any], session: AgentSession) -> tuple[int, Future[dict[str, Any]]]:
        """Return the number of the task, and its end."""
        number = next(_numbers)
        ended: Future[dict[str, Any]] = Future()
        self.waiting[number] = ended
        ended.set_running_or_notify_cancel()  # whoever waits for it may be cancelled, and it ends later
        fields = ("base_url", "api_key", "anthropic_url", "seed", "split")
        self._write({"number": number, "task": task, "session": {name: getattr(session, name) for name in fields}})
        if not self.is_alive:
            self._end()
        return number, ended

    def give_up(self, number: int) -> None:
        """Cancel a task; kill the process if it does not give way."""
        self._write({"number": number})

        def look() -> None:
            if number in self.waiting:
                self.kill()

        timer = threading.Timer(_GRACE_S, look)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """End the process, with all that it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended: `_read` sees that
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _read(self, function: str, started: "Future[None]") -> None:
        argv = dying_with_parent([sys.executable, "-m", "agentrl.agent.worker", function])
        try:
            process = self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
            )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(None)
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                said = json.loads(line)
                self.waiting.pop(said["number"]).set_result(said)
        self.kill()
        self.is_alive = False
        self._end()
        process.stdout.close()
        with suppress(OSError):  # what it did not read
            process.stdin.close()

    def _end(self) -> None:
        """Say of all that is played that the process has ended."""
        kind = f"exit status {self._process.wait()}"
        words = f"the process that played it ended with {kind}"
        if len(self.waiting) > 1:  # nobody knows whose fault it is: that must not look the same the next time
            kind += f" of worker {self._number}"
        while self.waiting:
            with suppress(KeyError):
                self.waiting.popitem()[1].set_result({"error": words, "kind": kind})


def main() -> None:
    """Play until nothing can be read."""
    said = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)  # what the function prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    asyncio.run(_serve(sys.argv[1], asked, said))


async def _serve(name: str, asked: TextIO, said: TextIO) -> None:
    loop = asyncio.get_running_loop()
    playing: dict[int, asyncio.Task[None]] = {}

    async def play(number: int, task: dict[str, Any], session: dict[str, Any]) -> None:
        end = await _end_of(name, task, session)
        said.write(json.dumps({"number": number, **end}, default=repr) + "\n")
        del playing[number]

    def take(order: dict[str, Any]) -> None:
        if "task" in order:
            playing[order["number"]] = loop.create_task(play(**order))
        elif order["number"] in playing:
            playing[order["number"]].cancel()

    def read() -> None:
        for line in asked:
            loop.call_soon_threadsafe(take, json.loads(line))
        os._exit(0)  # whoever started it is gone

    threading.Thread(target=read, daemon=True).start()
    await loop.create_future()


async def _end_of(name: str, task: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
    """Return what the function returned, or how it failed."""
    try:
        function = Function(import_attribute(name, field="agent.run", kind="function"))
        report = _reporter(session["base_url"], session["api_key"])
        return {"returned": await function.run(task, AgentSession(**session, report=report))}
    except BaseException as error:  # noqa: BLE001 - SystemExit and a cancellation too: they are this task's alone
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        return {"error": f"{line_of(error)} ({place})", "kind": f"{type(error).__name__} at {place}"}


def _reporter(base_url: str, api_key: str) -> Callable[[Report], None]:
    """Return what sends a report to the endpoint."""

    def report(made: Report) -> None:
        kind, body = ("state", {"state": made.state}) if made.reward is None else ("reward", {"reward": made.reward})
        headers = {"Authorization": f"Bearer {api_key}"}
        response = httpx2.post(
            f"{base_url}/agentrl/{kind}",
            json=body if made.call is None else {**body, "call": made.call},
            headers=headers,
            timeout=60,
            trust_env=False,
        )
        if response.status_code >= 400:
            raise RefusedError(RefusalKind.INVALID, response.json()["error"]["message"])

    return report


if __name__ == "__main__":
    main()
