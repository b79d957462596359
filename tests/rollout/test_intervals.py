"""Intervals over evaluation tasks."""

import numpy as np
import pytest

from agentrl.rollout.evaluation import mean_interval, pass_at_k, pass_interval, share_interval, student, wilson
from tests.support.each import each


def test_wilson_is_the_textbooks() -> None:
    # n = 10, p = .5, z = 1.96: (.5 + .19207 +- 1.96 sqrt(.025 + .009604)) / 1.38415
    assert wilson(0.5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-5)
    low, high = wilson(0.0, 20)
    assert (low, high) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-5)
    assert wilson(1.0, 20)[1] == 1.0
    with pytest.raises(ValueError, match="expected a share"):
        wilson(1.2, 3)
    with pytest.raises(ValueError, match="expected a share"):
        wilson(0.5, 0)


@each(("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (100, 1.984)])
def test_quantiles_of_student(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.01)


def test_a_mean_over_single_episodes_has_the_usual_interval() -> None:
    values = [1.0, 2.0, 4.0, 5.0, 8.0]  # mean 4, sd sqrt(30 / 4)
    spread = student(4) * np.sqrt(7.5 / 5)
    assert mean_interval([[value] for value in values]) == pytest.approx((4 - spread, 4 + spread))


def test_copies_of_a_task_s_episode_tell_nothing_new() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    once, often = ([[value] * number for value in values] for number in (1, 7))
    assert mean_interval(often) == pytest.approx(mean_interval(once))
    single, several = share_interval(once), share_interval(often)
    assert single is not None
    assert several is not None
    assert several.low <= single.low + 1e-9
    assert several.high >= single.high - 1e-9


def test_too_little_gives_no_interval() -> None:
    assert mean_interval([[1.0, 2.0]]) is None
    assert mean_interval([[], [1.0]]) is None
    assert share_interval([[], []]) is None
    assert share_interval([[1.0, 1.0]]) == wilson(1.0, 1)


@each("episodes", [1, 4])
def test_intervals_cover_what_they_say(episodes: int) -> None:
    rng, hits = np.random.default_rng(0), {"share": 0, "mean": 0}
    for _ in range(600):
        chances = rng.beta(1.2, 0.8, size=40)  # of tasks, which differ: mean .6
        solved = [rng.binomial(1, chance, size=episodes).astype(float).tolist() for chance in chances]
        for name, found in (("share", share_interval(solved)), ("mean", mean_interval(solved))):
            assert found is not None
            hits[name] += found.low <= 0.6 <= found.high
    for name, number in hits.items():
        assert 0.92 <= number / 600 <= 0.98, name


def test_pass_at_1_has_the_interval_of_success_and_sets_of_k_that_of_so_many_tasks() -> None:
    right = [(4, 0), (4, 1), (4, 4), (4, 2), (4, 0)]
    solved = [[1.0] * c + [0.0] * (n - c) for n, c in right]
    assert pass_interval(right, 1) == pytest.approx(share_interval(solved))
    assert pass_interval(right, 4) == pytest.approx(wilson(3 / 5, 5))
    assert pass_interval([(1, 1), (0, 0)], 2) is None


@each("k", [1, 2, 4])
def test_intervals_of_pass_at_k_cover_what_they_say(k: int) -> None:
    rng, hits = np.random.default_rng(0), 0
    grid = (np.arange(4000) + 0.5) / 4000
    density = grid**0.2 * (1 - grid) ** -0.2  # of Beta(1.2, .8)
    true = float(np.average(1 - (1 - grid) ** k, weights=density))
    for _ in range(600):
        right = [(8, int(rng.binomial(8, chance))) for chance in rng.beta(1.2, 0.8, size=40)]
        found = pass_interval(right, k)
        assert found is not None
        hits += found.low <= true <= found.high
    assert 0.93 <= hits / 600 <= 0.99, (k, hits)
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
