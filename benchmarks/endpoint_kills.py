"""`kill -9` of programs that play, and of the trainer, at random moments: is anything sampled again, trained twice or lost?

    python -m benchmarks.endpoint_kills [--kills 10] [--modes sync partial async] [--seed 0]

Clients are killed in a pool on a scripted engine, which counts what it samples, each task's once: its program has to be run
again on the recorded answers. As many more are killed while a pause has interrupted their action (`within_an_action`). The
trainer is `agentrl train` with a small model; what the disk held at each kill is compared with what the run made of it in the
end. `sampled_again` counts actions that the engine began twice (clients), and episodes of which the disk held other tokens
(trainer); `lost` counts episodes that failed, or that a step passed over.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.rollout.tasks import task_seed
from agentrl.types import StopReason, TrajectoryGroup
from benchmarks.endpoint_pools import MessageEngine, agent_player, num_trained, open_pool, text
from tests.support.killing import OnDisk, check_nothing_lost, look
from tests.support.processes import Command

ROOT = Path(__file__).resolve().parents[1]
LOOP = ROOT / "tests" / "support" / "agents" / "plain_loop.py"
NUM_TASKS = 400
MODES = ("sync", "partial", "async")


def agent(num_tasks: int, *, turns: int) -> dict[str, Any]:
    """Return the section about a program that is run without a shell, and without site packages."""
    rows = [{"question": f"task {number}", "turns": turns} for number in range(num_tasks)]
    return {"command": [sys.executable, "-I", "-S", str(LOOP)], "tasks": rows}


def clients() -> Iterator[tuple[psutil.Process, int]]:
    """Yield each program that plays for this process, with the seed of its task."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, ValueError, KeyError):
            if str(LOOP) in process.cmdline()[-1:]:
                yield process, int(process.environ()["AGENTRL_SEED"])


class Killer:
    """Kills programs at random moments on a thread of its own, at most once for each task."""

    def __init__(self, num_kills: int, rng: random.Random) -> None:
        self.killed: set[int] = set()
        """Seeds of their tasks."""
        self._num, self._rng = num_kills, rng
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return len(self.killed) == self._num

    def _work(self) -> None:
        while not self.is_done:
            time.sleep(self._rng.uniform(0.02, 0.3))
            if found := [(process, seed) for process, seed in clients() if seed not in self.killed]:
                process, seed = self._rng.choice(found)
                with suppress(psutil.Error):
                    process.kill()
                    self.killed.add(seed)


def kill_all_of(seeds: set[int]) -> set[int]:
    """Kill the programs that play tasks of these seeds, and return the seeds of those that were killed."""
    killed = set[int]()
    for process, seed in clients():
        if seed in seeds:
            with suppress(psutil.Error):
                process.kill()
                killed.add(seed)
    return killed


def group_of(name: str) -> int:
    """Return the number of a group from its name, or from the name of one of its trajectories."""
    return int(name.split("/")[1])


def kill_clients(mode: str, num_kills: int, rng: random.Random) -> dict[str, Any]:
    """Return what came of kills of programs."""
    engine = MessageEngine(lambda name, prompt: text(f"{len(prompt)} " + "a" * (len(prompt) % 400)), token_s=0.001)
    player = agent_player(agent(NUM_TASKS, turns=5))
    rollout: dict[str, Any] = {"mode": mode, "num_groups": 2, "group_size": 2, "max_live_episodes": 6}
    groups: list[TrajectoryGroup] = []
    with open_pool(player, engine, num_tasks=player.config.describe().num_tasks.train or 0, **rollout) as (
        runner,
        pool,
    ):
        killer, interrupted, unplayed = Killer(num_kills, rng), set[int](), set[int]()
        while not killer.is_done or unplayed or (mode != "sync" and len(interrupted) < num_kills):
            assert len(groups) < NUM_TASKS, f"episodes of these tasks never ended: {unplayed}"
            groups += runner.run(pool.collect())
            runner.run(pool.pause())
            if (
                killer.is_done and len(interrupted) < num_kills
            ):  # nothing runs meanwhile: the next collect finds them dead
                seeds = {task_seed(0, group_of(name)) for name in engine.interrupted}
                interrupted |= kill_all_of(seeds - killer.killed - interrupted)
            unplayed = (killer.killed | interrupted) - {task_seed(0, group_of(group.group_id)) for group in groups}
            runner.run(engine.load_weights((), engine.version + 1))
    played = [trajectory for group in groups for trajectory in group.trajectories]
    begun = sum(engine.begun[trajectory.trajectory_id] for trajectory in played)
    numbers = [group_of(group.group_id) for group in groups]
    passed_over = set(range(max(numbers))) - set(numbers) if mode == "sync" else set[int]()
    return {
        "kills": len(killer.killed),
        "within_an_action": len(interrupted),
        "episodes": len(played),
        "sampled_again": begun - sum(len(t.turns) for t in played),
        "trained_twice": len(numbers) - len(set(numbers)),
        "masked": sum(len(turn.action_ids) for t in played for turn in t.turns) - num_trained(played),
        "lost": sum(t.failed or t.stop_reason is StopReason.AGENT_ERROR for t in played) + len(passed_over),
        "diverged": sum(t.metrics["diverged_calls"] for t in played),
        "faults": pool.counts["faults"],
    }


def recipe(mode: str) -> dict[str, Any]:
    """Return a run that never ends by itself, and that a program plays."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    return {
        "agent": agent(NUM_TASKS, turns=4),
        "model": {"local": sizes},
        "engine": {"name": "transformers", "lockstep": False},
        "rollout": {
            "mode": mode,
            "num_groups": 2,
            "group_size": 3,
            "max_live_episodes": 8,
            "max_turn_tokens": 48,
            "max_episode_tokens": 512,
            "max_context_tokens": 1024,
        },
        "loss": {"anchor": "behavior"} if mode == "sync" else {"unit": "version", "anchor": "behavior"},
        "train": {"steps": 10_000, "checkpoint_every": 7, "device": "cpu"},
        "evaluation": {"every": 1000, "num_tasks": 2},
        "report": {"rollouts_every": 1, "keep_rollouts": 10_000},
    }


def kill_trainer(mode: str, num_kills: int, rng: random.Random, folder: Path) -> dict[str, Any]:
    """Return what came of kills of the trainer.

    Raises:
        AssertionError: if anything was sampled again, trained twice or passed over.
    """
    file, run = folder / f"{mode}.yaml", folder / mode
    file.write_text(yaml.safe_dump(recipe(mode)), encoding="utf-8")
    process = Command("train", file, "--run_dir", run)
    snapshots: list[OnDisk] = []
    survivors = 0
    while look(run) is None:
        process.check_runs()
        time.sleep(0.1)
    for _ in range(num_kills):
        steps = num_steps(run)
        while num_steps(run) == steps:
            process.check_runs()
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 2))
        process.check_runs()
        before = [client for client, _ in clients()]
        process.kill()
        time.sleep(0.5)
        survivors += sum(client.is_running() and client.status() != psutil.STATUS_ZOMBIE for client in before)
        found = look(run)
        assert found is not None, "a checkpoint was there"
        snapshots.append(found)
        process = Command("train", run)
    process.kill()
    Command("train", run, "--train.steps", num_steps(run) + 5).finish()
    check_nothing_lost(snapshots, run)
    records = [record for path in RunFolder(run).rollouts() for record in read_records(path)]
    return {
        "kills": len(snapshots),
        "episodes": len(records),
        "under_way": sum(each.num_live for each in snapshots),
        "within_an_action": sum(each.num_partial for each in snapshots),
        "sampled_again": 0,
        "trained_twice": 0,
        "lost": sum(record.error is not None for record in records),
        "diverged": sum(record.metrics["diverged_calls"] for record in records),
        "programs_that_survived": survivors,
    }


def num_steps(run: Path) -> int:
    """Return the number of rows of metrics."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def figures(modes: Sequence[str], *, num_kills: int, seed: int) -> dict[str, Any]:
    """Return the figures of each mode."""
    rng = random.Random(seed)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-kills-") as name:
        for mode in modes:
            of_clients = kill_clients(mode, num_kills, rng)
            print(mode, json.dumps(of_clients), file=sys.stderr, flush=True)
            found[mode] = {"clients": of_clients, "trainer": kill_trainer(mode, num_kills, rng, Path(name))}
            print(mode, json.dumps(found[mode]["trainer"]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(figures(options.modes, num_kills=options.kills, seed=options.seed)))


if __name__ == "__main__":
    main()
