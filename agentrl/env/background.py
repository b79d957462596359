"""One event loop on a daemon thread, shared by all coroutines of the environments of a process."""

import asyncio
import atexit
import concurrent.futures
import logging
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any

from agentrl.errors import EnvironmentFailure

log = logging.getLogger(__name__)

_GRACE_S = 2.0
"""Seconds that a cancelled coroutine may take to give way."""
_LAST_WORK_S = 5.0
"""Seconds that the end of the process waits for coroutines that it has cancelled."""
_MAX_BLOCKED = 8
"""Loops that are blocked at the same time, beyond which coroutines fail their episodes."""


class BlockedLoopError(TimeoutError):
    """The event loop of coroutines is blocked by one of them."""


class _Loop:
    """An event loop on a thread of its own, until `abandon`: then it ends as soon as nothing blocks it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(
            concurrent.futures.ThreadPoolExecutor(thread_name_prefix="agentrl-tools-helper")
        )
        self._has_ended = False
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_abandoned = False
        self.thread = threading.Thread(target=self._run, name="agentrl-tools", daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        future = asyncio.run_coroutine_threadsafe(self._as_task(coroutine), self._loop)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def is_blocked(self) -> bool:
        """Return whether it runs nothing for a while."""
        runs = threading.Event()
        self._loop.call_soon_threadsafe(runs.set)
        return not runs.wait(_GRACE_S)

    def abandon(self) -> None:
        """Cancel whatever runs on the loop, and close it: at once for who waits, on the loop once it is free."""
        self.is_abandoned = True
        for future in list(self._waiting):
            future.cancel()
        self._loop.call_soon_threadsafe(lambda: self._tasks.add(self._loop.create_task(self._end(set(self._tasks)))))

    def where(self) -> str:
        """Return the line that the loop's thread is at."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        line = traceback.extract_stack(frame)[-1] if frame is not None else None
        return "an unknown line" if line is None else f"{line.filename}:{line.lineno}: {line.line}"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left, and closes the loop
            while not self._has_ended:
                with suppress(
                    SystemExit, KeyboardInterrupt
                ):  # of a task that a coroutine began: whoever awaits it hears of it
                    runner.get_loop().run_forever()

    async def _as_task(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await coroutine

    async def _end(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Stop once those that were cancelled have given way: then the runner cancels what they themselves wait for."""
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE_S)
        self._has_ended = True
        self._loop.stop()


class _Shared:
    """The loop in use, and those that were abandoned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Loop | None = None
        self._blocked: list[_Loop] = []

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "tuple[_Loop, concurrent.futures.Future[Any]]":
        with self._lock:  # nothing is submitted to a loop that has been abandoned
            if self._current is None:
                self._current = _Loop()
            return self._current, self._current.submit(coroutine)

    def abandon(self, loop: _Loop) -> None:
        """Let the next call begin another loop; whichever waiter finds this one blocked first does it for all.

        Raises:
            EnvironmentFailure: when too many are blocked.
        """
        with self._lock:
            if self._current is not loop:
                return
            self._current = None
            self._blocked = [lost for lost in [*self._blocked, loop] if lost.thread.is_alive()]
            where, num_blocked = loop.where(), len(self._blocked)
            loop.abandon()
        log.warning(
            "a coroutine blocks the event loop that all of them share, at %s; write it as `def`, or await "
            "asyncio.to_thread(...)",
            where,
        )
        if num_blocked > _MAX_BLOCKED:
            raise EnvironmentFailure(
                f"{num_blocked} coroutines block their event loops, the last one at {where}; write them as `def`"
            )

    def close(self) -> None:
        """Cancel what runs as the process ends, so that a command that a tool has started ends with it."""
        with self._lock:
            loop, self._current = self._current, None
        if loop is not None:
            loop.abandon()
            loop.thread.join(_LAST_WORK_S)


_shared = _Shared()
atexit.register(lambda: _shared.close())  # another one, after a fork


def _begin_again() -> None:
    """Forget the loop: a forked process has it, but not its thread."""
    global _shared
    _shared = _Shared()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class BackgroundWork:
    """A coroutine that runs on the background loop, for whoever waits without a thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start it."""

        async def guarded() -> Any:
            try:
                return await coroutine
            except (SystemExit, KeyboardInterrupt) as stop:  # it would end the loop of all others
                raise RuntimeError(f"{type(stop).__name__}: {stop}") from stop

        self._loop, self.future = _shared.submit(guarded())

    def give_up(self) -> None:
        """Cancel it, and leave it behind if it does not give way. Looks whether it blocks the loop, which takes seconds.

        Raises:
            BlockedLoopError: if a coroutine blocks the loop that all share.
            EnvironmentFailure: when too many loops are blocked.
        """
        self.future.cancel()
        if self._loop.is_abandoned or self._loop.is_blocked():
            _shared.abandon(self._loop)
            raise BlockedLoopError("a coroutine blocks the event loop that all of them share")


def run_in_background(coroutine: Coroutine[Any, Any, Any], *, timeout_s: float) -> Any:
    """Run a coroutine on the background loop and wait for its result.

    Raises:
        TimeoutError: after `timeout_s` seconds; the coroutine is cancelled. A BlockedLoopError where a coroutine blocks the
            loop: whoever waits on that loop gets one at once, and the next call begins another loop. The blocked one is
            closed as soon as it is free.
        EnvironmentFailure: when too many loops are blocked.
    """
    has_begun = is_given_up = False

    async def bounded() -> Any:
        nonlocal has_begun
        if is_given_up:
            return None
        has_begun = True
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await coroutine
        except TimeoutError as error:
            if limit.expired():
                raise
            raise RuntimeError(f"TimeoutError: {error}") from error  # its own deadline, not ours
        except (SystemExit, KeyboardInterrupt) as stop:  # it would end the loop of all others
            raise RuntimeError(f"{type(stop).__name__}: {stop}") from stop

    loop, future = _shared.submit(bounded())
    try:
        return future.result(timeout_s + _GRACE_S)
    except (TimeoutError, concurrent.futures.CancelledError):
        if loop.is_abandoned or (not future.done() and loop.is_blocked()):
            _shared.abandon(loop)
            raise BlockedLoopError("a coroutine blocks the event loop that all of them share") from None
        future.cancel()  # one that does not give way is left behind
        raise
    finally:
        is_given_up = True
        if not has_begun:
            coroutine.close()


def awaited(value: Any, what: str, *, timeout_s: float) -> Any:
    """Return what a method returned, or what its coroutine comes to.

    Args:
        value: that the method returned.
        what: its name, for the error.
        timeout_s: deadline of a coroutine, in seconds.

    Raises:
        EnvironmentFailure: when the deadline passes, or the loop is blocked.
    """
    if not isinstance(value, Awaitable):
        return value
    try:
        return run_in_background(_of(value), timeout_s=timeout_s)
    except TimeoutError as error:
        why = str(error) if isinstance(error, BlockedLoopError) else f"it did not end within {timeout_s:g} s"
        raise EnvironmentFailure(f"{what}: {why}") from None


async def _of(value: Awaitable[Any]) -> Any:
    return await value
