"""A run that is killed again and again ends as one that was left alone (invariant 13, without live episodes)."""

import random
import time
from pathlib import Path

import pytest
import yaml

from tests.support.processes import Command
from tests.support.run_files import rollouts, rows

pytestmark = pytest.mark.process
RECIPE = {
    "env": {"id": "key_door"},
    "model": {
        "local": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    },
    "warmup": {"steps": 8, "num_demonstrations": 32, "skill": 0.5},
    "rollout": {
        "num_groups": 3,
        "group_size": 4,
        "max_turns": 6,
        "max_turn_tokens": 16,
        "max_episode_tokens": 64,
        "max_context_tokens": 512,
    },
    "credit": {"scheme": "turn_return"},
    "loss": {"kl_coefficient": 0.01},
    "train": {"steps": 24, "checkpoint_every": 4, "schedule": "cosine", "learning_rate": 3e-3, "device": "cpu"},
    "evaluation": {"every": 7, "num_tasks": 6},
    "report": {"rollouts_every": 5},
}


@pytest.mark.parametrize("num_kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kill_at_random_moments_and_resume_equals_uninterrupted_bit_for_bit(num_kills: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    Command("train", recipe, "--run_dir", whole).finish()
    expected = rows(whole)
    assert [row["step"] for row in expected] == list(range(25))
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn with seed {seed}")
    rng = random.Random(seed)
    process = Command("train", recipe, "--run_dir", killed)
    # While it starts, warms up, or writes what it starts from; a run that has not written its recipe is begun again.
    time.sleep(3 * rng.random())
    process.kill()
    is_begun = (killed / "config.yaml").is_file()
    process = Command("train", killed) if is_begun else Command("train", recipe, "--run_dir", killed)
    for kill in range(num_kills):
        # Somewhere in the next part of the run: at any point of a step, of a checkpoint, of an evaluation.
        part = 20 // num_kills
        wanted = 1 + kill * part + rng.randrange(part)
        while not ((killed / "metrics.jsonl").is_file() and len(rows_so_far(killed)) >= wanted):
            process.check_runs()
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process = Command("train", killed)
    process.finish()
    assert rows(killed) == expected
    assert rollouts(killed) == rollouts(whole)


def rows_so_far(folder: Path) -> list[bytes]:
    return (folder / "metrics.jsonl").read_bytes().splitlines()
