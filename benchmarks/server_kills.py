"""Two training processes and two of vLLM's servers, and `kill -9` of either side at random moments: is anything lost?

    python -m benchmarks.server_kills [--kills 20] [--seed 0] [--folder FOLDER]

A run in mode `partial` is trained by `agentrl launch --processes 2`, its weights go to two servers that `agentrl serve` has
started. The kills hit all training processes and one server in turn, two at a random moment and two while weights are on
their way. Trainers are started again, and the run is resumed; when a server is killed, the run has to go on by itself, and with
both once that is started again. In the end what the disk held at each kill, of either side, is compared with what the run made
of it: an episode that was sampled again, trained on twice or passed over, or a step whose metrics came out otherwise, ends the
benchmark with an error.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from agentrl.report.folder import RunFolder
from tests.support.killing import OnDisk, check_nothing_lost, look
from tests.support.ports import free_port

RECIPE: dict[str, Any] = {
    "env": {"id": "key_door"},
    "model": {"local": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}},
    "rollout": {
        "mode": "partial",
        "num_groups": 4,
        "group_size": 3,
        "max_live_episodes": 16,
        "max_turns": 8,
        "max_turn_tokens": 64,
        "max_episode_tokens": 512,
        "max_context_tokens": 1024,
    },
    "warmup": {"steps": 20, "num_demonstrations": 32, "skill": 0.5},
    "loss": {"unit": "version", "anchor": "behavior"},
    "train": {"steps": 10_000, "checkpoint_every": 3, "num_minibatches": 2, "device": "cpu"},
    "evaluation": {"every": 1000, "num_tasks": 2},
    "report": {"rollouts_every": 1, "keep_rollouts": 10_000},
}
AGENTRL = (sys.executable, "-m", "agentrl")


class Side:
    """A command that runs in a process group of its own, and what it has started."""

    def __init__(self, *arguments: object, log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*AGENTRL, *map(str, arguments)], stdout=file, stderr=file, start_new_session=True
            )
        self.log = log

    def kill(self) -> None:
        """End all of it at once."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let all of it stand still meanwhile, so that the disk is as a kill at this moment would leave it."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            for found in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
                with suppress(psutil.NoSuchProcess):
                    os.kill(found.pid, number)

    def has_ended(self) -> bool:
        return self.process.poll() is not None


def serve(file: Path, url: str, log: Path) -> Side:
    """Start a server, and wait until it serves."""
    before = log.read_text(encoding="utf-8").count("serving at") if log.is_file() else 0
    side = Side("serve", file, "--engine.server.url", url, log=log)
    while log.read_text(encoding="utf-8").count("serving at") == before:
        if side.has_ended():
            raise SystemExit(f"a server did not start: {log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.1)
    return side


def wait_for_a_moment(run: Path, trainers: Side, rng: random.Random, *, is_push: bool) -> None:
    """Wait until the run goes on; then a while, or until weights are on their way after another step."""
    since, steps = time.time(), num_steps(run)
    while not any(path.stat().st_mtime > since for path in run.glob("journal/*.jsonl")) or num_steps(run) == steps:
        if trainers.has_ended():
            raise SystemExit(f"the run has ended by itself: {trainers.log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.05)
    if not is_push:
        time.sleep(rng.uniform(0, 4))
        return
    steps = num_steps(run)
    deadline = time.monotonic() + 60
    while num_steps(run) == steps and time.monotonic() < deadline:  # its row is written when its weights have gone
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.3))


def wait_for_steps(run: Path, trainers: Side, count: int) -> None:
    """Wait until a run that was not started again has made more steps."""
    goal = num_steps(run) + count
    while num_steps(run) < goal:
        if trainers.has_ended():
            raise SystemExit(f"the run has ended with a server: {trainers.log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.1)


def on_disk(run: Path) -> list[OnDisk]:
    """Return what the disk holds of a run, once there is a checkpoint."""
    found = look(run)
    return [] if found is None else [found]


def num_steps(run: Path) -> int:
    """Return the number of rows of metrics."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    here = options.folder or Path(tempfile.mkdtemp(prefix="agentrl-kills-"))
    here.mkdir(parents=True, exist_ok=True)
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    file, run, rng = here / "recipe.yaml", here / "run", random.Random(options.seed)
    engine = {"name": "vllm_server", "server": {"url": urls, "max_retries": 2}}
    file.write_text(yaml.safe_dump({**RECIPE, "engine": engine}), encoding="utf-8")
    logs = [here / f"server-{number}.log" for number in range(2)]
    servers = [serve(file, url, log) for url, log in zip(urls, logs, strict=True)]
    trainers: Side | None = None
    snapshots: list[OnDisk] = []
    sides = {"trainers": 0, "server": 0}
    try:
        for number in range(options.kills):
            if trainers is None:
                target = (run,) if (run / "checkpoints").is_dir() else (file, "--run_dir", run)
                trainers = Side("launch", "--processes", "2", *target, log=here / "trainers.log")
            wait_for_a_moment(run, trainers, rng, is_push=bool(number // 2 % 2))
            side = "server" if number % 2 else "trainers"
            begin = time.monotonic()
            if side == "server":
                place = rng.randrange(2)
                servers[place].kill()
                with trainers.stopped():
                    snapshots += on_disk(run)
                wait_for_steps(run, trainers, 2)
                servers[place] = serve(file, urls[place], logs[place])
            sides[side] += 1
            if side == "server":
                wait_for_steps(run, trainers, 2)
                seconds = time.monotonic() - begin
                print(
                    f"kill {number + 1}, of a server: the run went on, {num_steps(run) - 1} steps; {seconds:.0f} s",
                    flush=True,
                )
                continue
            trainers.kill()
            trainers = None
            snapshots += on_disk(run)
            seconds = time.monotonic() - begin
            print(f"kill {number + 1}, of the {side}, after {num_steps(run) - 1} steps; {seconds:.0f} s", flush=True)
        if trainers is not None:
            trainers.kill()
        last = Side(
            "launch", "--processes", "2", run, "--train.steps", num_steps(run) + 4, log=here / "trainers.log"
        ).process
        if last.wait(timeout=600):
            raise SystemExit(
                f"the last resume ended with {last.returncode}: {(here / 'trainers.log').read_text(encoding='utf-8')[-3000:]}"
            )
        check_nothing_lost(snapshots, run)
    finally:
        for one in [*servers, *([trainers] if trainers else [])]:
            one.kill()
    log = (here / "trainers.log").read_text(encoding="utf-8")
    steps = [int(row["step"]) for row in RunFolder.open(run).metrics()]
    assert steps == list(range(len(steps))), steps
    num_live, num_partial = (sum(getattr(one, name) for one in snapshots) for name in ("num_live", "num_partial"))
    print(
        f"{sides['trainers']} kills of all trainers and {sides['server']} of a server, {len(snapshots)} looks at the disk, "
        f"{len(steps) - 1} steps: {num_live} "
        f"episodes under way when killed, {num_partial} of them within a turn; nothing lost, nothing doubled. "
        f"{log.count('Traceback')} tracebacks, {log.count('cannot take weights')} times through files, "
        f"{log.count('is left out')} times a server was left out"
    )


if __name__ == "__main__":
    main()
