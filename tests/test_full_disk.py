"""A run on a file system that is really full."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from agentrl.distributed.checkpoints import write_folder
from agentrl.distributed.sharding import save_shards
from agentrl.engine.vllm.weights import weights_folder
from agentrl.errors import EngineError
from tests.support.killing import check_nothing_lost, look
from tests.support.processes import Command

RECIPE = """
env: {id: key_door}
model: {local: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32, vocab_size: 300}}
warmup: {steps: 2, batch_size: 4, num_demonstrations: 16}
rollout: {num_groups: 2, group_size: 2, max_turns: 4, max_turn_tokens: 16, max_context_tokens: 512}
train: {steps: 6, num_minibatches: 2, device: cpu, checkpoint_every: 1}
evaluation: {num_tasks: 4}
"""
pytestmark = pytest.mark.process
Resize = Callable[[int], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Resize]]:
    """A folder on a file system of its own, and a function that sets its size in KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(path)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes the rights of root on Linux")

    def resize(kib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kib}k", str(path)], check=True)

    try:
        yield path, resize
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_push_through_files_says_that_there_is_no_room(disk: tuple[Path, Resize]) -> None:
    folder, _ = disk
    with (
        pytest.raises(EngineError, match=r"cannot write to engine\.server\.folder: .*No space left"),
        weights_folder(folder, 1) as place,
    ):
        save_file({"weight": torch.zeros(100_000)}, place / "model.safetensors")
    assert list(folder.iterdir()) == []


def test_weights_that_processes_share_out_say_that_there_is_no_room(disk: tuple[Path, Resize]) -> None:
    folder, _ = disk
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OSError, match="No space left"):
        write_folder(folder / "step", lambda path: save_shards(model, optimizer, path / "shards"))
    assert list(folder.iterdir()) == []


def train(target: Path, *options: object) -> tuple[int | None, str]:
    """Return the exit status and what was written to standard error."""
    command = Command("train", target, *options)
    errors = command.wait(200)
    return command.returncode, errors


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_bytes().splitlines()]


# In the tokenizer, in the first checkpoint, in a later one.
@pytest.mark.parametrize(
    "kib", [pytest.param(24, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.slow), 200]
)
def test_a_full_disk_ends_in_one_message_and_the_run_resumes_with_more(
    disk: tuple[Path, Resize], tmp_path: Path, kib: int
) -> None:
    folder, resize = disk
    resize(kib)
    recipe, run = tmp_path / "recipe.yaml", folder / "run"
    recipe.write_text(RECIPE)
    status, errors = train(recipe, "--run_dir", run)
    assert status == 2
    (line,) = errors.splitlines()
    assert line.startswith("agentrl: cannot write ")
    assert "No space left on device" in line
    assert line.endswith(f"free the disk and resume with `agentrl train {run}`")
    assert not list(run.rglob("*.partial"))
    resize(4096)
    assert train(run) == (0, "")
    assert steps(run) == list(range(7))


@pytest.mark.slow
def test_a_disk_that_the_journal_fills_loses_no_episode(disk: tuple[Path, Resize], tmp_path: Path) -> None:
    folder, resize = disk
    resize(4096)
    recipe, run = tmp_path / "recipe.yaml", folder / "run"
    lasting = {"mode": "partial", "num_groups": 2, "group_size": 2, "max_turns": 4, "max_turn_tokens": 16}
    settings = yaml.safe_load(RECIPE) | {
        "rollout": {**lasting, "max_context_tokens": 512},
        "report": {"rollouts_every": 1, "keep_rollouts": 10_000},
    }
    settings["train"] |= {"checkpoint_every": 100, "steps": 1}
    recipe.write_text(yaml.safe_dump(settings))
    assert train(recipe, "--run_dir", run) == (0, "")
    used = int(subprocess.run(["du", "-sk", str(folder)], capture_output=True, text=True, check=True).stdout.split()[0])
    resize(used + 20)
    status, errors = train(run, "--train.steps", 80, "--report.rollouts_every", 0)
    assert status == 2
    assert "No space left on device" in errors
    assert "Traceback" not in errors
    found = look(run)
    assert found is not None
    resize(8192)
    assert train(run, "--train.steps", max(found.rows) + 3, "--report.rollouts_every", 1) == (0, "")
    check_nothing_lost([found], run)
    assert len(found.episodes) > 20
