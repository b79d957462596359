"""What a few seeds say: intervals, tests and power of paired differences. Pure functions of numbers.

A run is one observation, whatever the number of its tasks: runs of one recipe differ by their seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

_MOST_SEEDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, with what it could as well be."""

    mean: float
    low: float | None
    """Ends of the interval. None: one value alone, or values without spread, give none."""
    high: float | None
    p: float | None
    """How often a mean as far from 0 comes by chance where the true one is 0 (two-sided). None: no interval either."""


def estimate(values: Sequence[float], *, level: float = 0.95) -> Estimate:
    """Estimate a mean; of paired differences, this is the paired t-test.

        mean ± t_{(1 + level) / 2, n - 1} * sd / sqrt(n)

    Source: Student 1908. Exact for normal values; `benchmarks/compare_coverage.py` has the coverage for others: it holds 93 to
    97 % where both recipes' outcomes have a similar shape, and falls to about 90 % where one's trail off to one side.

    Raises:
        ValueError: for no value at all, and for one that is not finite.
    """
    values_N = _checked(values)
    mean, num = float(values_N.mean()), len(values_N)
    sd = spread(values)
    if sd is None or sd <= 1e-12 * max(1.0, float(abs(values_N).max())):
        return Estimate(mean=mean, low=None, high=None, p=None)
    error = sd / math.sqrt(num)
    half = t_quantile((1 + level) / 2, num - 1) * error
    return Estimate(mean=mean, low=mean - half, high=mean + half, p=1 - t_within(abs(mean) / error, num - 1))


def within(metric: str, value: float | None) -> float | None:
    """Return an end of a metric's interval where the metric can be: a share is between 0 and 1."""
    name = metric.rpartition("/")[2]
    is_share = name == "success" or name.startswith("pass@")
    return min(1.0, max(0.0, value)) if is_share and value is not None else value


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation, which divides by n - 1. None: of one value."""
    values_N = _checked(values)
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else None


def skewness(values: Sequence[float]) -> float:
    """Return the third central moment over the standard deviation cubed, both dividing by n; 0 without spread."""
    centred_N = _checked(values) - np.mean(values)
    sd = float(np.sqrt(np.mean(centred_N**2)))
    return float(np.mean(centred_N**3)) / sd**3 if sd > 0 else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for their number: the chance that any of the true null hypotheses is rejected stays below the level.

        p'_(i) = max over j <= i of min(1, (m - j + 1) * p_(j)),    p_(1) <= ... <= p_(m)

    Source: Holm 1979.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def power(effect: float, *, sd: float, num: int, alpha: float = 0.05) -> float:
    """Return how often n pairs show a true difference (the noncentral t distribution).

        P(|Z + effect * sqrt(n) / sd| > t_{1 - alpha / 2, n - 1} * S),    S^2 = chi^2_{n - 1} / (n - 1)

    Args:
        effect: the true mean difference.
        sd: standard deviation of the differences.
        num: of pairs, at least 2.
        alpha: how often no difference may be taken for one.
    """
    dof = num - 1
    shift, critical = effect * math.sqrt(num) / sd, t_quantile(1 - alpha / 2, dof)
    s_P = (np.arange(2000) + 0.5) * (1 + 8 / math.sqrt(dof)) / 2000  # the middles of 2,000 intervals
    log_density_P = (dof - 1) * np.log(s_P) - dof * s_P**2 / 2
    weight_P = np.exp(log_density_P - log_density_P.max())
    beyond_P = [_normal(shift - critical * s) + _normal(-shift - critical * s) for s in s_P]
    return float(np.average(beyond_P, weights=weight_P))


def seeds_to_see(effect: float, *, sd: float, wanted: float = 0.8) -> int | None:
    """Return how many pairs show a true difference as often as `wanted`. None: more than 1,000."""
    low, high = 2, _MOST_SEEDS
    if power(effect, sd=sd, num=high) < wanted:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, sd=sd, num=middle) >= wanted else (middle + 1, high)
    return low


def smallest_seen(*, sd: float, num: int, wanted: float = 0.8) -> float:
    """Return the smallest true difference that n pairs show as often as `wanted`."""
    low, high = 0.0, 100 * sd
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, sd=sd, num=num) >= wanted else (middle, high)
    return high


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """Return the area under a curve by the trapezoidal rule, over the length of its base: its mean height."""
    widths = np.diff(np.asarray(steps, dtype=np.float64))
    heights = np.asarray(values, dtype=np.float64)
    return float(widths @ (heights[1:] + heights[:-1]) / 2 / widths.sum())


def steps_to(steps: Sequence[float], values: Sequence[float], *, threshold: float) -> float | None:
    """Return the first of the steps at which a curve is at the threshold or above. None: it never is."""
    return next((step for step, value in zip(steps, values, strict=True) if value >= threshold), None)


def t_within(t: float, dof: int) -> float:
    """Return the chance that Student's t lies between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term = total = (cosine if odd else 1.0) if dof > 1 else 0.0
    for k in range(2 + odd, dof, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def t_quantile(p: float, dof: int) -> float:
    """Return the value below which Student's t lies with chance p, which is at least 1/2: by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, dof) < 2 * p - 1:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, dof) < 2 * p - 1 else (low, middle)
    return (low + high) / 2


def _normal(x: float) -> float:
    """Return the chance that a standard normal value is below x."""
    return math.erfc(-x / math.sqrt(2)) / 2


def _checked(values: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    values_N = np.asarray(values, dtype=np.float64)
    if values_N.ndim != 1 or not len(values_N) or not np.isfinite(values_N).all():
        raise ValueError(f"expected one finite number or more, got {list(values)}")
    return values_N
