"""What goes wrong while episodes are played: each thing under a deadline, mended where it can be, and nothing lost."""

import asyncio
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import load_credit
from agentrl.chat import Renderer
from agentrl.engine.batched import Request
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.rollout import EnvPlayer, EpisodeContext, Journal, RolloutConfig, RolloutPool, Tasks
from agentrl.types import Completion, Message, Sampling, StopReason, Trajectory
from tests.support.each import each
from tests.support.talk import Talk, collect, episodes, logged
from tests.support.threads import hang, wait_until

NewEngine = Callable[..., TransformersEngine]
Opened = Callable[[RolloutPool], RolloutPool]
NewPool = Callable[..., RolloutPool]


@pytest.fixture
def new_pool(new_engine: NewEngine, renderer: Renderer, opened: Opened) -> NewPool:
    def make(
        make_env: Any = Talk,
        *,
        engine: TransformersEngine | None = None,
        journal: Journal | None = None,
        **config: Any,
    ) -> RolloutPool:
        settings = {"group_size": 3, "max_turn_tokens": 64, "max_live_episodes": 8, "env_timeout_s": 5.0, **config}
        return opened(
            RolloutPool(
                player=EnvPlayer(make_env),
                context=EpisodeContext(
                    engine=engine or new_engine(lockstep=False),
                    renderer=renderer,
                    config=RolloutConfig.model_validate(settings),
                ),
                tasks=Tasks(seed=5),
                journal=journal,
            )
        )

    return make


def sampled(trajectories: dict[str, Trajectory]) -> dict[str, list[tuple[int, ...]]]:
    return {name: [turn.action_ids for turn in t.turns] for name, t in trajectories.items()}


class Flickers(TransformersEngine):
    """Fails each conversation's third request, once, and says nothing more to it than that."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: Counter[str] = Counter()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        self.requests[request_id] += 1
        if self.requests[request_id] == 3:
            raise EngineError("connection reset")
        return await super().generate(prompt_ids, sampling, request_id)


def test_an_episode_whose_engine_failed_resumes_from_where_it_stood(new_pool: NewPool, new_engine: NewEngine) -> None:
    expected = episodes(collect(new_pool(), 3))
    made: list[str] = []
    engine = new_engine(Flickers, lockstep=False)
    assert isinstance(engine, Flickers)
    pool = new_pool(logged(lambda what, _: made.append(what)), engine=engine, max_retries=1)
    found = episodes(collect(pool, 3))
    assert sampled(found) == sampled(expected)
    long = [name for name, trajectory in expected.items() if len(trajectory.turns) > 2]
    assert pool.counts["retries"] == len(long) > 0
    assert made.count("made") == len(expected) + len(long)  # each of those was played again up to there
    assert all(engine.requests[f"{name}#0"] == len(expected[name].turns) + 1 for name in long)  # and sampled once


def test_a_backend_that_is_down_for_a_second_is_waited_for(new_pool: NewPool) -> None:
    begun: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def log(what: str, env: Talk) -> None:
        if what == "reset":
            times = begun[env.seed, env.member]
            times.append(time.monotonic())
            if len(times) <= 2:
                raise ConnectionError("the backend is down")

    pool = new_pool(logged(log), max_retries=2)
    assert [len(group.valid) for group in collect(pool, 2)] == [3, 3]
    assert all(third - second >= 0.5 for _, second, third in begun.values())
    assert pool.counts["failed_episodes"] == 0
    assert pool.counts["retries"] == 12


class Clock:
    """Lets time pass for deadlines on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._passed_s, time_s = 0.0, loop.time
        vars(loop)["time"] = lambda: time_s() + self._passed_s

    def skip(self, seconds: float) -> None:
        self._passed_s += seconds


def test_the_engines_deadline_stands_still_while_it_is_paused(new_engine: NewEngine, new_pool: NewPool) -> None:
    engine = new_engine(lockstep=False)
    # The environment's deadline keeps running; a busy machine may be within a call of it when the clock skips.
    timeouts = {"engine_timeout_s": 60.0, "env_timeout_s": 10_000.0}
    pool = new_pool(engine=engine, mode="partial", num_groups=1, group_size=1, **timeouts)

    async def main() -> None:
        waited, clock = 0, Clock(asyncio.get_running_loop())
        for version in range(1, 6):
            await pool.collect()
            waited += len(pool._live)
            clock.skip(100.0)  # an update that takes longer than a completion may
            await asyncio.sleep(0.01)
            await engine.load_weights([], version)
        assert pool.counts["retries"] == 0
        assert waited > 0
        await pool.stop()

    asyncio.run(main())


class Blocks(TransformersEngine):
    """Keeps the loop for itself once."""

    blocked = False

    async def _advance(self, waiting: list[Request]) -> None:
        if not self.blocked:
            self.blocked = True
            time.sleep(0.3)
        await super()._advance(waiting)


class Unscored(Talk):
    """Earns 1 with two of four members and 0 with the third; nothing can score the fourth, nor any of some groups."""

    def step(self, action: Any) -> Any:
        messages, _, terminated, truncated, info = super().step(action)
        is_unknown = self.member == 3 or self.seed % 3 == 0
        reward = (None if is_unknown else float(self.member < 2)) if terminated else 0.0
        return messages, reward, terminated, truncated, info


def test_an_episode_that_nothing_could_score_is_not_trained_and_not_played_again(new_pool: NewPool) -> None:
    pool = new_pool(Unscored, group_size=4, max_turns=9, max_episode_tokens=4096)
    groups = collect(pool, 4)
    counts = Counter(t.stop_reason for group in groups for t in group.trajectories)
    assert counts == {StopReason.TERMINATED: 12, StopReason.UNSCORED: 4}
    last = groups[0].trajectories[3]
    assert (last.failed, last.error) == (True, "environment Unscored: nothing could score it")
    # (1, 1, 0) has the mean 2 / 3 and the standard deviation sqrt(1 / 3): the fourth is in neither.
    credits = load_credit({"scheme": "uniform", "eps": 1e-12}).assign(groups)
    for row in credits:
        assert [float(credit.advantages_T[0]) for credit in row[:3]] == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5])
        assert [bool(credit.keep_T.any()) for credit in row] == [True, True, True, False]
    assert [pool.counts[name] for name in ("faults", "retries", "failed_episodes")] == [0, 0, 0]
    assert pool.counts["replaced_groups"] > 0
    assert pool.counts["unscored_episodes"] >= 4 + 4 * pool.counts["replaced_groups"]


def test_a_task_that_nothing_ever_scores_ends_the_run_with_a_word(new_pool: NewPool) -> None:
    class Never(Talk):
        def step(self, action: Any) -> Any:
            messages, _, terminated, truncated, info = super().step(action)
            return messages, None if terminated else 0.0, terminated, truncated, info

    pool = new_pool(Never, max_consecutive_failures=3)
    with pytest.raises(EnvironmentFailure, match=r"3 groups in a row had too few .*: nothing could score it"):
        collect(pool, 1)


def test_a_reward_is_none_only_at_the_end(new_pool: NewPool) -> None:
    class Early(Talk):
        def step(self, action: Any) -> Any:
            messages, _, terminated, truncated, info = super().step(action)
            return messages, None, terminated, truncated, info

    pool = new_pool(Early, max_consecutive_failures=3, max_retries=0)
    words = "returned the reward NoneType None; return a finite float, at most 1e.15 in size. None is for the last turn"
    with pytest.raises(EnvironmentFailure, match=words):
        collect(pool, 4)


def test_what_blocks_the_event_loop_shows_in_its_lag(new_pool: NewPool, new_engine: NewEngine) -> None:
    pool = new_pool(engine=new_engine(Blocks))
    collect(pool, 1)
    assert pool.loop_lag_s > 0.2


@pytest.mark.slow
def test_environments_that_hang_for_ever_now_and_then_stop_the_run_before_threads_pile_up(new_pool: NewPool) -> None:
    def log(what: str, env: Talk) -> None:
        if what == "step" and env.member == 1:
            hang()

    pool = new_pool(logged(log), env_timeout_s=1.0, max_retries=0, max_live_episodes=2)
    with pytest.raises(
        EnvironmentFailure, match=r"\d+ threads hang in calls of environments.*rollout\.env_timeout_s: 1"
    ):
        collect(pool, 12)
    assert pool.counts["lost_threads"] >= 9


class Endless(Talk):
    """Goes on for a few turns, and counts them for all."""

    steps = 0

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        type(self).steps += 1
        self.turn += 1
        return ({"role": "user", "content": "on"},), 1.0, self.turn >= 3, False, {}


def test_a_consumer_that_is_slow_is_not_run_away_from(new_pool: NewPool) -> None:
    pool = new_pool(Endless, mode="async", num_groups=1, max_staleness=1, max_live_episodes=64)

    async def main() -> None:
        async with asyncio.timeout(200):
            first = await pool.collect()
            at_once = len(await pool.collect()) + len(first)
            assert at_once == 2
            steps = -1
            while steps != Endless.steps:  # continues without being asked, to the end of what may be started ahead
                steps = Endless.steps
                await asyncio.sleep(0.3)
            # Two were handed out, and two are begun ahead: one for the next step, one for that after it.
            assert steps <= 4 * 3 * 3
            await pool.pause()
            await pool.stop()

    asyncio.run(main())


def test_a_call_that_came_back_while_the_loop_stood_still_is_in_time(new_pool: NewPool) -> None:
    busy: set[int] = set()

    def log(what: str, env: Talk) -> None:
        if what == "step":
            busy.add(id(env))
            time.sleep(0.05)
            busy.discard(id(env))

    pool = new_pool(logged(log), mode="partial", env_timeout_s=60.0)

    async def main() -> None:
        clock = Clock(asyncio.get_running_loop())
        for _ in range(3):
            await pool.collect(1)
            wait_until(lambda: not busy)
            time.sleep(0.2)  # an update, or a checkpoint that is written
            clock.skip(100.0)
        await pool.stop()

    asyncio.run(main())
    assert pool.counts["retries"] == 0


def test_no_episode_is_missing_from_a_state_whatever_happens_to_it(new_pool: NewPool) -> None:
    failed: Counter[tuple[int, int]] = Counter()

    def log(what: str, env: Talk) -> None:
        if what == "step" and env.member == 1:
            failed[env.seed, env.member] += 1
            if failed[env.seed, env.member] <= 2:  # so that there is a wait before the second retry
                raise ConnectionError("the backend is down")

    pool = new_pool(logged(log), mode="partial", num_groups=1, max_retries=2)

    async def main() -> None:
        async with asyncio.timeout(200):
            for _ in range(5):
                await pool.collect()
                for group in pool.state_dict()["groups"].values():
                    assert len(group["waiting"]) + len(group["done"]) == 3
            await pool.stop()

    asyncio.run(main())
    assert pool.counts["retries"] > 4


class Dies(TransformersEngine):
    """Answers sixty requests, and no more."""

    answered = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        self.answered += 1
        if self.answered > 60:
            raise EngineError("connection refused")
        return await super().generate(prompt_ids, sampling, request_id)


def test_an_engine_that_dies_takes_no_episode_with_it(new_pool: NewPool, new_engine: NewEngine) -> None:
    settings: dict[str, Any] = {"mode": "partial", "num_groups": 4, "max_live_episodes": 8, "max_retries": 0}
    expected = episodes(collect(new_pool(num_groups=12), 12))
    pool = new_pool(engine=new_engine(Dies, lockstep=False), max_consecutive_failures=16, **settings)
    handed_out: dict[str, Trajectory] = {}

    async def until_it_dies() -> None:
        async with asyncio.timeout(200):
            while True:
                handed_out.update(episodes(await pool.collect()))

    with pytest.raises(EngineError, match="connection refused"):
        asyncio.run(until_it_dies())
    state = json.loads(json.dumps(pool.state_dict()))
    assert sum(len(group["waiting"]) for group in state["groups"].values()) >= 16
    alive = new_pool(**settings)
    alive.load_state_dict(state)

    async def until_they_are_there() -> None:
        async with asyncio.timeout(200):
            while not expected.keys() <= handed_out.keys():
                handed_out.update(episodes(await alive.collect()))
            await alive.stop()

    asyncio.run(until_they_are_there())
    assert {name: sampled(handed_out)[name] for name in sampled(expected)} == sampled(expected)


class Refuses(TransformersEngine):
    """Has something against one episode."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        if request_id.startswith("train/000001/2"):
            raise EngineError("HTTP 400: too long")
        return await super().generate(prompt_ids, sampling, request_id)


@each("mode", ["sync", "partial"])
def test_an_episode_that_the_engine_refuses_is_given_up(mode: str, new_pool: NewPool, new_engine: NewEngine) -> None:
    pool = new_pool(engine=new_engine(Refuses), mode=mode, num_groups=3, max_retries=1, max_staleness=1)
    found: dict[str, Trajectory] = {}

    async def main() -> None:
        async with asyncio.timeout(200):
            while "train/000001/2" not in found:
                found.update(episodes(await pool.collect()))
                await pool._engine.load_weights([], pool._engine.version + 1)
            await pool.stop()

    asyncio.run(main())
    assert found["train/000001/2"].error == "HTTP 400: too long"
    assert [name for name, trajectory in found.items() if trajectory.failed] == ["train/000001/2"]
    assert pool.counts["failed_episodes"] == 1


class HangsInPause(TransformersEngine):
    """Is never done with a pause."""

    async def pause(self) -> None:
        await asyncio.Event().wait()


@each("times", [1, 2])
def test_an_engine_that_hangs_does_not_hold_up_an_interrupt(
    times: int, new_pool: NewPool, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.pool._LAST_PAUSE_S", 0.1 if times == 1 else 200)
    pool = new_pool(mode="partial", engine=new_engine(HangsInPause, lockstep=False))

    async def main() -> None:
        collecting = asyncio.create_task(pool.collect())
        async with asyncio.timeout(60):
            while not pool._engine.busy_s:
                await asyncio.sleep(0)  # at once: on a busy machine all would be collected in a moment
        for _ in range(times):
            collecting.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([collecting], timeout=60)
        assert collecting.cancelled()
        assert not pool._runners

    asyncio.run(main())


def test_in_async_mode_groups_are_started_during_the_update(new_pool: NewPool) -> None:
    pool = new_pool(mode="async", num_groups=1, max_staleness=2)

    async def main() -> None:
        async with asyncio.timeout(200):
            await pool.collect()
            await pool.pause()
            begun = pool.state_dict()["next_group"]
            assert begun >= 2
            await pool.resume()
            groups = pool.state_dict()["groups"]
            while not all(len(group["done"]) == 3 for group in groups.values()):
                await asyncio.sleep(0.01)
                groups = pool.state_dict()["groups"]
            assert len(groups) == 2  # for the next step, and for the one after it
            await pool.stop()

    asyncio.run(main())


@pytest.mark.usefixtures("quick_retries")
def test_in_lockstep_a_run_whose_episodes_are_tried_again_repeats_bit_for_bit(
    new_pool: NewPool, new_engine: NewEngine
) -> None:
    def played() -> dict[str, Trajectory]:
        failed: Counter[int] = Counter()

        def log(what: str, env: Talk) -> None:
            time.sleep(random.random() * 0.003)
            if what == "step" and env.member == 1:
                failed[env.seed] += 1
                if failed[env.seed] <= 2:
                    raise ConnectionError("the backend is down")

        return episodes(collect(new_pool(logged(log), engine=new_engine(), max_retries=2), 2, 2))

    first, second = played(), played()
    assert {k: t.turns for k, t in first.items()} == {k: t.turns for k, t in second.items()}


class Films(Talk):
    """Leaves in its `info` and its messages what JSON does not know."""

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        said, reward, *over = super().step(action)[:4]
        odd = {
            "at": {"x": (1, np.float32(0.5))},
            "odd": "\ud800",
            "set": {1},
            "day": date(2026, 11, 22),
            "loss": math.nan,
        }
        return ({**said[0], **odd},), reward, bool(over[0]), False, odd


def test_what_json_does_not_know_is_the_same_before_a_kill_and_after_it(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(Films, journal=Journal(tmp_path), mode="partial", num_groups=1)
    state = pool.state_dict()
    (group,) = collect(pool, 1)
    turns = group.trajectories[0].turns
    plain = {"at": {"x": [1, 0.5]}, "odd": "?", "set": [1], "day": "2026-11-22", "loss": "NaN"}
    assert turns[0].extras == plain
    assert turns[1].observation[0].items() >= plain.items()
    json.dumps(pool.state_dict(), allow_nan=False)
    again = new_pool(Films, journal=Journal(tmp_path), mode="partial", num_groups=1)
    again.load_state_dict(state)
    again.recover()
    assert collect(again, 1) == [group]
    assert again.counts["retries"] == 0


class Maps(Talk):
    """Leaves in its `info` what is no data."""

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        return (*super().step(action)[:4], {"grid": {(0, 1): "wall"}})


def test_an_info_that_is_no_data_is_an_error_that_says_where(new_pool: NewPool) -> None:
    pool = new_pool(Maps, max_retries=0, max_consecutive_failures=3)
    with pytest.raises(EnvironmentFailure, match=r"step\(\) of Maps: info\['grid'\] has the key tuple \(0, 1\)"):
        collect(pool, 1)
