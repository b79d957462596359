"""`agentrl up` with two trainers and two vLLM servers, and `kill -9` of one process after the other: is anything lost?

    python -m benchmarks.up_kills [--kills 10] [--mode sync] [--seed 0] [--folder FOLDER]

A seed orders the kills: of a training rank, of a server (`agentrl serve` or vLLM's), and of vLLM's engine core, here a process
of its own. `agentrl up` has to start again what has ended; the next kill follows after further steps of the run, and after a
server's once that is back with the run's weights. What the disk held at each kill (all trainers stopped meanwhile) is compared
with what the run made of it: an episode that was sampled again, trained on twice or passed over, or a step whose metrics came
out otherwise, ends the benchmark with an error. At last the command is interrupted, and the run resumed to its end. Prints one
line of JSON.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from benchmarks.server_kills import RECIPE
from tests.support.killing import OnDisk, check_nothing_lost, look

KINDS = ("rank", "server", "engine core")
STEPS_BETWEEN = 2
DEADLINE_S = 600.0


def recipe(mode: str, *, num_kills: int) -> dict[str, Any]:
    """Return a run that does not end by itself."""
    return RECIPE | {
        "engine": {"name": "vllm_server", "server": {"max_retries": 1, "timeout_s": 120}},
        "rollout": RECIPE["rollout"] | {"mode": mode},
        "credit": {"scheme": "tests.support.runs:Noise"},  # so that weights change, though the task is too hard
        "loss": {"anchor": "behavior"} if mode == "sync" else RECIPE["loss"],
        "deployment": {"trainers": 2, "servers": 2, "max_restarts": num_kills},
    }


class Deployment:
    """`agentrl up`, and all that it has started."""

    def __init__(self, *arguments: object, log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentrl", "up", *map(str, arguments)],
                env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def family(self) -> list[psutil.Process]:
        """Return what it has started and what these have."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train."""
        return [each for each in self.family() if {"agentrl", "train"} <= set(command_of(each))]

    def victim(self, kind: str, server: int, rng: random.Random) -> psutil.Process:
        """Return a process of a kind."""
        if kind == "rank":
            return rng.choice(self.ranks())
        lines = {each: " ".join(command_of(each)) for each in self.family()}
        serving = next(
            each for each, line in lines.items() if "attached serve" in line and f"--server {server} " in line
        )
        vllm = next(each for each in serving.children() if "vllm.entrypoints.openai.api_server" in command_of(each))
        if kind == "server":
            return rng.choice([serving, vllm])
        return max(vllm.children(recursive=True), key=lambda each: each.memory_info().rss)

    def until(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait for a condition, while it runs."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"waited in vain for {what}; the end of its output:\n{self.output()[-4000:]}")
            time.sleep(0.1)

    def output(self) -> str:
        """Return what it has printed."""
        return self.log.read_text(encoding="utf-8")


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; nothing of one that has ended."""
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def occurrences(log: Path, words: str) -> int:
    """Return how often a log has these words."""
    return log.read_text(encoding="utf-8").count(words)


def num_steps(run: Path) -> int:
    """Return the number of rows of metrics."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def kill(deployment: Deployment, run: Path, kind: str, rng: random.Random) -> OnDisk:
    """Kill a process, and return what the disk holds of the run at this moment, once the run goes on with all members."""
    time.sleep(rng.uniform(0, 4))
    server = rng.randrange(2)
    victim = deployment.victim(kind, server, rng)
    ranks = deployment.ranks()
    for rank in ranks:
        rank.suspend()
    found = look(run)
    assert found is not None, "a checkpoint was there"
    log = run.with_name("run-servers") / f"{server}.log"
    served, resumed = occurrences(log, "serving at"), occurrences(deployment.log, ": resuming (")
    back = occurrences(deployment.log, "is back, with the weights")
    victim.kill()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.resume()

    def are_resumed() -> bool:
        return occurrences(deployment.log, ": resuming (") > resumed

    def is_filled() -> bool:
        return occurrences(log, "serving at") > served and (
            occurrences(deployment.log, "is back, with the weights") > back or are_resumed()
        )

    deployment.until(are_resumed if kind == "rank" else is_filled, what=f"a {kind} that is started again")
    steps = num_steps(run)
    deployment.until(lambda: num_steps(run) >= steps + STEPS_BETWEEN, what="further steps")
    return found


def figures(mode: str, *, num_kills: int, seed: int, here: Path) -> dict[str, Any]:
    """Return what came of the kills.

    Raises:
        AssertionError: if anything was sampled again, trained on twice or passed over.
    """
    rng, run, file = random.Random(seed), here / "run", here / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(mode, num_kills=num_kills)), encoding="utf-8")
    kinds = [KINDS[number % len(KINDS)] for number in range(num_kills)]
    rng.shuffle(kinds)
    begin = time.monotonic()
    deployment = Deployment(file, "--run_dir", run, log=here / "up.log")
    snapshots: list[OnDisk] = []
    try:
        deployment.until(lambda: num_steps(run) > 3 and look(run) is not None, what="a checkpoint")
        for number, kind in enumerate(kinds, start=1):
            since = time.monotonic()
            snapshots.append(kill(deployment, run, kind, rng))
            words = f"{num_steps(run) - 1} steps; {time.monotonic() - since:.0f} s"
            print(f"kill {number} ({kind}): {words}", file=sys.stderr, flush=True)
        everyone = deployment.family()
        deployment.process.send_signal(signal.SIGINT)
        assert deployment.process.wait(timeout=200) == 128 + signal.SIGINT
        survivors = len(psutil.wait_procs(everyone, timeout=60)[1])
        deployment = Deployment(run, "--train.steps", num_steps(run) + 4, log=deployment.log)
        assert deployment.process.wait(timeout=DEADLINE_S) == 0, deployment.output()[-4000:]
    finally:
        deployment.process.kill()  # what it has started ends with it
    check_nothing_lost(snapshots, run)
    rows = list(RunFolder.open(run).metrics())
    assert [row["step"] for row in rows] == list(range(len(rows)))
    records = [record for path in RunFolder(run).rollouts() for record in read_records(path)]
    output = deployment.output()
    resumed = output.count(": resuming (")
    assert resumed == kinds.count("rank"), (
        f"a server's end is no rank's: the trainers resumed {resumed} times\n{output}"
    )
    return {
        "mode": mode,
        "seed": seed,
        "kills": dict(Counter(kinds)),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "steps": len(rows) - 1,
        "episodes": len(records),
        "under_way": sum(snapshot.num_live for snapshot in snapshots),
        "within_an_action": sum(snapshot.num_partial for snapshot in snapshots),
        "sampled_again": 0,
        "trained_twice": 0,
        "lost": sum(record.error is not None for record in records),
        "trainers_resumed": resumed,
        "servers_restarted": output.count(": starting it again in "),
        "engine_difference": max(row["first/engine_difference"] for row in rows if row.get("staleness/max") == 0),
        "survivors": survivors,
    }


def main() -> None:
    """Print the figures."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # with `&` a shell lets it be ignored, here and in what starts
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--mode", choices=("sync", "partial", "async"), default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    here = options.folder or Path(tempfile.mkdtemp(prefix="agentrl-kills-"))
    here.mkdir(parents=True, exist_ok=True)
    print(json.dumps(figures(options.mode, num_kills=options.kills, seed=options.seed, here=here)))


if __name__ == "__main__":
    main()
