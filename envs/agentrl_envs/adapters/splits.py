"""Which half of a source's tasks a split draws from, and seeds for a source from the environment's own random numbers."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_MAX_TRIES = 64
_MAX_ALIKE = 6
"""Draws of one and the same task, after which a source is taken to have no other."""


def draw(rng: np.random.Generator, options: dict[str, Any], make: Callable[[int], tuple[str, T]]) -> T:
    """Return a task for the split that `options` names: train and eval never share one, where a source has several.

    A task belongs to a half by the hash of its text. A source with a single task (one map, one puzzle) begins it on both
    sides: nothing can be held out of it.

    Args:
        rng: the environment's; it draws the seeds.
        options: of `reset`.
        make: returns, for a seed of the source, the text that tells its tasks apart, and the task.
    """
    is_eval = options.get("split") == "eval"
    texts = set()
    for num_tried in range(1, _MAX_TRIES + 1):
        text, task = make(int(rng.integers(2**31)))
        if (hashlib.sha256(text.encode(errors="replace")).digest()[0] < 128) == is_eval:
            break
        texts.add(text)
        if len(texts) == 1 and num_tried == _MAX_ALIKE:
            break
    return task
