"""What tests with threads need: threads that a test begins end with it."""

import gc
import threading
import time
from collections.abc import Callable

SHARED = {"agentrl-tools"}
"""Threads of which a process keeps one each, from when it first needs it."""

_is_over = threading.Event()


def hang() -> None:
    """Hang until the test is over."""
    _is_over.wait()


class Guard:
    """Tells which threads a test has left behind."""

    def __init__(self) -> None:
        _is_over.clear()
        self._before = set(threading.enumerate())

    def left(self, *, timeout_s: float) -> list[str]:
        """Release what hangs, wait for every thread started since, and return the names of those that do not end."""
        _is_over.set()
        deadline = time.monotonic() + timeout_s
        while self._left() and time.monotonic() < deadline - timeout_s + 0.05:
            time.sleep(0.001)
        if self._left():
            gc.collect()  # a pool's threads end when nothing refers to it any more
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return left

    def _left(self) -> list[str]:
        # A dummy is no thread of Python's: torch's own, in which a backward pass on a GPU called some.
        now = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
        started = [t.name for t in now if t not in self._before]
        alive = [t.name for t in threading.enumerate()]
        started = [n for n in started if not n.startswith("agentrl-tools-helper")]  # they look up addresses
        return [n for n in started if n not in SHARED] + [n for n in SHARED for _ in range(alive.count(n) - 1)]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait for what happens in another thread or process; fail when it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.005)
