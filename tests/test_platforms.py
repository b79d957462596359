"""What Linux has and other systems lack is not needed, or missed in one line."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import UserError, run_command
from agentrl.env.rewards.math_reward import math
from agentrl.report.folder import RunFolder
from agentrl_envs.adapters.verifiers import Worker
from tests.support.small_options import SMALL_OPTIONS


@pytest.mark.slow
@pytest.mark.process
def test_every_module_is_imported_and_the_default_recipe_trained_and_resumed_without_what_windows_lacks(
    tmp_path: Path,
) -> None:
    small = " ".join(SMALL_OPTIONS)
    commands = [f"train calculator --run_dir run-世 {small}", "train run-世 --train.steps 2", "report run-世"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.like_windows", " , ".join(commands)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode("cp1252") + done.stderr.decode("cp1252")
    assert [row["step"] for row in RunFolder(tmp_path / "run-世").metrics()] == [0, 1, 2]
    assert (tmp_path / "run-世" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.process
def test_what_apples_gpus_cannot_compute_is_computed_by_the_processor() -> None:
    script = """
import torch
from agentrl.recipe.config import load_recipe
from agentrl.run.parts import build_accelerator

torch.backends.mps.is_available = torch.backends.mps.is_built = lambda: True
print(build_accelerator(load_recipe({"env": {"id": "calculator"}}).train).device.type)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "cpu\n", done.stderr


def test_what_windows_cannot_do_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "killpg")
    monkeypatch.delattr(signal, "setitimer")
    with pytest.raises(UserError, match=r"^run_command needs process groups, which Windows lacks: train in WSL$"):
        asyncio.run(run_command(["true"]))
    with pytest.raises(UserError, match=r"^verifiers is run in a process group .* which Windows lacks: train in WSL$"):
        Worker("python", start_timeout_s=1.0)
    with pytest.raises(UserError, match=r"^the reward math .* by a timer that Windows lacks: train in WSL$"):
        math("two", answer="2", info={})
