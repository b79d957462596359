"""A run of two processes, started as a user starts it."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.architectures import recipe as architecture_recipe
from tests.support.architectures import write_model
from tests.support.ports import free_port
from tests.support.processes import Command
from tests.support.run_files import rollouts, rows

pytestmark = pytest.mark.process
STEPS = 20
RECIPE: dict[str, Any] = {
    "env": {"id": "key_door"},
    "model": {
        "local": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    },
    "warmup": {"steps": 8, "num_demonstrations": 32, "skill": 0.5},
    "rollout": {
        "num_groups": 4,
        "group_size": 3,
        "max_turns": 6,
        "max_turn_tokens": 16,
        "max_episode_tokens": 64,
        "max_context_tokens": 512,
    },
    "credit": {"scheme": "tests.support.runs:Noise"},
    "loss": {"kl_coefficient": 0.01},
    "train": {"steps": STEPS, "checkpoint_every": 4, "learning_rate": 3e-3, "device": "cpu", "process_timeout_s": 200},
    "evaluation": {"every": 7, "num_tasks": 5},
    "report": {"rollouts_every": 1, "keep_rollouts": 10_000},
}


def written(tmp_path: Path, **changes: dict[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **{name: {**RECIPE[name], **new} for name, new in changes.items()}}))
    return path


def launch(*arguments: object) -> Command:
    return Command("launch", "--processes", 2, *arguments)


def wait_for_step(run: Path, step: int, process: Command) -> None:
    while not (run / "metrics.jsonl").is_file() or len(rows(run)) <= step:
        process.check_runs()
        time.sleep(0.02)


def test_two_processes_begin_as_one_and_resume_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    recipe = written(tmp_path)
    alone, whole, killed = tmp_path / "alone", tmp_path / "whole", tmp_path / "killed"
    Command("train", recipe, "--run_dir", alone, "--train.steps", 1).finish()
    launch(recipe, "--run_dir", whole).finish()
    one, two = rows(alone), rows(whole)
    assert [row["step"] for row in two] == list(range(STEPS + 1))
    assert one[0] == two[0]  # the evaluation before the first step
    assert one[1]["grad_norm"] > 1e-3
    for name in ("loss", "grad_norm", "ratio/spread", "clip/tokens", "entropy", "kl/reference", "reward/mean"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-3, abs=1e-6), name
    assert ids(whole)["step-000001.jsonl"] == ids(alone)["step-000001.jsonl"]

    process = launch(recipe, "--run_dir", killed)
    wait_for_step(killed, 6, process)
    process.member(1).send_signal(signal.SIGKILL)
    errors = process.wait(150)  # less than train.process_timeout_s
    assert process.returncode == 1
    *before, last = errors.splitlines()
    if not last.startswith(
        "agentrl: process 1 of 2 ended with SIGKILL (perhaps for its memory), and the run with it; resume"
    ):  # process 0 was quicker
        assert any(line.startswith("agentrl, process 0 of 2: process 1 of 2 has ended") for line in before)
        assert last.startswith("agentrl: process 0 of 2 ended with exit status 1, and the run with it; resume")
    assert last.endswith("resume from its last checkpoint with `agentrl launch --processes 2 RUN_FOLDER`")
    launch(killed).finish()
    assert rows(killed) == two
    assert rollouts(killed) == rollouts(whole)


@pytest.mark.slow
def test_two_machines_that_see_one_disk_train_as_one_does(tmp_path: Path) -> None:
    recipe = written(tmp_path)
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    launch(recipe, "--run_dir", whole, "--train.steps", 2).finish()
    both = (
        "--machines",
        2,
        "--host",
        "127.0.0.2",
        "--port",
        free_port(),
        recipe,
        "--run_dir",
        apart,
        "--train.steps",
        2,
    )
    for process in [launch("--machine", index, *both) for index in (1, 0)]:
        process.finish()
    assert rows(apart)[:2] == rows(whole)[:2]


def ids(run: Path) -> dict[str, list[list[int]]]:
    """Tokens of every trajectory of every recorded step."""
    return {
        path.name: [
            [token for turn in record["turns"] for token in turn["action_ids"]]
            for record in map(json.loads, path.read_bytes().splitlines())
        ]
        for path in sorted((run / "rollouts").iterdir())
    }


@pytest.mark.slow
def test_episodes_under_way_in_each_process_survive_and_weights_may_be_shared_out(tmp_path: Path) -> None:
    recipe = written(tmp_path, rollout={"mode": "partial", "max_live_episodes": 6}, train={"sharding": "full"})
    run = tmp_path / "run"
    process = launch(recipe, "--run_dir", run)
    wait_for_step(run, 6, process)
    for index in (1, 0):
        process.member(index).send_signal(signal.SIGKILL)
    process.wait(200)
    before = rows(run)
    assert len(list((run / "journal").rglob("*.jsonl"))) >= 2
    launch(run).finish()
    after = rows(run)
    assert [row["step"] for row in after] == list(range(STEPS + 1))
    lasting = [{k: v for k, v in row.items() if not k.startswith(("pool/", "eval/"))} for row in after]
    assert [{k: v for k, v in row.items() if not k.startswith(("pool/", "eval/"))} for row in before] == lasting[
        : len(before)
    ]
    trained = [record for path in sorted((run / "rollouts").iterdir()) for record in path.read_bytes().splitlines()]
    names = [json.loads(record)["trajectory_id"] for record in trained]
    assert len(names) == len(set(names)) == STEPS * 12


@pytest.mark.slow
def test_a_checkpoint_is_read_in_parts_and_the_run_is_resumed(tmp_path: Path) -> None:
    write_model("Qwen3", tmp_path / "model")
    given = architecture_recipe(tmp_path / "model", tmp_path / "unused")
    given["train"] = {**given["train"], "sharding": "full", "steps": 3, "checkpoint_every": 1}
    given["loss"] = {"kl_coefficient": 0.01}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in given.items() if name != "run_dir"}))
    alone, whole, halved = tmp_path / "alone", tmp_path / "whole", tmp_path / "halved"
    Command("train", path, "--run_dir", alone, "--train.steps", 1, "--train.sharding", "none").finish()
    launch(path, "--run_dir", whole).finish()
    one, two = rows(alone)[-1], rows(whole)
    for name in ("loss", "grad_norm", "ratio/spread", "entropy", "kl/reference", "reward/mean"):
        assert two[-3][name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    assert two[-3]["first/engine_difference"] < 1e-5
    launch(path, "--run_dir", halved, "--train.steps", 2).finish()
    launch(halved, "--train.steps", 3).finish()
    assert rows(halved)[-1] == two[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--processes", 3),
            "rollout.num_groups: 4 cannot be dealt out to 3 processes; set it to a multiple of 3",
        ),
        (("--processes", 0), "--processes: expected a positive multiple of --machines: 1, got 0"),
        (("--processes", 3, "--machines", 2), "--processes: expected a positive multiple of --machines: 2, got 3"),
        (("--processes", 2, "--machines", 2, "--machine", 2), "--machine: expected 0 to 1 (--machines less 1), got 2"),
        (("--processes", 2, "--port", 99999), "--port: expected 0 to 65535, got 99999"),
        (("--processes", 2, "--machines", 2), "--port: several machines need one; name a port that is free on --host"),
    ],
)
def test_mistakes_are_told_once_and_before_anything_is_started(
    tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    process = Command("launch", *arguments, written(tmp_path))
    errors = process.wait(200)
    assert process.returncode == 2
    assert errors == f"agentrl: {words}\n"


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = launch("--machines", 2, "--port", port, written(tmp_path))
        errors = process.wait(200)
    assert process.returncode == 2
    assert errors == f"agentrl: --port: something else listens on {port}; name a port that is free\n"


@pytest.mark.slow
def test_a_run_is_resumed_with_as_many_processes_as_it_started_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Command("train", written(tmp_path), "--run_dir", run, "--train.steps", 1).finish()
    process = launch(run, "--train.steps", 2)
    errors = process.wait(200)
    assert process.returncode == 2
    assert errors == "agentrl: the run was trained by 1 processes, not 2; resume it with `agentrl train`\n"
    (run / "checkpoints" / "step-000001" / "agentrl.json").write_text("x")
    process = launch(run, "--train.steps", 2)
    errors = process.wait(200)
    assert process.returncode == 2
    assert "step-000001 is damaged" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_mistake_that_processes_meet_ends_the_launch_with_its_message_and_status(tmp_path: Path) -> None:
    # By the real executable; others are forked.
    recipe = written(tmp_path, report={"trackers": ["aim"]})
    command: list[str | Path] = [sys.executable, "-m", "agentrl", "launch", "--processes", "2"]
    command += [recipe, "--run_dir", tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 2
    words = r"^agentrl, process [01] of 2: report\.trackers: 'aim' is not installed"
    assert re.search(words, ended.stderr, re.MULTILINE)
    assert "Traceback" not in ended.stderr
    assert "FAILED" not in ended.stderr  # the report of torch's launcher
