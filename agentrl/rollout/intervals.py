"""95 % intervals of what an evaluation finds, over tasks: episodes of one task are not independent of each other."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_Z = 1.959963984540054
_T_FEW = {1: 12.7062, 2: 4.3027}
"""Quantiles of Student's t at .975 for so few degrees of freedom that the series below does not serve."""


class Interval(NamedTuple):
    """Where the true mean lies, in 95 of 100 evaluations on other tasks of this kind."""

    low: float
    high: float


def wilson(share: float, num: float) -> Interval:
    """Return Wilson's score interval of a share of `num` independent trials (JASA 22, 1927).

        (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Raises:
        ValueError: for a share out of [0, 1], or a number that is not above 0.
    """
    if not (0 <= share <= 1 and num > 0):
        raise ValueError(f"expected a share in [0, 1] of more than 0 trials, got {share} of {num}")
    scale, center = 1 + _Z**2 / num, share + _Z**2 / (2 * num)
    spread = _Z * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    return Interval(max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale))


def share_interval(tasks: Sequence[Sequence[float]]) -> Interval | None:
    """Return the interval of a share of episodes: 0 or 1 each, in a row for each task. None: there is no episode.

    With one episode a task it is Wilson's. With several, it is Wilson's for as many independent episodes as have the variance
    that the tasks show; where all are alike, for as many as there are tasks.
    """
    tasks = [task for task in tasks if len(task)]
    if not tasks:
        return None
    num, share = sum(map(len, tasks)), _mean(tasks)
    if num == len(tasks):
        return wilson(share, num)
    variance = _variance(tasks)
    independent = len(tasks) if not variance else share * (1 - share) / variance
    return wilson(share, min(max(independent, 1.0), num))


def mean_interval(tasks: Sequence[Sequence[float]]) -> Interval | None:
    """Return the interval of a mean over episodes, in a row for each task. None: there are fewer than two tasks.

        m +- t_{k - 1} sqrt(k / (k - 1) sum over tasks of (sum over its episodes of (y - m))^2) / N

    the cluster-robust variance of k tasks with N episodes.
    """
    tasks = [task for task in tasks if len(task)]
    if len(tasks) < 2:
        return None
    spread, mean = student(len(tasks) - 1) * math.sqrt(_variance(tasks)), _mean(tasks)
    return Interval(mean - spread, mean + spread)


def student(degrees: int) -> float:
    """Return the quantile of Student's t at .975, to 1 % (Abramowitz and Stegun 26.7.5)."""
    if degrees in _T_FEW:
        return _T_FEW[degrees]
    z, v = _Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))


def _mean(tasks: Sequence[Sequence[float]]) -> float:
    return float(np.mean(np.concatenate([np.asarray(task, dtype=np.float64) for task in tasks])))


def _variance(tasks: Sequence[Sequence[float]]) -> float:
    """Return the variance of the mean over all episodes that tasks, as clusters, show."""
    mean, num, k = _mean(tasks), sum(map(len, tasks)), len(tasks)
    if k < 2:
        return 0.0
    residuals = [float(np.sum(np.asarray(task, dtype=np.float64) - mean)) for task in tasks]
    return k / (k - 1) * sum(residual**2 for residual in residuals) / num**2
