"""Every random choice of a rollout follows from the run's seed and from names, never from the order of events."""

import hashlib

_HALF = 2**30


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def task_seed(run_seed: int, index: int) -> int:
    """Return the environment seed of the `index`-th training task: below 2**30."""
    return derive_seed(run_seed, "task", index) % _HALF


def held_out_seed(run_seed: int, index: int) -> int:
    """Return the environment seed of the `index`-th evaluation task: at least 2**30, so never one of training."""
    return _HALF + derive_seed(run_seed, "held out", index) % _HALF
