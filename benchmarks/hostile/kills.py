"""Kills: simulated, at any byte of a journal, and real ones of a training process at random moments."""

import asyncio
import copy
import json
import random
import shutil
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agentrl import ToolEnv, tool
from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.rollout import EnvPlayer, EpisodeContext, Journal, RolloutConfig, RolloutPool, Tasks
from agentrl.rollout.journal import Ended, Event, Interrupted, Played
from agentrl.rollout.stream import TaskStream
from agentrl.testing import ScriptedEngine
from agentrl.types import Trajectory
from benchmarks.hostile.cases import CaseCounts, agentrl, attempt
from benchmarks.hostile.recipes import TINY
from tests.support.killing import check_nothing_lost, look

MODES = ("sync", "partial", "async")
NUM_SIMULATED, NUM_REAL, NUM_FOLDERS = 96, 10, 4
"""Kills: simulated of each mode and kind of environment, real of each mode; recordings to cut simulated ones from."""


class Counter(ToolEnv):
    """Ends after three calls of its tool; a flaky one raises now and then, whatever its seed."""

    def __init__(self, flaky: bool = False, can_snapshot: bool = False) -> None:
        super().__init__()
        self.flaky, self.can_snapshot = flaky, can_snapshot

    def start(self, options: dict[str, Any]) -> str:
        self.count = 0
        return f"Count to three. {int(self.np_random.integers(100))}"

    @tool
    def up(self) -> str:
        """Count on."""
        self.count += 1
        self.reward(float(self.np_random.random()))
        if self.count == 3:
            self.finish(success=True)
        return str(self.count)

    def answer(self, text: str) -> str:
        if self.flaky and random.random() < 0.2:
            raise RuntimeError("flaky")
        return f"Use the tool. {self.np_random.random():.3f}"


ENVS = {"repeating": {}, "pickled": {"can_snapshot": True}, "flaky": {"flaky": True}}


def _pool(mode: Any, env: str, salt: int, folder: Path) -> RolloutPool:
    """Return a pool whose policy says otherwise under each salt, so that whatever is sampled again shows."""
    renderer = ChatMLRenderer(train_tokenizer([], vocab_size=261))
    call = renderer.encode(
        {"role": "assistant", "content": '<tool_call>\n{"name": "up", "arguments": {}}\n</tool_call>'}
    )

    def script(request_id: str, number: int) -> Sequence[int]:
        rng = random.Random(f"{salt} {request_id} {number}")
        noise = tuple(rng.randrange(32, 120) for _ in range(rng.randint(1, 6)))
        return (*noise, *call) if rng.random() < 0.6 else (*noise, *renderer.stop_token_ids)

    config = RolloutConfig(
        mode=mode,
        num_groups=2,
        group_size=3,
        max_live_episodes=7,
        max_turns=5,
        max_turn_tokens=256,
        max_context_tokens=4096,
        max_retries=1,
    )
    return RolloutPool(
        player=EnvPlayer(partial(Counter, **ENVS[env])),
        context=EpisodeContext(engine=ScriptedEngine(script, logprob=-1.0 - salt), renderer=renderer, config=config),
        tasks=Tasks(seed=0),
        journal=Journal(folder),
    )


async def _steps(pool: RolloutPool, count: int, mode: str, first: int = 0) -> list[list[Trajectory]]:
    """Collect, and replace the weights, as a trainer does."""
    steps = []
    for step in range(first, first + count):
        groups = await pool.collect()
        steps.append([trajectory for group in groups for trajectory in group.trajectories])
        if mode == "async":
            for _ in range(20):
                await asyncio.sleep(0.0005)
        await pool.pause()
        await pool._engine.load_weights((), version=step + 1)
    return steps


@dataclass(slots=True)
class Recording:
    """A run's journal with its checkpoints: a state each, and what had been trained on by then."""

    folder: Path
    states: list[tuple[int, dict[str, Any], list[str]]] = field(default_factory=list)
    """Steps done, the state, and the ids of what was trained on."""


def record(folder: Path, mode: str, env: str, salt: int) -> Recording:
    """Play six steps with a checkpoint after every second one; every file of the journal is kept."""
    pool, recording = _pool(mode, env, salt, folder), Recording(folder)
    trained: list[str] = []
    with asyncio.Runner() as runner:
        for done in range(0, 6, 2):
            recording.states.append((done, copy.deepcopy(pool.state_dict()), list(trained)))
            for step in runner.run(_steps(pool, 2, mode, done)):
                trained += [trajectory.trajectory_id for trajectory in step]
        runner.run(pool.stop())
    pool.close()
    return recording


def kill_at(recording: Recording, mode: str, env: str, rng: random.Random, scratch: Path) -> None:
    """Resume from a checkpoint and a journal that was cut at some byte of some file; check that nothing is lost or doubled."""
    files = sorted(path for path in recording.folder.iterdir() if path.is_file())
    assert len(files) == len(recording.states), files
    last = rng.randrange(len(files))
    # A kill between a new file and the checkpoint that names it leaves the checkpoint before.
    number = max(0, last - (rng.random() < 0.3))
    for path in files[: last + 1]:
        shutil.copy(path, scratch)
    whole = files[last].read_bytes()
    (scratch / files[last].name).write_bytes(whole[: rng.randrange(len(whole) + 1)])
    done, state, trained = recording.states[number]
    seen = _sampled(state, mode, Journal(scratch).read_events(int(files[number].stem)))
    pool = _pool(mode, env, salt=1, folder=scratch)
    with asyncio.Runner() as runner:
        runner.run(pool._engine.load_weights((), version=done))
        pool.load_state_dict(copy.deepcopy(state))
        pool.recover()
        steps = runner.run(_steps(pool, 6, mode, done))
        runner.run(pool.stop())
    pool.close()
    after = {trajectory.trajectory_id: trajectory for step in steps for trajectory in step}
    ids = [*trained, *(trajectory.trajectory_id for step in steps for trajectory in step)]
    assert len(ids) == len(set(ids)), "trained on twice"
    if env == "flaky":
        return  # an episode that fails while it is played again is begun again, and its group may be replaced
    groups = {int(name.split("/")[1]) for name in ids}
    assert len(groups) == max(groups) + 1 or mode != "sync", "a group was passed over"
    for name, sampled in seen.items():
        if name in after:
            found = [turn.action_ids for turn in after[name].turns]
            assert found[: len(sampled) - 1] == sampled[:-1], f"{name} was sampled again"
            assert found[len(sampled) - 1][: len(sampled[-1])] == sampled[-1], (
                f"{name} lost what was sampled of its turn"
            )
        else:
            assert mode != "sync", f"{name} was lost"
    begun = {name.rpartition("/")[0] for name in seen}
    overtaken = len(begun - {name.rpartition("/")[0] for name in ids})
    assert overtaken <= 2 * 3, f"{overtaken} groups that were begun are nowhere"


def _sampled(state: dict[str, Any], mode: Any, events: Iterable[Event]) -> dict[str, list[tuple[int, ...]]]:
    """Return the actions of each episode, by a checkpoint and the events after it; the last one perhaps in part."""
    stream = TaskStream(RolloutConfig(mode=mode), tasks=Tasks(seed=0))
    stream.load_state_dict(copy.deepcopy(state))
    turns: dict[str, list[tuple[int, ...]]] = {}
    partials: dict[str, tuple[int, ...]] = {}
    attempts: dict[str, int] = {}
    for group in stream._groups.values():
        turns |= {done.trajectory_id: [turn.action_ids for turn in done.turns] for done in group.done}
        for live in group.waiting:
            name = live.task.trajectory_id
            turns[name], attempts[name] = [turn.action_ids for turn in live.turns], live.task.attempt
            for each in live.partials:  # of an environment: one at most
                if each.completion.token_ids:
                    partials[name] = each.completion.token_ids
    for event in events:
        if isinstance(event, Played | Interrupted):
            name = event.task.trajectory_id
            if event.task.attempt != attempts.get(name, 0):
                turns[name], attempts[name] = [], event.task.attempt
            partials.pop(name, None)
            if isinstance(event, Played):
                turns.setdefault(name, []).append(event.turn.action_ids)
            else:
                (under_way,) = event.partials
                partials[name] = under_way.completion.token_ids
        elif isinstance(event, Ended):
            name = event.trajectory.trajectory_id
            turns[name] = [*turns.get(name, [])[: event.played], *(turn.action_ids for turn in event.trajectory.turns)]
            partials.pop(name, None)
    names = {*turns, *partials}
    return {
        name: found
        for name in names
        if (found := [*turns.get(name, []), *([partials[name]] if name in partials else [])])
    }


def simulate(mode: str, env: str, count: int, seed: int) -> None:
    """Try so many kills of one recording, in the working directory."""
    rng = random.Random(seed)
    random.seed(seed)
    recording = record(Path("journal"), mode, env, salt=0)
    for number in range(count):
        scratch = Path(f"scratch-{number}")
        scratch.mkdir()
        kill_at(recording, mode, env, rng, scratch)
        shutil.rmtree(scratch)


def try_simulated_kills(folder: Path, every: int) -> CaseCounts:
    """Cut journals of pools at random bytes and resume."""
    tally = CaseCounts(
        "a kill, simulated: a journal that ends at any byte of any file, before or after its checkpoint; then resumed"
    )
    for mode in MODES:
        for env in ENVS:
            for number in range(NUM_FOLDERS if every == 1 else 1):
                count = max(2, NUM_SIMULATED // NUM_FOLDERS // every)
                here = folder / f"simulated-{mode}-{env}-{number}"
                ended = attempt(partial(simulate, mode, env, count, number), folder=here)
                tally.outcomes["nothing lost, nothing doubled"] += count - 1
                tally.add(f"{mode}, {env}, seed {number}", "nothing lost, nothing doubled", wrong=ended.harm())
    return tally


def try_real_kills(folder: Path, every: int) -> CaseCounts:
    """Kill training processes with SIGKILL and resume, again and again; then compare with what was on the disk each time."""
    tally = CaseCounts("`kill -9` of a training process at a random moment; then resumed")
    for mode in MODES:
        if wrong := _kill_one(folder / mode, mode, max(2, NUM_REAL // every), tally.details):
            tally.add(mode, "", wrong=wrong)
        tally.outcomes["nothing lost, nothing doubled"] += max(2, NUM_REAL // every) - bool(wrong)
    return tally


def _kill_one(here: Path, mode: str, count: int, details: dict[str, Any]) -> str | None:
    """Kill one run so many times; return what was lost; None: nothing."""
    recipe = {**TINY, "env": {"id": "key_door"}, "train": {**TINY["train"], "steps": 10_000, "checkpoint_every": 3}}
    recipe["rollout"] = {
        **TINY["rollout"],
        "mode": mode,
        "group_size": 3,
        "max_live_episodes": 8,
        "max_turn_tokens": 48,
    }
    recipe["evaluation"] = {"every": 10, "num_tasks": 2}
    # A fast machine makes more steps than a run keeps rollouts of.
    recipe["report"] = {**TINY.get("report", {}), "rollouts_every": 1, "keep_rollouts": 10_000}
    if mode != "sync":
        recipe["loss"] = {"unit": "version", "anchor": "behavior"}
    here.mkdir(parents=True)
    file, run, rng = here / "recipe.yaml", here / "run", random.Random(mode)
    file.write_text(yaml.safe_dump(recipe))
    snapshots = []
    target: tuple[object, ...] = (file, "--run_dir", run)
    for number in range(count):
        ended = attempt(agentrl("train", *target), folder=here / f"kill-{number}", kill_after_s=rng.uniform(0.5, 6))
        if ended.status != -signal.SIGKILL:
            return f"kill {number}: {ended}"
        if (run / "checkpoints").is_dir() and (found := look(run)) is not None:
            snapshots.append(found)
            target = (run,)
        if target != (run,):
            shutil.rmtree(run, ignore_errors=True)
    steps = max((step for snapshot in snapshots for step in snapshot.rows), default=0) + 8
    ended = attempt(agentrl("train", *target, "--train.steps", steps), folder=here / "last", deadline_s=600)
    if ended.status:
        return f"the last resume: {ended}"
    details[f"{mode}: steps"] = steps
    details[f"{mode}: episodes under way when killed"] = sum(snapshot.num_live for snapshot in snapshots)
    details[f"{mode}: of these within a turn"] = sum(snapshot.num_partial for snapshot in snapshots)
    try:
        check_nothing_lost(snapshots, run)
    except AssertionError as error:
        return str(error)
    if mode == "sync":
        whole = here / "uninterrupted"
        ended = attempt(
            agentrl("train", file, "--run_dir", whole, "--train.steps", steps), folder=here / "whole", deadline_s=600
        )
        if ended.status:
            return f"the uninterrupted run: {ended}"
        if rows(run) != rows(whole):
            step = next(a["step"] for a, b in zip(rows(run), rows(whole), strict=False) if a != b)
            return f"metrics of step {step} differ from an uninterrupted run's"
        details["sync: rows of metrics equal to an uninterrupted run's, bit for bit"] = len(rows(run))
    return None


def rows(run: Path) -> list[dict[str, float]]:
    """Return a run's metrics without what depends on the machine."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    machine = ("time/", "process/", "pool/loop_lag_s")
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(machine) and not k.endswith("_s")}
        for line in lines
    ]
