import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrl.chat import Renderer
from agentrl.engine.batched import Request
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks, task_seed
from agentrl.rollout.env_driver import MakeEnv
from agentrl.types import Message, StopReason, Trajectory
from tests.support.each import each
from tests.support.talk import Talk, collect, episodes, fails, logged
from tests.support.threads import hang, wait_until

NewEngine = Callable[..., TransformersEngine]
Opened = Callable[[RolloutPool], RolloutPool]
NewPool = Callable[..., RolloutPool]


@pytest.fixture
def new_pool(new_engine: NewEngine, renderer: Renderer, opened: Opened) -> NewPool:
    def make(
        make_env: MakeEnv = Talk, *, seed: int = 5, engine: TransformersEngine | None = None, **config: Any
    ) -> RolloutPool:
        settings = {"group_size": 3, "max_turn_tokens": 64, "max_live_episodes": 8, "env_timeout_s": 5.0, **config}
        return opened(
            RolloutPool(
                player=EnvPlayer(make_env),
                context=EpisodeContext(
                    engine=engine or new_engine(), renderer=renderer, config=RolloutConfig.model_validate(settings)
                ),
                tasks=Tasks(seed=seed),
            )
        )

    return make


def test_groups_come_in_the_order_of_the_stream_with_their_members_in_order(new_pool: NewPool) -> None:
    groups = collect(new_pool(num_groups=4), 4, 2)
    assert [group.group_id for group in groups] == [f"train/{i:06d}" for i in range(6)]
    for index, group in enumerate(groups):
        assert [t.trajectory_id for t in group.trajectories] == [f"train/{index:06d}/{member}" for member in range(3)]
        assert {t.seed for t in group.trajectories} == {task_seed(5, index)}
        assert {t.group_id for t in group.trajectories} == {group.group_id}


def test_members_share_the_task_and_are_told_their_number(new_pool: NewPool) -> None:
    told: Counter[tuple[int, int]] = Counter()

    def log(what: str, env: Talk) -> None:
        if what == "reset":
            told[env.seed, env.member] += 1

    groups = collect(new_pool(logged(log)), 3)
    assert told == {(task_seed(5, index), member): 1 for index in range(3) for member in range(3)}
    for group in groups:
        assert len({t.turns[0].observation_ids for t in group.trajectories}) == 1
        assert len({t.turns[0].action_ids for t in group.trajectories}) == 3


class Counts(TransformersEngine):
    """Counts at each step the episodes that wait for a token."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.live: list[int] = []

    async def _advance(self, waiting: list[Request]) -> None:
        self.live.append(len(self._inside))
        await super()._advance(waiting)


def test_no_more_environments_live_than_allowed_and_a_free_place_is_refilled(
    new_pool: NewPool, new_engine: NewEngine
) -> None:
    lock, live, peak = threading.Lock(), 0, 0

    def log(what: str, _: Talk) -> None:
        nonlocal live, peak
        with lock:
            live += {"made": 1, "close": -1}.get(what, 0)
            peak = max(peak, live)

    engine = new_engine(Counts)
    groups = collect(new_pool(logged(log), engine=engine, max_live_episodes=4), 5)
    assert len(episodes(groups)) == 15
    assert (live, peak) == (0, 4)
    # All places are taken until there is nothing left to begin.
    assert isinstance(engine, Counts)
    assert engine.live == sorted(engine.live, reverse=True)
    assert engine.live.count(4) > len(engine.live) / 2


def test_all_episodes_of_a_step_are_played_at_once_unless_fewer_are_asked_for(
    new_pool: NewPool, new_engine: NewEngine
) -> None:
    engine = new_engine(Counts)
    collect(new_pool(engine=engine, num_groups=24, max_turns=1, max_live_episodes=None), 24)
    assert isinstance(engine, Counts)
    assert max(engine.live) == 24 * 3
    settings = RolloutConfig(num_groups=24, group_size=3)
    assert settings.live_episodes(12) == 64  # of a rank with half of the groups, for evaluations
    assert settings.model_copy(update={"max_live_episodes": 5}).live_episodes(24) == 5


def pause_a_while(what: str, _: Talk) -> None:
    if what in ("made", "reset", "step"):
        time.sleep(random.random() * 0.004)


def test_a_run_repeats_bit_for_bit_whatever_the_timing_of_its_environments(new_pool: NewPool) -> None:
    first = collect(new_pool(logged(pause_a_while), max_live_episodes=5), 3, 2)
    second = collect(new_pool(logged(pause_a_while), max_live_episodes=5), 3, 2)
    prompt = collect(new_pool(max_live_episodes=5), 3, 2)
    turns = [{key: t.turns for key, t in episodes(groups).items()} for groups in (first, second, prompt)]
    assert turns[0] == turns[1] == turns[2]
    assert sum(len(t) for t in turns[0].values()) > 20
    other = collect(new_pool(seed=6, max_live_episodes=5), 3, 2)
    assert {key: t.turns for key, t in episodes(other).items()} != turns[0]


def test_a_run_without_lockstep_samples_the_same_tokens(new_pool: NewPool, new_engine: NewEngine) -> None:
    locked = episodes(collect(new_pool(), 4))
    free = episodes(collect(new_pool(logged(pause_a_while), engine=new_engine(lockstep=False)), 4))
    for key, trajectory in locked.items():
        for turn, other in zip(trajectory.turns, free[key].turns, strict=True):
            assert turn.action_ids == other.action_ids
            # Batches of other sizes: float32 rounds otherwise.
            np.testing.assert_allclose(turn.behavior_logprobs, other.behavior_logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("quick_retries")
def test_a_failed_episode_is_restarted_in_a_fresh_environment(new_pool: NewPool) -> None:
    made: list[Talk] = []

    def log(what: str, env: Talk) -> None:
        if what == "made":
            made.append(env)
        if what == "step" and env.member == 1 and len([e for e in made if e.member == 1]) <= 2:
            raise RuntimeError("worn out")

    pool = new_pool(logged(log), max_retries=2)
    (group,) = collect(pool, 1)
    assert len(group.valid) == 3
    assert Counter(env.member for env in made) == {0: 1, 1: 3, 2: 1}
    assert len({id(env) for env in made}) == 5
    assert pool.counts == {
        "faults": 2,
        "retries": 2,
        "failed_episodes": 0,
        "unscored_episodes": 0,
        "replaced_groups": 0,
        "zero_spread_groups": 0,
        "lost_threads": 0,
    }


def test_an_episode_that_keeps_failing_leaves_its_group(new_pool: NewPool) -> None:
    pool = new_pool(fails(where="step", when=lambda env: env.member == 1), max_retries=1)
    groups = collect(pool, 2)
    for group in groups:
        assert [t.failed for t in group.trajectories] == [False, True, False]
        assert [t.trajectory_id[-1] for t in group.valid] == ["0", "2"]
        failed = group.trajectories[1]
        assert failed.stop_reason is StopReason.ENV_ERROR
        assert failed.error is not None
        words = "environment Talk: step() raised RuntimeError: the lamp of member 1 is out (talk.py:"
        assert failed.error.startswith(words)
    assert pool.counts == {
        "faults": 4,
        "retries": 2,
        "failed_episodes": 2,
        "unscored_episodes": 0,
        "replaced_groups": 0,
        "zero_spread_groups": 0,
        "lost_threads": 0,
    }


@pytest.mark.usefixtures("quick_retries")
def test_failed_episodes_change_neither_the_tokens_of_the_others_nor_the_tasks(new_pool: NewPool) -> None:
    healthy = new_pool()
    whole = episodes(collect(healthy, 2, 2))
    ill = new_pool(fails(where="step", when=lambda env: env.member == 1 and env.turn == 1))
    others = episodes(collect(ill, 2, 2))
    assert list(whole) == list(others)
    assert {key for key, t in others.items() if t.failed} == {key for key in whole if key.endswith("/1")}
    for key in whole:
        assert whole[key].seed == others[key].seed
        if not others[key].failed:
            assert [t.action_ids for t in whole[key].turns] == [t.action_ids for t in others[key].turns]


def test_a_group_with_too_few_usable_episodes_is_replaced_by_the_next_task(new_pool: NewPool) -> None:
    bad = task_seed(5, 1)
    pool = new_pool(fails(where="step", when=lambda env: env.seed == bad and env.member > 0), max_retries=0)
    groups = collect(pool, 3)
    assert [group.group_id for group in groups] == ["train/000000", "train/000002", "train/000003"]
    assert pool.counts["replaced_groups"] == 1
    assert collect(pool, 1)[0].group_id == "train/000004"


class Dull(Talk):
    """One turn; members of a task with an even seed earn .3 alike, but for rounding, those of the others their number."""

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        alike = 0.1 + 0.2 if self.member else 0.3
        return (), float(self.member) if self.seed % 2 else alike, True, False, {}


def test_groups_that_teach_nothing_are_replaced_within_a_budget(new_pool: NewPool) -> None:
    tasks = [(f"train/{i:06d}", task_seed(5, i) % 2) for i in range(40)]
    assert [is_odd for _, is_odd in tasks[:6]].count(0) >= 2  # else the test would show nothing
    for budget in (0, 1, 100):
        pool = new_pool(Dull, dynamic_sampling=budget)
        expected, used = [], 0
        for name, is_odd in tasks:
            if not is_odd and used < budget:
                used += 1
            else:
                expected.append(name)
        found = [group.group_id for group in collect(pool, 6)]
        assert found == expected[:6]
        last = [name for name, _ in tasks].index(found[-1])
        assert pool.counts["zero_spread_groups"] == sum(name not in found for name, _ in tasks[: last + 1])
    # The budget is for each step, and a group of one is not compared with anybody.
    pool = new_pool(Dull, dynamic_sampling=1)
    assert len(collect(pool, 6, 6)) == 12
    assert pool.counts["zero_spread_groups"] == 2
    pool = new_pool(Dull, dynamic_sampling=100, group_size=1)
    assert [group.group_id for group in collect(pool, 3)] == [name for name, _ in tasks[:3]]


def test_a_group_of_one_is_replaced_only_when_it_failed(new_pool: NewPool) -> None:
    bad = task_seed(5, 1)
    make_env = fails(where="step", when=lambda env: env.seed == bad)
    pool = new_pool(make_env, group_size=1, max_retries=0)
    assert [group.group_id for group in collect(pool, 2)] == ["train/000000", "train/000002"]


@each("where", ["made", "reset", "step", "close"])
def test_an_environment_that_always_fails_stops_the_run_with_its_words(where: str, new_pool: NewPool) -> None:
    made: list[Talk] = []

    def log(what: str, env: Talk) -> None:
        if what == "made":
            made.append(env)
        if what == where:
            raise RuntimeError("the lamp is out")

    with pytest.raises(EnvironmentFailure) as caught:
        collect(new_pool(logged(log), max_consecutive_failures=6, max_retries=1), 4)
    method = {"made": "environment: construction"}.get(where, f"environment Talk: {where}()")
    assert str(caught.value).startswith(
        f"6 episodes failed in a row; the last one: {method} raised RuntimeError: the lamp is out (talk.py:"
    )
    assert len(made) <= (6 + 8) * 2  # the 6, and what was alive beside them, each with its retry


def test_a_backend_that_is_down_for_a_moment_does_not_stop_the_run(new_pool: NewPool) -> None:
    begun: Counter[tuple[int, int]] = Counter()

    def log(what: str, env: Talk) -> None:
        if what == "reset":
            begun[env.seed, env.member] += 1
            if begun[env.seed, env.member] == 1:
                raise ConnectionError("the backend is down")

    pool = new_pool(logged(log), max_consecutive_failures=2, max_retries=1)
    groups = collect(pool, 4)
    assert [len(group.valid) for group in groups] == [3, 3, 3, 3]
    assert pool.counts == {
        "faults": 12,
        "retries": 12,
        "failed_episodes": 0,
        "unscored_episodes": 0,
        "replaced_groups": 0,
        "zero_spread_groups": 0,
        "lost_threads": 0,
    }


@pytest.mark.slow
def test_an_environment_that_always_hangs_stops_the_run_at_its_deadlines(new_pool: NewPool) -> None:
    def log(what: str, _: Talk) -> None:
        if what == "step":
            hang()

    pool = new_pool(logged(log), max_consecutive_failures=8, max_retries=1, env_timeout_s=1.0)
    with pytest.raises(EnvironmentFailure, match=r"step\(\) did not return within rollout\.env_timeout_s: 1 s"):
        collect(pool, 4)


def test_one_member_that_always_fails_cannot_make_the_run_last_for_ever(new_pool: NewPool) -> None:
    make_env = fails(where="reset", when=lambda env: env.member == 1)
    pool = new_pool(make_env, group_size=2, max_retries=0, max_consecutive_failures=5)
    with pytest.raises(EnvironmentFailure) as caught:
        collect(pool, 2)
    assert str(caught.value).startswith(
        "5 groups in a row had too few episodes to train on; the last: environment Talk: reset() raised RuntimeError: "
        "the lamp of member 1 is out (talk.py:"
    )


class Hangs(TransformersEngine):
    """Decodes nothing."""

    async def _advance(self, waiting: list[Request]) -> None:
        await asyncio.sleep(30)


def test_an_engine_that_hangs_is_no_fault_of_the_environment(new_pool: NewPool, new_engine: NewEngine) -> None:
    pool = new_pool(engine=new_engine(Hangs), engine_timeout_s=0.05, max_consecutive_failures=3, max_retries=1)
    with pytest.raises(EngineError, match=r"3 episodes failed in a row; .* rollout\.engine_timeout_s: 0\.05"):
        collect(pool, 1)


def too_long(*, when: Callable[[int], bool], made: list[int]) -> MakeEnv:
    """A task whose first prompt fills a context of 65 tokens."""

    class Long(Talk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            said, info = super().reset(seed=seed, options=options)
            made.append(self.seed)
            return (({"role": "user", "content": "x" * 100},) if when(self.seed) else said), info

    return Long


def test_a_task_whose_first_prompt_is_too_long_is_replaced_by_another(new_pool: NewPool) -> None:
    made: list[int] = []
    long = task_seed(5, 1)
    pool = new_pool(
        too_long(when=lambda seed: seed == long, made=made), max_context_tokens=65, max_consecutive_failures=2
    )
    groups = collect(pool, 3)
    assert [group.group_id for group in groups] == ["train/000000", "train/000002", "train/000003"]
    assert made.count(long) == 3  # the same prompt is not tried again
    assert (pool.counts["replaced_groups"], pool.counts["failed_episodes"], pool.counts["retries"]) == (1, 3, 0)


def test_a_run_in_which_every_first_prompt_is_too_long_ends(new_pool: NewPool) -> None:
    pool = new_pool(too_long(when=lambda _: True, made=[]), max_context_tokens=65, max_consecutive_failures=2)
    with pytest.raises(
        EnvironmentFailure,
        match=r"2 groups in a row had too few episodes to train on; the last: rollout\.max_context_tokens: 65 leaves no room",
    ):
        collect(pool, 1)


def test_every_attempt_at_which_an_environment_fails_is_counted_and_told(
    new_engine: NewEngine, renderer: Renderer, opened: Opened
) -> None:
    told: list[Trajectory] = []
    pool = opened(
        RolloutPool(
            player=EnvPlayer(fails(where="step", when=lambda env: (env.seed, env.member) == (task_seed(5, 0), 1))),
            context=EpisodeContext(
                engine=new_engine(),
                renderer=renderer,
                config=RolloutConfig(group_size=3, max_turn_tokens=64, max_live_episodes=8, max_retries=1),
            ),
            tasks=Tasks(seed=5),
            on_fault=told.append,
        )
    )
    groups = collect(pool, 1)
    assert pool.counts["faults"] == 2
    assert [t.trajectory_id for t in told] == ["train/000000/1"] * 2
    assert told[1] == groups[0].trajectories[1]
    assert [len(t.turns) for t in told] == [1, 1]  # each with the action at which it failed
    state = json.loads(json.dumps(pool.state_dict()))
    pool.load_state_dict(state)
    assert pool.counts["faults"] == 2


@pytest.mark.slow
def test_hanging_environments_lose_their_thread_and_the_others_continue(new_pool: NewPool) -> None:
    def log(what: str, env: Talk) -> None:
        if what == "step" and env.member == 1:
            hang()

    pool = new_pool(logged(log), env_timeout_s=2.0, max_retries=1)
    groups = collect(pool, 2)
    assert [[t.failed for t in group.trajectories] for group in groups] == [[False, True, False]] * 2
    assert pool.counts == {
        "faults": 4,
        "retries": 2,
        "failed_episodes": 2,
        "unscored_episodes": 0,
        "replaced_groups": 0,
        "zero_spread_groups": 0,
        "lost_threads": 4,
    }


def test_threads_end_when_the_pool_is_closed(new_pool: NewPool) -> None:
    def alive() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "agentrl-env"}

    before = alive()
    pool = new_pool(max_live_episodes=4)
    collect(pool, 3, 3)
    assert len(alive() - before) == 4  # kept from one step to the next
    pool.close()
    wait_until(lambda: alive() == before)


def test_the_stream_of_tasks_resumes_from_a_saved_state(new_pool: NewPool) -> None:
    bad = task_seed(5, 1)
    make_env = fails(where="step", when=lambda env: env.seed == bad)
    pool = new_pool(make_env, max_retries=0)
    collect(pool, 2)
    state = json.loads(json.dumps(pool.state_dict()))
    expected = collect(pool, 2)
    resumed = new_pool(make_env, max_retries=0)
    resumed.load_state_dict(state)
    groups = collect(resumed, 2)
    assert [group.group_id for group in groups] == ["train/000003", "train/000004"]
    assert {key: t.turns for key, t in episodes(groups).items()} == {
        key: t.turns for key, t in episodes(expected).items()
    }
    assert resumed.counts == pool.counts
    assert resumed.counts["replaced_groups"] == 1
