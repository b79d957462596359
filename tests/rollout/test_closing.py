"""Whatever is made is closed once, however its episode or its trial ends."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from agentrl.chat import Renderer
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.env import MessageEnv
from agentrl.rollout import Episode, EpisodeContext, LiveEpisode, RolloutConfig, Task, Tasks
from agentrl.rollout import env_driver as gate
from agentrl.rollout.demonstrations import demonstrations, oracle_ends
from agentrl.rollout.env_driver import EnvThread
from agentrl.rollout.reset_checks import measure_overlap, prove_reset
from agentrl.rollout.trial import describe_env, try_environment
from agentrl.types import StopReason, Trajectory
from tests.support.each import each
from tests.support.talk import Talk
from tests.support.threads import wait_until

NewEngine = Callable[..., TransformersEngine]
CONFIG = RolloutConfig(max_turns=4, max_turn_tokens=64, env_timeout_s=60)
TASK = Task(group_id="train/000000", rollout_index=0, seed=7, sampling_seed=1)


class Counts:
    """How many were made, and which were closed."""

    def __init__(self) -> None:
        self.num_made = 0
        self.closed: list[int] = []

    def __call__(self, what: str, env: Talk) -> None:
        self.num_made += what == "made"
        if what == "close":
            self.closed.append(id(env))

    @property
    def all_closed_once(self) -> bool:
        return self.num_made == len(self.closed) == len(set(self.closed))


@pytest.fixture
def context(new_engine: NewEngine, renderer: Renderer) -> EpisodeContext[Any]:
    return EpisodeContext(engine=new_engine(), renderer=renderer, config=CONFIG)


def test_one_whose_turn_to_close_had_not_come_is_closed(
    context: EpisodeContext[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_MAX_RUNNING", 1)
    monkeypatch.setattr(gate, "_QUICK_S", 600)
    counts, is_held, released = Counts(), threading.Event(), threading.Event()
    one_turn = replace(TASK, seed=4)

    async def interrupt() -> None:
        loop, holding = asyncio.get_running_loop(), list[asyncio.Task[bool]]()

        def hold() -> None:
            holding.append(loop.create_task(holder.call(wait, timeout_s=600)))

        def wait() -> bool:
            is_held.set()
            return released.wait(60)

        def log(what: str, env: Talk) -> None:
            counts(what, env)
            if what == "step":
                loop.call_soon_threadsafe(hold)  # lets no other call in once this one is over
                wait_until(lambda: bool(holding))

        playing = asyncio.create_task(Episode(one_turn, context=context, thread=thread).play(lambda: Talk(log)))
        await asyncio.to_thread(is_held.wait, 60)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not counts.closed
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        released.set()
        await holding[0]

    with EnvThread() as thread, EnvThread() as holder:
        asyncio.run(interrupt())
    assert counts.all_closed_once


class Named(Talk):
    """Has a name that cannot be read."""

    @property
    def spec(self) -> Any:
        raise RuntimeError("no name")

    @spec.setter
    def spec(self, value: Any) -> None: ...


def play(context: EpisodeContext[Any], make_env: Callable[[], MessageEnv], **settings: Any) -> Trajectory:
    with EnvThread() as thread:
        return asyncio.run(Episode(TASK, context=context, thread=thread, **settings).play(make_env))


def test_one_that_has_no_name_is_closed(context: EpisodeContext[Any]) -> None:
    counts = Counts()
    trajectory = play(context, lambda: Named(counts))
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "no name" in str(trajectory.error)
    assert counts.all_closed_once


class Shut(Talk):
    """Has a `close` that cannot be looked up."""

    @property
    def close(self) -> Any:
        raise RuntimeError("no door")


def test_a_close_that_cannot_be_looked_up_fails_its_episode_alone(context: EpisodeContext[Any]) -> None:
    trajectory = play(context, lambda: Shut(Counts()))
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "close() raised RuntimeError: no door" in str(trajectory.error)


class Saved(Talk):
    """Is restored from a snapshot; the one that was there before closes badly."""

    can_snapshot = True
    is_restored = False
    counts: ClassVar[Counts]

    def __init__(self) -> None:
        super().__init__(type(self).counts)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tell"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tell=self.counts, is_restored=True)
        self.tell("made", self)

    def close(self) -> None:
        super().close()
        if not self.is_restored:
            raise RuntimeError("stuck door")


def test_what_was_restored_is_closed_where_the_one_before_closes_badly(context: EpisodeContext[Any]) -> None:
    found: list[LiveEpisode] = []
    Saved.counts = Counts()
    play(context, Saved, on_change=found.append)
    Saved.counts = Counts()
    trajectory = play(context, Saved, recorded=found[0])
    assert "close() raised RuntimeError: stuck door" in str(trajectory.error)
    assert Saved.counts.num_made == 2
    assert Saved.counts.all_closed_once


class Torn(Talk):
    """Cannot say whether it may be restored."""

    @property
    def can_snapshot(self) -> bool:  # type: ignore[override]
        raise RuntimeError("no idea")


def test_one_that_cannot_say_whether_it_may_be_restored_is_closed(context: EpisodeContext[Any]) -> None:
    found: list[LiveEpisode] = []
    Saved.counts, counts = Counts(), Counts()
    play(context, Saved, on_change=found.append)
    trajectory = play(context, lambda: Torn(counts), recorded=found[0])
    assert "can_snapshot raised RuntimeError: no idea" in str(trajectory.error)
    assert counts.num_made == 1
    assert counts.all_closed_once


MakeEnv = Callable[[], Talk]
TASKS = Tasks(seed=0)


def demonstrate(make_env: MakeEnv, context: EpisodeContext[Any]) -> Coroutine[Any, Any, object]:
    return demonstrations(make_env, context.renderer, count=1, skill=1.0, config=CONFIG, tasks=TASKS)


TRIALS: dict[str, Callable[[MakeEnv, EpisodeContext[Any]], Coroutine[Any, Any, object]]] = {
    "what it offers": lambda make_env, _: describe_env(make_env, timeout_s=60),
    "trial": lambda make_env, context: try_environment(
        make_env=make_env, renderer=context.renderer, config=CONFIG, tasks=TASKS
    ),
    "oracle": lambda make_env, _: oracle_ends(make_env, max_turns=4, timeout_s=60, tasks=TASKS),
    "demonstrations": demonstrate,
    "proof": lambda make_env, _: prove_reset(make_env, TASKS, timeout_s=60),
    "overlap": lambda make_env, _: measure_overlap(make_env, TASKS, timeout_s=60),
}


@each("trial", TRIALS)
def test_what_an_interrupted_trial_has_made_is_closed_before_the_process_ends(
    trial: str, context: EpisodeContext[Any]
) -> None:
    counts, begun, cancelled = Counts(), threading.Event(), threading.Event()

    def make() -> Talk:
        begun.set()
        cancelled.wait(60)
        time.sleep(0.2)  # the event loop would end before
        return Talk(counts)

    async def interrupt() -> None:
        trying = asyncio.create_task(TRIALS[trial](make, context))
        await asyncio.to_thread(begun.wait, 60)
        trying.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await trying

    asyncio.run(interrupt())
    assert counts.num_made > 0
    assert counts.all_closed_once
