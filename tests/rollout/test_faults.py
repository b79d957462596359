"""What goes wrong while episodes are played: each thing under a deadline, mended where it can be, and nothing lost."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrl.chat import Renderer
from agentrl.engine.batched import Request
from agentrl.engine.transformers import TransformersEngine
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.rollout import RolloutConfig, RolloutPool
from agentrl.types import Completion, Message, Sampling, Trajectory
from tests.rollout.test_pool import Talk, collect, episodes, logged

NewEngine = Callable[..., TransformersEngine]
NewPool = Callable[..., RolloutPool]


@pytest.fixture
def new_pool(new_engine: NewEngine, renderer: Renderer) -> NewPool:
    def make(make_env: Any = Talk, *, engine: TransformersEngine | None = None, **config: Any) -> RolloutPool:
        settings = {"group_size": 3, "max_turn_tokens": 64, "max_live_episodes": 8, "env_timeout_s": 5.0, **config}
        return RolloutPool(
            make_env=make_env,
            engine=engine or new_engine(lockstep=False),
            renderer=renderer,
            config=RolloutConfig.model_validate(settings),
            seed=5,
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


def test_an_episode_whose_engine_failed_goes_on_from_where_it_stood(new_pool: NewPool, new_engine: NewEngine) -> None:
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
    begin = time.monotonic()

    def log(what: str, _: Talk) -> None:
        if what == "reset" and time.monotonic() - begin < 0.9:
            raise ConnectionError("the backend is down")

    pool = new_pool(logged(log), max_retries=2)
    assert [len(group.valid) for group in collect(pool, 2)] == [3, 3]
    assert pool.counts["failed_episodes"] == 0
    assert pool.counts["retries"] == 12


def test_the_engines_deadline_stands_still_while_it_is_paused(new_engine: NewEngine, new_pool: NewPool) -> None:
    engine = new_engine(Slow, lockstep=False)
    pool = new_pool(engine=engine, mode="partial", num_groups=1, group_size=1, engine_timeout_s=0.4)

    async def main() -> None:
        async with asyncio.timeout(30):
            waited = 0
            for version in range(1, 6):
                await pool.collect()
                waited += len(pool._live)
                await asyncio.sleep(0.5)  # an update that takes longer than a completion may
                await engine.load_weights([], version)
            assert pool.counts["retries"] == 0
            assert waited > 0
            await pool.stop()

    asyncio.run(main())


class Slow(TransformersEngine):
    """Takes a while for each token."""

    async def _advance(self, waiting: list[Request]) -> None:
        time.sleep(0.005)
        await super()._advance(waiting)


class Blocks(TransformersEngine):
    """Keeps the loop for itself once."""

    blocked = False

    async def _advance(self, waiting: list[Request]) -> None:
        if not self.blocked:
            self.blocked = True
            time.sleep(0.3)
        await super()._advance(waiting)


def test_what_blocks_the_event_loop_shows_in_its_lag(new_pool: NewPool, new_engine: NewEngine) -> None:
    pool = new_pool(engine=new_engine(Blocks))
    collect(pool, 1)
    assert pool.loop_lag_s > 0.2


def test_environments_that_hang_for_ever_now_and_then_stop_the_run_before_threads_pile_up(new_pool: NewPool) -> None:
    released = threading.Event()

    def log(what: str, env: Talk) -> None:
        if what == "step" and env.member == 1:
            released.wait(60)

    pool = new_pool(logged(log), env_timeout_s=0.05, max_retries=0, max_live_episodes=2)
    with pytest.raises(
        EnvironmentFailure, match=r"\d+ threads hang in calls of environments.*rollout\.env_timeout_s: 0\.05"
    ):
        collect(pool, 12)
    assert pool.counts["lost_threads"] >= 9
    released.set()


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
        async with asyncio.timeout(30):
            first = await pool.collect()
            at_once = len(await pool.collect()) + len(first)
            assert at_once == 2
            steps = -1
            while steps != Endless.steps:  # goes on without being asked, to the end of what may be begun ahead
                steps = Endless.steps
                await asyncio.sleep(0.3)
            # Two were handed out, and two are begun ahead: one for the next step, one for that after it.
            assert steps <= 4 * 3 * 3
            await pool.hold()
            await pool.stop()

    asyncio.run(main())
