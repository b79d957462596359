"""Episodes that are played one after the other in the same environment."""

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.chat import Renderer
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks, task_seed
from agentrl.rollout.env_driver import MakeEnv
from agentrl.rollout.evaluation import EvaluationConfig, play_evaluation
from agentrl.types import Message, StopReason, TaskShard, Trajectory
from tests.support.each import each
from tests.support.talk import Talk, collect, episodes
from tests.support.threads import hang

Opened = Callable[[RolloutPool], RolloutPool]
NewPool = Callable[..., RolloutPool]


class Log:
    """What happened to which environment, in order."""

    def __init__(self, act: Callable[[str, Talk], None] = lambda _what, _env: None) -> None:
        self.events: list[tuple[str, int, str]] = []
        self._act = act

    def __call__(self, what: str, env: Talk) -> None:
        self.events.append((what, id(env), threading.current_thread().name + str(threading.get_ident())))
        self._act(what, env)

    def make(self) -> Talk:
        env = Talk(self)
        self.kept.append(env)  # so that no other has its id
        return env

    @property
    def kept(self) -> list[Talk]:
        self.__dict__.setdefault("_kept", [])
        kept: list[Talk] = self.__dict__["_kept"]
        return kept

    def count(self, what: str) -> int:
        return sum(event == what for event, *_ in self.events)


@pytest.fixture
def new_pool(new_engine: Callable[..., TransformersEngine], renderer: Renderer, opened: Opened) -> NewPool:
    def make(make_env: MakeEnv, *, fork: bool = False, reuses: bool = True, **config: Any) -> RolloutPool:
        settings = {"group_size": 3, "max_turn_tokens": 64, "max_live_episodes": 4, "env_timeout_s": 5.0, **config}
        player = EnvPlayer(make_env)
        player.is_reused = reuses
        pool = RolloutPool(
            player=player,
            context=EpisodeContext(
                engine=new_engine(), renderer=renderer, config=RolloutConfig.model_validate(settings)
            ),
            tasks=Tasks(seed=5),
            fork=fork,
        )
        return opened(pool)

    return make


def played(pool: RolloutPool, *num_groups: int) -> dict[str, Trajectory]:
    def stripped(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, metrics={k: v for k, v in trajectory.metrics.items() if k != "env_s"})

    return {name: stripped(t) for name, t in episodes(collect(pool, *num_groups)).items()}


def test_as_many_are_made_as_are_live_and_what_is_played_is_the_same(new_pool: NewPool) -> None:
    log, fresh = Log(), Log()
    pool = new_pool(log.make)
    assert played(pool, 4, 4) == played(new_pool(fresh.make, reuses=False), 4, 4)
    assert (fresh.count("made"), fresh.count("close")) == (24, 24)
    assert (log.count("made"), log.count("reset"), log.count("close")) == (4, 24, 0)
    pool.close()
    assert log.count("close") == 4
    places = Counter({(env, thread) for _, env, thread in log.events})
    assert len(places) == 4  # each on one thread for life


@each("mode", ["partial", "async"])
def test_unfinished_episodes_keep_their_environments(new_pool: NewPool, mode: str) -> None:
    log = Log()
    pool = new_pool(log.make, mode=mode, group_size=2, num_groups=2)
    found = played(pool, 2, 2, 2)
    assert len(found) == 12
    assert log.count("made") <= 4
    pool.close()
    assert log.count("close") == log.count("made")


def test_handles_that_are_bound_to_their_thread_can_be_used_again(new_pool: NewPool) -> None:
    class Books(Talk):
        def __init__(self) -> None:
            super().__init__()
            self.books = sqlite3.connect(":memory:")  # refuses any other thread

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.books.execute("drop table if exists books")
            self.books.execute("create table books (title)")
            return super().reset(seed=seed, options=options)

        def step(self, action: str | Message) -> Any:
            self.books.execute("insert into books values ('a')")
            return super().step(action)

        def close(self) -> None:
            self.books.close()

    pool = new_pool(Books)
    found = played(pool, 3, 3)
    assert {t.stop_reason for t in found.values()} == {StopReason.TERMINATED}
    assert pool.counts["faults"] == 0


@each("where", ["reset", "step"])
def test_one_that_failed_is_closed_and_the_retry_has_a_fresh_one(new_pool: NewPool, where: str) -> None:
    failed: list[int] = []

    def act(what: str, env: Talk) -> None:
        if what == where and not failed and env.seed == task_seed(5, 2):
            failed.append(id(env))
            raise RuntimeError("the lamp is out")

    log = Log(act)
    pool = new_pool(log.make)
    found = played(pool, 4)
    assert not any(t.failed for t in found.values())
    (name,) = failed
    after = log.events[max(i for i, (what, env, _) in enumerate(log.events) if (what, env) == (where, name)) + 1 :]
    assert [what for what, env, _ in after if env == name] == ["close"]
    assert (pool.counts["faults"], log.count("made")) == (1, 5)


def test_one_that_missed_its_deadline_is_never_used_again(new_pool: NewPool) -> None:
    stuck: list[int] = []

    def act(what: str, env: Talk) -> None:
        if what == "step" and not stuck and env.seed == task_seed(5, 2):
            stuck.append(id(env))
            hang()

    log = Log(act)
    pool = new_pool(log.make, env_timeout_s=2.0)
    found = played(pool, 4)
    assert not any(t.failed for t in found.values())
    assert pool.counts["lost_threads"] == 1
    assert [what for what, env, _ in log.events if env == stuck[0]][-1] == "step"  # and nothing more


def test_one_whose_messages_cannot_be_rendered_is_closed(new_pool: NewPool) -> None:
    class Odd(Talk):
        said = 0

        def step(self, action: str | Message) -> Any:
            messages, *rest = super().step(action)
            type(self).said += 1
            return ({"role": "tool", "content": "x", "name": {"not": "text"}} if self.said == 2 else messages, *rest)

    log = Log()
    pool = new_pool(lambda: Odd(log))
    played(pool, 4)
    assert pool.counts["faults"] >= 1
    assert log.count("close") >= 1


@each("where", ["made", "reset", "step"])
def test_what_is_cancelled_within_a_call_is_closed(new_pool: NewPool, where: str) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def act(what: str, _: Talk) -> None:
        if what == where and not cancelled.is_set():
            begun.set()
            cancelled.wait(60)
            time.sleep(0.2)  # the event loop ends before

    log = Log(act)
    pool = new_pool(log.make)

    async def interrupt() -> None:
        collecting = asyncio.create_task(pool.collect(4))
        await asyncio.to_thread(begun.wait, 60)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        cancelled.set()

    asyncio.run(interrupt())
    pool.close()
    assert log.count("made") > 0
    assert log.count("close") == log.count("made")


def test_evaluation_plays_in_the_environments_of_training(new_pool: NewPool) -> None:
    log = Log()
    pool = new_pool(log.make)
    played(pool, 4)
    evaluation = pool.with_config(pool.context.config)

    async def evaluate() -> None:
        await pool.resume()
        await play_evaluation(evaluation, EvaluationConfig(num_tasks=9), shard=TaskShard(1))
        await pool.pause()

    asyncio.run(evaluate())
    evaluation.close()
    assert (log.count("made"), log.count("reset"), log.count("close")) == (4, 12 + 9, 0)
    played(pool, 4)
    assert log.count("made") == 4


def test_one_that_is_forked_plays_once(new_pool: NewPool) -> None:
    log = Log()
    pool = new_pool(log.make, fork=True, branches={"num": 1, "budget_tokens": 64})
    played(pool, 2)
    assert log.count("made") == 6


def test_an_environment_that_closes_badly_does_not_keep_the_pool_from_closing(new_pool: NewPool) -> None:
    def act(what: str, env: Talk) -> None:
        if what == "close":
            raise RuntimeError("stuck door")

    log = Log(act)
    pool = new_pool(log.make)
    played(pool, 4)
    pool.close()
    assert log.count("close") == 4
