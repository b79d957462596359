"""A run whose episodes outlive its steps, killed at random moments in a row (invariant 13)."""

import random
import time
from pathlib import Path

import pytest
import yaml

from tests.support.killing import RECIPE, check_nothing_lost, look, wait_for_a_moment
from tests.support.processes import Command

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("mode", "num_kills"),
    [
        ("partial", 2),
        ("async", 2),
        pytest.param("partial", 10, marks=pytest.mark.slow),
        pytest.param("async", 10, marks=pytest.mark.slow),
    ],
)
def test_kills_lose_no_episode_and_train_on_none_twice(mode: str, num_kills: int, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | {"rollout": RECIPE["rollout"] | {"mode": mode}}))
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn with seed {seed}")
    rng = random.Random(seed)
    process = Command("train", recipe, "--run_dir", run)
    while look(run) is None:
        process.check_runs()
        time.sleep(0.05)
    snapshots = []
    started = 0.0
    for number in range(num_kills):
        wait_for_a_moment(run, process, started, number, rng)
        process.kill()
        found = look(run)
        assert found is not None
        snapshots.append(found)
        started, process = time.time(), Command("train", run)
    process.kill()
    steps = max(snapshots[-1].rows) + 10
    Command("train", run, "--train.steps", steps).finish()
    check_nothing_lost(snapshots, run)
    assert sum(snapshot.num_live for snapshot in snapshots) > 1
    if num_kills == 10:  # of two kills perhaps neither comes in the middle of a turn
        assert sum(snapshot.num_partial for snapshot in snapshots) > 0
