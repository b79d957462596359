"""Sources that draw from Python's and numpy's global random numbers, kept apart from each other and from everyone else."""

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator

import numpy as np

from agentrl import EnvironmentFailure

_MAX_HELD_S = 60.0
"""How long others wait for a source: as long as a call may take (`rollout.env_timeout_s`, unless a recipe changes it)."""
_lock = threading.RLock()
"""Held by whoever has the global generators in a state of its own."""
_holder: tuple[str, float] | None = None
"""Who that is, and since when."""


def _begin_again() -> None:
    """Forget who holds the generators: in a forked process nobody does, and nobody would ever let go of the lock."""
    global _lock, _holder
    _lock, _holder = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class OwnRandom:
    """What a source takes for the global random numbers: from a seed, and its own whenever the source is called.

    The generators of the process are as before afterwards. Other threads that draw from them meanwhile do so at random.
    """

    def __init__(self, seed: int = 0) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def in_use(self, source: str) -> Iterator[None]:
        """Let the global generators continue where this source left them.

        Args:
            source: whose they are meanwhile, for those who wait.

        Raises:
            EnvironmentFailure: where another source has them and does not return.
        """
        with _taken(source):
            before = random.getstate(), np.random.get_state()
            _set_states(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set_states(before)


@contextlib.contextmanager
def _taken(source: str) -> Iterator[None]:
    global _holder
    lock = _lock
    while not lock.acquire(timeout=min(1.0, _MAX_HELD_S)):
        if (holder := _holder) is not None and time.monotonic() - holder[1] > _MAX_HELD_S:
            raise EnvironmentFailure(
                f"{source} cannot draw random numbers: {holder[0]} has had the process's for more than {_MAX_HELD_S:g} s; "
                "it hangs, so resume the run without it"
            )
    outer, _holder = _holder, (source, time.monotonic())
    try:
        yield
    finally:
        _holder = outer
        lock.release()


def _set_states(states: tuple[object, object]) -> None:
    random.setstate(states[0])  # type: ignore[arg-type]
    np.random.set_state(states[1])  # type: ignore[arg-type]
