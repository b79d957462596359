"""A table of tasks and reward functions, as a user keeps them: trained from a recipe, without a class."""

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from tests.support.processes import Command

pytestmark = pytest.mark.process
REWARD = '''
def right(completion, task, **kwargs) -> float:
    """A share of the reward for each letter that is right."""
    given, expected = completion.strip(), task["answer"]
    return sum(a == b for a, b in zip(given, expected)) / max(len(given), len(expected), 1)


async def brief(completions, **kwargs):
    return [-len(completion) / 100 for completion in completions]
'''
RECIPE: dict[str, Any] = {
    "env": {
        "id": "tasks",
        "options": {
            "tasks": "my.jsonl",
            "prompt": "question",
            "answer": "answer",
            "rewards": [
                "my_rewards:right",
                {"reward": "my_rewards:brief", "weight": 0.5},
                {"reward": "exact_match", "weight": 0},
            ],
        },
    },
    "model": {"local": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}},
    "warmup": {"steps": 30, "num_demonstrations": 64, "learning_rate": 1e-2},
    "rollout": {"num_groups": 2, "group_size": 4, "max_turns": 1, "max_turn_tokens": 12, "max_context_tokens": 256},
    "train": {"steps": 2, "num_minibatches": 1, "device": "cpu", "checkpoint_every": 1},
    "evaluation": {"num_tasks": 4},
    "report": {"rollouts_every": 1},
}  # fmt: skip


def command(folder: Path, *arguments: object) -> Command:
    """Start a command where its user stands."""
    with contextlib.chdir(folder):
        return Command(*arguments)


def fail(started: Command) -> str:
    errors = started.wait(400)
    assert started.returncode == 2, errors
    return errors


def write_tasks(folder: Path, *, seed: int = 0) -> None:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(200)]
    lines = [json.dumps({"question": f"Say {word}.", "answer": word, "id": k}) for k, word in enumerate(words)]
    (folder / "my.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in a folder of the user's, as the user does."""
    folder = tmp_path_factory.mktemp("mine")
    write_tasks(folder)
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command(folder, "train", "recipe.yaml", "--run_dir", "run").finish()
    return folder


@pytest.mark.slow
def test_each_component_is_a_metric_and_stands_in_records_and_in_what_is_shown(run: Path) -> None:
    folder = RunFolder.open(run / "run")
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["reward/mean"] == pytest.approx(row["reward/right"] + row["reward/brief"])
        assert row["reward/brief"] <= 0
        assert row["stop/env_error"] == 0
    assert {"eval/success", "eval/reward/right", "eval/reward/brief"} <= rows[-1].keys()
    records = [record for path in folder.rollouts() for record in read_records(path)]
    ended = [record for record in records if record.stop_reason == "terminated"]
    assert all(
        record.turns[-1].extras["reward_components"].keys() == {"right", "brief", "exact_match"} for record in ended
    )
    showing = command(run, "show", "run", "-n", "100")
    showing.finish()
    assert "(right " in showing.out


@pytest.mark.slow
def test_held_out_tasks_are_never_trained_on(run: Path) -> None:
    folder = RunFolder.open(run / "run")
    records = [record for path in folder.rollouts() for record in read_records(path)]
    assert {record.split for record in records} == {"train"}
    assert len({record.task_index for record in records}) == 4  # two steps of two groups, in an epoch of about 180
    assert set(json.loads((run / "run" / "tasks.json").read_text())) == {"train", "eval"}


def test_a_run_is_not_resumed_on_other_tasks(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    write_tasks(tmp_path, seed=1)
    errors = fail(command(tmp_path, "train", "run", "--train.steps", "3"))
    assert "began; resume with that table, or begin another run" in errors
    assert len(errors.strip().splitlines()) == 1
    write_tasks(tmp_path)
    command(tmp_path, "train", "run", "--train.steps", "3").finish()
    assert RunFolder.open(tmp_path / "run").metrics()[-1]["step"] == 3


def test_what_is_wrong_with_the_table_ends_the_command_with_one_line(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "recipe.yaml", tmp_path)
    shutil.copy(run / "my_rewards.py", tmp_path)
    write_tasks(tmp_path)
    lines = (tmp_path / "my.jsonl").read_text().splitlines()
    (tmp_path / "my.jsonl").write_text("\n".join([*lines[:16], lines[16][:-1], *lines[17:]]))
    errors = fail(command(tmp_path, "train", "recipe.yaml", "--run_dir", "run"))
    assert "my.jsonl, line 17: it is not JSON" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()
