"""Sources that draw from Python's and numpy's global random numbers, kept apart from each other and from everyone else."""

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np

_lock = threading.RLock()
"""Held by whoever has the global generators in a state of its own."""


class OwnRandom:
    """What a source takes for the global random numbers: from a seed, and its own whenever the source is called.

    The generators of the process are as before afterwards. Other threads that draw from them meanwhile do so at random.
    """

    def __init__(self, seed: int = 0) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the global generators continue where this source left them."""
        with _lock:
            before = random.getstate(), np.random.get_state()
            _set_states(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set_states(before)


def _set_states(states: tuple[object, object]) -> None:
    random.setstate(states[0])  # type: ignore[arg-type]
    np.random.set_state(states[1])  # type: ignore[arg-type]
