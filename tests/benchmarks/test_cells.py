"""Tuning and tests of significance of `benchmarks/cells.py`."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cells, evidence
from benchmarks.cells import Job, log_rank_p, sign_flip_p, tune

CELL = Job("key_door", "gspo", "uniform", 0.0, 0)


def tuned(*areas_by_seed: dict[float, float]) -> cells.Results:
    """Return results of the first tuning seeds that have these areas by rate."""
    return {
        CELL._replace(rate=rate, seed=seed): {"curve": [0.0, area]}
        for seed, areas in zip(cells.TUNING_SEEDS, areas_by_seed, strict=False)
        for rate, area in areas.items()
    }


def missing(*areas_by_seed: dict[float, float]) -> list[tuple[float, int]]:
    return [(job.rate, job.seed) for job in tune(tuned(*areas_by_seed), CELL).missing]


def test_a_best_rate_at_an_edge_extends_the_grid() -> None:
    assert missing() == [(3e-4, 0), (6e-4, 0), (1.2e-3, 0)]
    assert missing({3e-4: 0.1, 6e-4: 0.2, 1.2e-3: 0.3}) == [(2.4e-3, 0)]
    assert missing({3e-4: 0.3, 6e-4: 0.2, 1.2e-3: 0.1}) == [(1.5e-4, 0)]


def test_a_rate_far_behind_is_not_tried_on_further_seeds() -> None:
    first = {3e-4: 0.1, 6e-4: 0.3, 1.2e-3: 0.25}
    assert missing(first) == [(6e-4, 1), (1.2e-3, 1)]
    assert missing(first, {6e-4: 0.3, 1.2e-3: 0.4}) == [(2.4e-3, 0)]  # the best of both seeds is at the edge
    assert missing({3e-4: 0.1, 6e-4: 0.3, 1.2e-3: 0.1}) == []
    settled = tune(tuned(first, {6e-4: 0.3, 1.2e-3: 0.2}, {6e-4: 0.3, 1.2e-3: 0.2}), CELL)
    assert (settled.missing, settled.best) == ([], 6e-4)
    assert [count for _, count in settled.means.values()] == [1, 3, 3]


def test_all_signs_of_differences_are_counted() -> None:
    # Means of the eight choices of signs of 1, 2, 3: two are as far from 0 as 2, all signs alike.
    assert sign_flip_p([1.0, 2.0, 3.0]) == 2 / 8
    # |1 + 2 - 3| = 0 is reached by each of them.
    assert sign_flip_p([1.0, 2.0, -3.0]) == 1.0
    assert sign_flip_p([0.1] * 16) == 2 / 2**16


def test_the_log_rank_test_has_the_numbers_of_a_hand() -> None:
    # At step 1 (2 and 2 at risk) the first arm has the event: 1 - 1/2, variance 1/4. At step 2 (1 and 2 at risk) again:
    # 1 - 1/3, variance 2/9. The others are censored: z = (7/6) / sqrt(17/36) = 7 / sqrt(17).
    arms = ([1.0, 2.0], [math.inf, math.inf])
    assert log_rank_p([arms]) == pytest.approx(math.erfc(7 / math.sqrt(17) / math.sqrt(2)))
    # Two equal strata: twice the excess, twice the variance.
    assert log_rank_p([arms, arms]) == pytest.approx(math.erfc(7 / math.sqrt(17)))
    assert log_rank_p([(arms[1], arms[1])]) == 1.0


def test_cells_are_paired_by_environment_and_seed() -> None:
    tuning = tuned(*3 * [{3e-4: 0.1, 6e-4: 0.3, 1.2e-3: 0.1}])
    known: dict[Any, Any] = {}
    for ratio, areas in {"gspo": (0.5, 0.25, 0.75), "grpo": (0.25, 0.5)}.items():
        known |= {job._replace(ratio=ratio): result for job, result in tuning.items()}
        for seed, success in zip(cells.SEEDS, areas, strict=False):
            known[CELL._replace(ratio=ratio, rate=6e-4, seed=seed)] = {"curve": [0.0, success]}
    assert cells.differences(known, [(CELL, CELL._replace(ratio="grpo"))], evidence.area) == [0.25, -0.25]


@pytest.mark.parametrize(
    "cell", [cell for part in ("main", "by_length", "discount", "stale") for cell in cells.cells(part)]
)
def test_a_cell_has_the_bound_and_the_fields_that_its_name_says(cell: Job, tmp_path: Path) -> None:
    recipe = cells.make_recipe(cell._replace(rate=6e-4), tmp_path)
    fields = cells.resolved(recipe)
    assert (fields["train"]["target_kl"], fields["train"]["learning_rate"]) == (0.02, 6e-4)
    assert cells.RATIOS[cell.ratio].items() <= fields["loss"].items()
    assert fields["loss"]["aggregation"] == "trajectory-mean"
    assert cells.CREDITS[cell.credit].items() <= fields["credit"].items()
