"""Tasks of training and evaluation, kept apart by a hash of what the task is."""

import hashlib


def in_split(task: str, split: str, *, one_in: int = 4) -> bool:
    """Tell whether a task belongs to a split: one of `one_in` is for evaluation ("eval"), the others are for training."""
    return (task_hash(task) % one_in == 0) == (split == "eval")


def task_hash(task: str) -> int:
    """Return a number that follows from a task's text alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big")
