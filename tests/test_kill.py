"""A run whose episodes outlive its steps, killed at ten random moments in a row (invariant 13)."""

import random
import time
from pathlib import Path

import yaml

from tests.support.killing import RECIPE, check_nothing_lost, look, wait_for_a_moment
from tests.support.processes import Command


def test_ten_kills_lose_no_episode_and_train_on_none_twice(tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn with seed {seed}")
    rng = random.Random(seed)
    process = Command("train", recipe, "--run_dir", run)
    while look(run) is None:
        process.check_runs()
        time.sleep(0.05)
    snapshots = []
    started = 0.0
    for number in range(10):
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
    assert sum(snapshot.num_partial for snapshot in snapshots) > 0
