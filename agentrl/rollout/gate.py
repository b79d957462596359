"""How many calls into environments run at once."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

_MAX_RUNNING = 32
"""Calls that are let in at once: hundreds of threads that want Python's lock spend their time taking it from one another."""
_QUICK_S = 0.01
"""A call that takes longer waits for something else than the lock: others are let in beside it."""

Call: TypeAlias = asyncio.Future[Any]


class Gate:
    """Lets calls into the environments of one event loop begin, so many at a time."""

    def __init__(self) -> None:
        self._is_due = self._is_timed = False
        self._waiting: deque[tuple[Call, Callable[[], None]]] = deque()
        self._running: dict[Call, float] = {}
        """When each of those that count began."""

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Gate":
        """Return the gate of a loop, in which alone it is used, but for `leave`."""
        if (gate := _gates.get(loop)) is None:
            gate = _gates[loop] = cls()
        return gate

    def enter(self, call: Call, start: Callable[[], None]) -> None:
        """Start a call when it is its turn, unless it is cancelled before."""
        self._waiting.append((call, start))
        self.let_in_soon()

    def leave(self, call: Call) -> None:
        """Make room for another; on any thread."""
        self._running.pop(call, None)

    def let_in_soon(self) -> None:
        """Start those for whom there is room, once the loop has done all else of its round."""
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._let_in)

    def _let_in(self) -> None:
        self._is_due, loop = False, asyncio.get_running_loop()
        # So many and no more: those that are done before the last one is started make room for the next round.
        for _ in range(min(len(self._waiting), _MAX_RUNNING - len(self._running))):
            call, start = self._waiting.popleft()
            if not call.done():
                self._running[call] = loop.time()
                start()
        if self._waiting and not self._is_timed:
            self._is_timed = True
            loop.call_later(_QUICK_S, self._pass_by)

    def _pass_by(self) -> None:
        """Count those no more that run for long."""
        self._is_timed, began_before = False, asyncio.get_running_loop().time() - _QUICK_S
        for call, began in list(self._running.items()):
            if began < began_before:
                self.leave(call)
        self.let_in_soon()


_gates: "WeakKeyDictionary[asyncio.AbstractEventLoop, Gate]" = WeakKeyDictionary()
