"""Episodes that outlive a step: nothing is lost, put off or played twice, and every token is what it would have been."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.chat import Renderer
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.errors import EnvironmentFailure
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks
from agentrl.testing import ScriptedEngine
from agentrl.types import Message, Trajectory, TrajectoryGroup
from tests.support.each import each
from tests.support.talk import Talk, fails

NewEngine = Callable[..., TransformersEngine]
SIZE = 2


class Tail(Talk):
    """One turn, or nine where the seed says so."""

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self.turn += 1
        said = {"role": "user", "content": f"{self.turn}"}
        return (said,), 1.0, self.turn >= (9 if self.seed % 5 == 0 else 1), False, {}


class Table:
    """A pool on an engine of its own; each step pushes the same weights as a new version."""

    def __init__(self, engine: TransformersEngine, renderer: Renderer, make_env: Any = Tail, **config: Any) -> None:
        settings = {
            "mode": "partial",
            "num_groups": 2,
            "group_size": SIZE,
            "max_turn_tokens": 64,
            "max_turns": 16,
            "max_live_episodes": 6,
            "env_timeout_s": 5.0,
            **config,
        }
        self.engine, self.runner = engine, asyncio.Runner()
        self.pool = RolloutPool(
            player=EnvPlayer(make_env),
            context=EpisodeContext(engine=engine, renderer=renderer, config=RolloutConfig.model_validate(settings)),
            tasks=Tasks(seed=5),
        )

    def step(self) -> list[TrajectoryGroup]:
        groups = self.runner.run(self._collect())
        weights = list(self.engine._model.state_dict().items())
        self.runner.run(self.engine.load_weights(weights, self.engine.version + 1))
        return groups

    async def _collect(self) -> list[TrajectoryGroup]:
        async with asyncio.timeout(200):
            return await self.pool.collect()

    def close(self) -> None:
        self.runner.run(self.pool.stop())
        self.pool.close()
        self.runner.close()


def number(group: TrajectoryGroup) -> int:
    return int(group.group_id.rpartition("/")[2])


def sampled(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [turn.action_ids for turn in trajectory.turns]


def in_sync(engine: TransformersEngine, renderer: Renderer, num: int) -> dict[str, list[tuple[int, ...]]]:
    table = Table(engine, renderer, mode="sync", num_groups=num)
    try:
        return {t.trajectory_id: sampled(t) for group in table.step() for t in group.trajectories}
    finally:
        table.close()


def test_every_group_is_handed_out_once_whole_and_before_it_is_too_old(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    table = Table(new_engine(), renderer)
    handed: list[int] = []
    spans = 0
    for step in range(14):
        groups = table.step()
        assert len(groups) == 2
        assert [number(group) for group in groups] == sorted(number(group) for group in groups)
        handed += map(number, groups)
        for group in groups:
            assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}/{i}" for i in range(SIZE)]
            for trajectory in group.trajectories:
                versions = [version for turn in trajectory.turns for version in turn.versions]
                assert versions == sorted(versions)
                assert step - versions[0] <= 2
                spans += len(set(versions)) > 1
    assert len(set(handed)) == len(handed) == 28
    assert handed != sorted(handed)  # short ones overtook long ones
    assert spans > 0  # and long ones were sampled under several versions
    # Whoever was overtaken comes within two steps: what is missing is under way, and not older than the groups of three.
    assert set(range(max(handed))) - set(handed) <= set(range(max(handed) - 6, max(handed)))
    table.close()


def test_under_the_same_weights_interruptions_change_no_token(new_engine: NewEngine, renderer: Renderer) -> None:
    expected = in_sync(new_engine(), renderer, 20)
    table = Table(new_engine(), renderer)
    for _ in range(6):
        for group in table.step():
            for trajectory in group.trajectories:
                assert sampled(trajectory) == expected[trajectory.trajectory_id]
    table.close()


def test_what_is_saved_resumes_in_another_process_from_the_middle_of_a_turn(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    expected = in_sync(new_engine(), renderer, 30)
    table = Table(new_engine(), renderer)
    handed: list[str] = []
    partial = 0
    state: dict[str, Any] = {}
    for step in range(10):
        for group in table.step():
            handed.append(group.group_id)
            for trajectory in group.trajectories:
                assert sampled(trajectory) == expected[trajectory.trajectory_id]
        state = json.loads(json.dumps(table.pool.state_dict()))
        waiting = [episode for group in state["groups"].values() for episode in group["waiting"]]
        partial += sum(bool(p["completion"]["token_ids"]) for episode in waiting for p in episode["partials"])
        if step % 2:
            table.close()
            version = table.engine.version
            table = Table(new_engine(), renderer)
            table.runner.run(table.engine.load_weights([], version))
            table.pool.load_state_dict(state)
            assert json.loads(json.dumps(table.pool.state_dict())) == state
    assert len(set(handed)) == len(handed) == 20
    assert partial > 0
    assert {f"train/{i:06d}" for i in range(state["next_group"])} == set(handed) | set(state["groups"])
    table.close()


def test_groups_that_fail_or_teach_nothing_give_way_and_a_broken_environment_stops_the_run(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    table = Table(new_engine(), renderer, max_retries=0, dynamic_sampling=1)
    first = [number(group) for group in table.step()]
    assert table.pool.counts["zero_spread_groups"] == 1  # short ones earn the same
    assert len(first) == 2
    table.close()
    table = Table(
        new_engine(), renderer, fails(where="step", when=lambda env: True), max_retries=1, max_consecutive_failures=5
    )
    with pytest.raises(EnvironmentFailure, match=r"episodes failed in a row; the last one: .*the lamp of member"):
        table.step()
    assert table.pool.counts["retries"] >= 5
    table.close()


class FreezableTalker(ScriptedEngine):
    """Keeps the calls that stop it."""

    def __init__(self) -> None:
        super().__init__([])
        self.calls: list[str] = []

    async def pause(self) -> None:
        self.calls.append("pause")

    async def freeze(self) -> None:
        self.calls.append("freeze")


@each(("keeps", "calls"), [(False, ["pause"]), (True, ["freeze", "pause"])])
def test_for_a_sync_actions_stay_in_the_engine_with_keep_cache_and_a_checkpoint_has_them_back(
    keeps: bool, calls: list[str], renderer: Renderer
) -> None:
    engine: Any = FreezableTalker()
    table = Table(engine, renderer, mode="async", keep_cache=keeps)
    table.runner.run(table.pool.freeze())
    table.runner.run(table.pool.pause())
    table.runner.run(table.pool.freeze())  # nothing is left in the engine
    assert engine.calls == calls
    table.close()


@each("mode", ["sync", "partial"])
def test_a_mode_that_samples_over_no_sync_keeps_no_cache(mode: str) -> None:
    with pytest.raises(ValueError, match=f"keep_cache: true interrupts nothing with mode: {mode}; remove it, or set"):
        RolloutConfig.model_validate({"mode": mode, "keep_cache": True})


class DroppingTalker(FreezableTalker):
    async def sleep(self) -> None:
        self.calls.append("sleep")


def test_an_engine_may_drop_its_weights_between_a_collection_and_the_sync_alone(renderer: Renderer) -> None:
    engine: Any = DroppingTalker()
    table = Table(engine, renderer)
    for before_sync in (True, False):
        table.runner.run(table.pool.pause(before_sync=before_sync))
        table.runner.run(table.pool.resume())
    assert engine.calls == ["sleep", "pause"]
    table.close()
