"""Expected numbers of t and of power are scipy's (1.16: t.ppf, ttest_1samp, nct), to the digits given."""

import math
from typing import Any

import numpy as np
import pytest

from agentrl.report.statistics import (
    Estimate,
    area,
    best_step,
    estimate,
    holm,
    power,
    seeds_to_see,
    skewness,
    smallest_seen,
    steps_to,
    t_quantile,
    t_within,
)
from tests.support.each import each


@each(("dof", "quantile"), [(1, 12.706204736), (2, 4.302652730), (3, 3.182446305), (7, 2.364624252), (30, 2.042272456)])
def test_quantiles_of_t(dof: int, quantile: float) -> None:
    assert t_quantile(0.975, dof) == pytest.approx(quantile, rel=1e-9)
    assert t_within(quantile, dof) == pytest.approx(0.95, rel=1e-9)


def test_the_estimate_is_the_t_test() -> None:
    found = estimate([0.1, 0.3, -0.1, 0.5])
    # mean 0.2, sd sqrt(0.2 / 3), error 0.1290994; t = 1.549193 with 3 degrees of freedom
    assert found.mean == pytest.approx(0.2, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((0.2 - 3.182446305 * 0.12909944, 0.2 + 3.182446305 * 0.12909944))
    assert found.p == pytest.approx(0.2191020, abs=1e-6)


def test_what_has_no_spread_has_no_interval() -> None:
    alone = Estimate(mean=0.5, low=None, high=None, p=None)
    assert estimate([0.5]) == alone
    assert estimate([0.5, 0.5, 0.5]) == alone
    assert estimate([0.1 + 0.2, 0.3]).low is None, "they differ by rounding alone"


@each("values", [[], [1.0, math.nan], [math.inf]])
def test_no_number_is_no_estimate(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        estimate(values)


@each(("num", "expected"), [(2, 0.0734220), (4, 0.1745503), (8, 0.4147619), (16, 0.7613452), (100, 0.9999998)])
def test_power_is_that_of_the_noncentral_t(num: int, expected: float) -> None:
    assert power(0.5, sd=0.7, num=num) == pytest.approx(expected, abs=2e-5)


def test_seeds_and_effects_that_are_seen() -> None:
    assert seeds_to_see(0.05, sd=0.05) == 10, "the textbook's: ten pairs for one standard deviation"
    assert power(0.05, sd=0.05, num=9) < 0.8 <= power(0.05, sd=0.05, num=10)
    assert seeds_to_see(0.001, sd=0.5) is None
    assert power(smallest_seen(sd=0.07, num=6), sd=0.07, num=6) == pytest.approx(0.8, abs=1e-6)


def test_power_is_how_often_simulated_tests_reject() -> None:
    draws = np.random.default_rng(0).normal(0.06, 0.08, size=(2000, 6))
    rejected = np.mean([found.p is not None and found.p < 0.05 for found in map(estimate, draws.tolist())])
    assert rejected == pytest.approx(power(0.06, sd=0.08, num=6), abs=0.03)


def test_holm() -> None:
    # Sorted .005 .01 .03 .04: times 4, 3, 2, 1 is .02 .03 .06 .04, and none is below the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_an_area_is_a_mean_height() -> None:
    assert area([0, 10, 30], [0.0, 1.0, 0.5]) == pytest.approx((5 + 15) / 30)


def test_steps_to_a_threshold() -> None:
    assert steps_to([0, 5, 10], [0.1, 0.6, 0.4], threshold=0.5) == 5
    assert steps_to([0, 5, 10], [0.1, 0.6, 0.4], threshold=0.7) is None


def test_skewness() -> None:
    assert skewness([0.0, 0.0, 0.0, 1.0]) == pytest.approx(2 / math.sqrt(3))
    assert skewness([2.0, 2.0]) == 0.0


def _successes(rng: np.random.Generator, *, mean: float, sd: float, size: tuple[int, int]) -> Any:
    """Success on 64 tasks, of seeds whose log-odds are normal."""
    return rng.binomial(64, 1 / (1 + np.exp(-rng.normal(mean, sd, size)))) / 64


@each("num", [4, 8, 16])
def test_intervals_cover(num: int) -> None:
    """The long simulation is `benchmarks/compare_coverage.py`; this is its middle: 1,000 comparisons, seeds fixed."""
    rng, size = np.random.default_rng(num), (1000, num)
    normal = rng.normal(0.05, 0.1, size)
    near_the_top = _successes(rng, mean=3.5, sd=0.7, size=size) - _successes(rng, mean=3.5, sd=0.7, size=size)
    skewed = rng.exponential(0.1, size) - rng.exponential(0.1, size)
    for differences, true in ((normal, 0.05), (near_the_top, 0.0), (skewed, 0.0)):
        found = [estimate(row) for row in differences.tolist()]
        covered = np.mean([e.mean == true if e.low is None else e.low <= true <= (e.high or 0.0) for e in found])
        assert 0.93 <= covered <= 0.975, "equal skewed outcomes at 4 seeds are covered a little more often"


def test_the_best_step_is_that_of_the_best_evaluation_after_the_beginning() -> None:
    def row(step: int, **measures: float) -> dict[str, float]:
        return {"step": step, **{name.replace("_", "/"): value for name, value in measures.items()}}

    rows = [row(0, eval_reward=9.0), row(1, eval_reward=0.3), row(2), row(3, eval_reward=0.3), row(4, eval_reward=0.1)]
    assert best_step(rows, among=range(5)) == 3
    assert best_step(rows, among={0, 1, 4}) == 1
    assert best_step(rows, among={0, 2}) is None
    scored = [{**row(1, eval_reward=9.0), "eval/success": 0.2}, {**row(2, eval_reward=0.1), "eval/success": 0.4}]
    assert best_step(scored, among={1, 2}) == 2
    both = [
        {"step": 1, "eval/a/reward": 1.0, "eval/b/reward": 0.0},
        {"step": 2, "eval/a/reward": 0.4, "eval/b/reward": 0.8},
    ]
    assert best_step(both, among={1, 2}) == 2
