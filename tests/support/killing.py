"""What is on the disk of a run that was killed, and what must come of it."""

import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.distributed.checkpoints import checkpoints
from agentrl.recipe.config import load_recipe
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.rollout import Journal, RolloutConfig, Tasks
from agentrl.rollout.stream import TaskStream
from agentrl.run.parts import task_shard
from agentrl.types import TaskShard
from tests.support.processes import Command

RECIPE: dict[str, Any] = {
    "env": {"id": "key_door"},
    "model": {
        "local": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    },
    "engine": {"name": "transformers", "lockstep": False},
    "rollout": {
        "mode": "async",
        "num_groups": 2,
        "group_size": 3,
        "max_live_episodes": 8,
        "max_turns": 8,
        "max_turn_tokens": 128,
        "max_episode_tokens": 512,
        "max_context_tokens": 1024,
    },
    "warmup": {"steps": 20, "num_demonstrations": 32, "skill": 0.5},
    "loss": {"unit": "version", "anchor": "behavior"},
    "train": {"steps": 10_000, "checkpoint_every": 7, "device": "cpu"},
    "evaluation": {"every": 10, "num_tasks": 2},
    "report": {"rollouts_every": 1, "keep_rollouts": 10_000},
}
"""Episodes that outlive a step of a run that never ends by itself."""

Sampled = list[tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]]
"""Tokens, log-probabilities and versions of each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """What a killed run has written."""

    episodes: dict[str, Sampled]
    """Every episode that is trained on, finished or under way, as far as it was sampled."""
    rows: dict[int, dict[str, float]]
    """Metrics of every step, without what depends on the machine or was not recorded."""
    num_processes: int
    num_live: int
    num_partial: int
    """Episodes under way, and those of them in the middle of a turn."""


def wait_for_a_moment(run: Path, process: Command, started: float, number: int, rng: random.Random) -> None:
    """Let a run that was started at `started` train for a while: every other time, until its episodes are being played."""
    while number % 2 and not any(p.stat().st_mtime > started and p.stat().st_size for p in (run / "journal").iterdir()):
        process.check_runs()
        time.sleep(0.02)
    time.sleep((2 if number % 2 else 8) * rng.random())
    process.check_runs()


def look(run: Path) -> OnDisk | None:
    """Read what there is of a run; None: nothing that it would resume from."""
    folder = RunFolder(run)
    if not checkpoints(folder.checkpoints):
        return None
    episodes: dict[str, Sampled] = {}
    num_live = num_partial = 0
    newest, recipe = checkpoints(folder.checkpoints)[-1], load_recipe(folder.config_file)
    states = [json.loads(path.read_text()) for path in sorted(newest.glob("agentrl*.json"), key=lambda p: p.stem)]
    for process, state in enumerate(states):
        shard = task_shard(recipe.engine, num_groups=recipe.rollout.num_groups, rank=process, num_ranks=len(states))
        if not shard.num_groups:
            continue  # it only trains
        stream = _recovered(
            recipe.rollout, shard, folder.journal / f"process-{process}" if process else folder.journal, state
        )
        handed_out = [group for step in stream._handed_out for group in step]
        done = [t for group in stream._groups.values() for t in group.done]
        for trajectory in [*done, *(t for group in handed_out for t in group.trajectories)]:
            episodes[trajectory.trajectory_id] = [
                (turn.action_ids, turn.behavior_logprobs, turn.versions) for turn in trajectory.turns
            ]
        for episode in (e for group in stream._groups.values() for e in group.waiting):
            sampled = [(turn.action_ids, turn.behavior_logprobs, turn.versions) for turn in episode.turns]
            for completion in (partial.completion for partial in episode.partials):
                sampled.append((completion.token_ids, completion.logprobs, completion.versions))
                num_partial += bool(completion.token_ids)
            num_live += bool(sampled)
            episodes[episode.task.trajectory_id] = sampled
        stream.close()
    for path in folder.rollouts():
        if int(path.stem.removeprefix("step-")) <= states[0]["finished_steps"]:
            for record in read_records(path):
                assert record.trajectory_id not in episodes, "trained on, and to be trained on again"
                episodes[record.trajectory_id] = [
                    (tuple(turn.action_ids), tuple(turn.behavior_logprobs), tuple(turn.versions))
                    for turn in record.turns
                ]
    rows = {int(row["step"]): {k: v for k, v in row.items() if _repeats(k)} for row in folder.metrics()}
    return OnDisk(episodes=episodes, rows=rows, num_processes=len(states), num_live=num_live, num_partial=num_partial)


def _recovered(config: RolloutConfig, shard: TaskShard, journal: Path, state: dict[str, Any]) -> TaskStream:
    """Return the tasks of a process as it would resume them; what is on the disk stays as it is."""
    with TemporaryDirectory() as scratch:
        if journal.is_dir():
            shutil.copytree(journal, scratch, dirs_exist_ok=True)
        stream = TaskStream(config, tasks=Tasks(seed=0), shard=shard, journal=Journal(Path(scratch)))
        stream.load_state_dict(state["pool"])
        stream.recover(ignore=False)
    return stream


def check_nothing_lost(snapshots: list[OnDisk], run: Path) -> None:
    """Check what a run made of what was there each time it was killed."""
    end = look(run)
    assert end is not None
    ids = [record.trajectory_id for path in RunFolder(run).rollouts() for record in read_records(path)]
    assert len(ids) == len(set(ids)), "trained on twice"
    for number, snapshot in enumerate(snapshots):
        for name, sampled in snapshot.episodes.items():
            assert _begins_with(end.episodes[name], sampled), f"kill {number}: {name} was sampled again"
        for step, row in snapshot.rows.items():
            otherwise = {k: (row.get(k), v) for k, v in end.rows[step].items() if row.get(k) != v}
            assert end.rows[step] == row, f"kill {number}: step {step} came out otherwise: {otherwise}"
    for process in range(end.num_processes):
        numbers = {int(name.split("/")[1]) for name in end.episodes}
        started = {number for number in numbers if number % end.num_processes == process}
        assert started == set(range(process, max(started) + 1, end.num_processes)), "a group was passed over"


def _begins_with(whole: Sampled, part: Sampled) -> bool:
    if not part:
        return True
    *turns, last = part
    if whole[: len(turns)] != turns or len(whole) < len(part):
        return False
    return all(column[: len(started)] == started for column, started in zip(whole[len(turns)], last, strict=True))


def _repeats(name: str) -> bool:
    return not name.startswith(("time/", "process/", "pool/", "eval/"))
