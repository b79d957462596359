"""Rollouts forked from an episode's turns: where, how many, with chance of their own, and nothing of the episode changed."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from agentrl.chat import Renderer
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.errors import EngineError
from agentrl.rollout import EnvPlayer, Episode, EpisodeContext, RolloutConfig, RolloutPool, Task, Tasks
from agentrl.rollout.env_driver import EnvThread, MakeEnv
from agentrl.types import Completion, Sampling, StopReason, Trajectory, TrajectoryGroup
from tests.support.dice import TASK, Dice, raises
from tests.support.each import each
from tests.support.threads import hang, wait_until

NewEngine = Callable[..., TransformersEngine]


class Recording(TransformersEngine):
    """The real engine, with a list of what went in and came out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, tuple[int, ...], Sampling, Completion]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        completion = await super().generate(prompt_ids, sampling, request_id)
        self.calls.append((request_id, tuple(prompt_ids), sampling, completion))
        return completion

    def of_branches(self) -> dict[tuple[int, int], list[tuple[tuple[int, ...], Sampling, Completion]]]:
        """Return the calls of each branch, by its turn and number, in the order in which branches began."""
        found: dict[tuple[int, int], list[tuple[tuple[int, ...], Sampling, Completion]]] = {}
        for request_id, prompt_ids, sampling, completion in self.calls:
            _, _, name = request_id.partition("#0/")
            if name:
                turn, number = map(int, name.split("/"))
                found.setdefault((turn, number), []).append((prompt_ids, sampling, completion))
        return found


@pytest.fixture
def recording(new_engine: NewEngine) -> Recording:
    engine = new_engine(Recording)
    assert isinstance(engine, Recording)
    return engine


def play(
    make_env: MakeEnv,
    engine: TransformersEngine,
    renderer: Renderer,
    *,
    task: Task = TASK,
    fork: bool = True,
    branches: dict[str, int] | None = None,
    **config: Any,
) -> Trajectory:
    settings = {
        "max_turns": 8,
        "max_turn_tokens": 64,
        "max_context_tokens": 2048,
        "env_timeout_s": 5.0,
        "branches": {"num": 2, "budget_tokens": 10**6, **(branches or {})},
        **config,
    }

    async def played() -> Trajectory:
        thread = EnvThread()
        try:
            episode = Episode(
                task,
                context=EpisodeContext(engine=engine, renderer=renderer, config=RolloutConfig.model_validate(settings)),
                thread=thread,
                fork=fork,
            )
            return await episode.play(make_env)
        finally:
            thread.close()

    return asyncio.run(played())


def rewards_of(trajectory: Trajectory) -> list[tuple[tuple[float, ...], ...]]:
    """Return the rewards of the branches of each turn."""
    found = []
    for turn in trajectory.turns:
        assert turn.branch_rewards is not None
        found.append(turn.branch_rewards)
    return found


def without_branches(trajectory: Trajectory) -> Trajectory:
    """Return what the episode would have been unforked, less the seconds."""
    kept = {k: v for k, v in trajectory.metrics.items() if "branch" not in k and k != "env_s"}
    turns = tuple(replace(turn, branch_rewards=None) for turn in trajectory.turns)
    return replace(trajectory, turns=turns, metrics=kept)


@each(("num", "every"), [(2, 1), (3, 2), (1, 3), (2, 5), (1, 9)])
def test_every_so_many_turns_as_many_rollouts_are_forked_as_asked(
    num: int, every: int, new_engine: NewEngine, renderer: Renderer
) -> None:
    trajectory = play(Dice, new_engine(), renderer, branches={"num": num, "every": every})
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TERMINATED, 5)
    for k, forked in enumerate(rewards_of(trajectory)):
        # From turn k on, an episode of 5 turns has 5 - k of them.
        assert [len(rewards) for rewards in forked] == ([5 - k] * num if k % every == 0 else [])
    counted = sum(map(len, rewards_of(trajectory)))
    assert (trajectory.metrics["branches"], trajectory.metrics["failed_branches"]) == (counted, 0)


def test_without_forking_there_are_no_branches_and_no_copies(new_engine: NewEngine, renderer: Renderer) -> None:
    log: list[str] = []
    trajectory = play(lambda: Dice(lambda what, _: log.append(what)), new_engine(), renderer, fork=False)
    assert [turn.branch_rewards for turn in trajectory.turns] == [None] * 5
    assert "branches" not in trajectory.metrics
    assert log == ["made", *["step"] * 5, "close"]


def test_the_episode_is_the_same_bit_for_bit_with_forks_and_without(new_engine: NewEngine, renderer: Renderer) -> None:
    for seed in range(3):
        task = replace(TASK, sampling_seed=seed)
        forked = play(Dice, new_engine(), renderer, task=task)
        plain = play(Dice, new_engine(), renderer, task=task, fork=False)
        assert forked.turns[0].branch_rewards
        assert without_branches(forked) == without_branches(plain)


def test_a_branch_begins_in_the_context_of_its_turn_with_the_state_of_that_moment(
    recording: Recording, renderer: Renderer
) -> None:
    closed: list[Dice] = []

    def log(what: str, env: Dice) -> None:
        if what == "close":
            closed.append(env)

    trajectory = play(lambda: Dice(log), recording, renderer)
    prompts = [prompt for request_id, prompt, *_ in recording.calls if request_id == "train/000000/3#0"]
    branches = recording.of_branches()
    assert len(prompts) == 5
    assert set(branches) == {(turn, number) for turn in range(5) for number in range(2)}
    for (turn, _), calls in branches.items():
        assert calls[0][0] == prompts[turn]
        assert len(calls) == 5 - turn
    rewards = [turn.reward for turn in trajectory.turns]
    (main,) = [env for env in closed if env.generation == 0]
    assert main.drawn == rewards  # of five turns alone: no branch wrote to the lists of the original
    assert main.heard == [turn.message["content"] for turn in trajectory.turns]
    played = [env for env in closed if env.generation == 2]  # a fork of what was forked at the turn
    assert len(played) == 10
    assert {env.secret for env in played} == {main.secret}
    for env in played:
        (own,) = [
            (turn, forked)
            for turn, of_turn in enumerate(rewards_of(trajectory))
            for forked in of_turn
            if env.drawn == [*rewards[:turn], *forked]
        ]
        assert env.heard[: own[0]] == main.heard[: own[0]]
    # What was kept to fork from stands where it stood.
    wait_until(lambda: len(closed) == 16)  # it is closed when nobody waits any more
    kept = sorted(len(env.drawn) for env in closed if env.generation == 1)
    assert kept == [0, 1, 2, 3, 4]


def test_chance_and_words_are_new_in_every_branch(recording: Recording, renderer: Renderer) -> None:
    trajectory = play(Dice, recording, renderer, branches={"num": 3})
    rewards = [turn.reward for turn in trajectory.turns]
    drawn = [reward for of_turn in rewards_of(trajectory) for forked in of_turn for reward in forked]
    assert len({*rewards, *drawn}) == len(rewards) + len(drawn) == 5 + 3 * 15  # no number was drawn twice
    seeds = [sampling.seed for _, _, sampling, _ in recording.calls]
    assert len(set(seeds)) == len(seeds) == 5 + 3 * 15
    for turn in range(5):
        first = [recording.of_branches()[turn, number][0][2].token_ids for number in range(3)]
        assert len({trajectory.turns[turn].action_ids, *first}) > 1


def test_an_attempt_that_is_made_again_and_a_sibling_have_branches_of_their_own(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    tasks = [TASK, replace(TASK, attempt=1), replace(TASK, rollout_index=4), replace(TASK, sampling_seed=2)]
    trajectories = [play(Dice, new_engine(), renderer, task=task) for task in tasks]
    assert len({t.turns[0].reward for t in trajectories}) == 1  # the same task, whose chance is the environment's
    assert len({t.turns[0].branch_rewards for t in trajectories}) == 4


def test_tokens_of_branches_are_counted_and_no_part_of_the_episode(recording: Recording, renderer: Renderer) -> None:
    trajectory = play(Dice, recording, renderer)
    sampled = sum(len(call[2].token_ids) for calls in recording.of_branches().values() for call in calls)
    assert trajectory.metrics["branch_tokens"] == sampled > 0
    assert trajectory.num_action_tokens == sum(len(c.token_ids) for *_, c in recording.calls) - sampled


@pytest.mark.slow
def test_the_budget_goes_to_one_rollout_a_turn_before_a_second(new_engine: NewEngine, renderer: Renderer) -> None:
    def branches(budget: int) -> dict[tuple[int, int], int]:
        engine = new_engine(Recording)
        assert isinstance(engine, Recording)
        settings = {"num": 3, "every": 2, "budget_tokens": budget}
        trajectory = play(Dice, engine, renderer, branches=settings)
        found = engine.of_branches()
        counted = Counter(turn for turn, _ in found)
        assert [len(forked) for forked in rewards_of(trajectory)] == [counted[turn] for turn in range(5)]
        assert trajectory.metrics["branches"] == len(found)
        return {key: sum(len(call[2].token_ids) for call in calls) for key, calls in found.items()}

    whole = branches(10**6)
    order = [(turn, number) for number in range(3) for turn in (0, 2, 4)]
    assert list(whole) == order
    spent = np.cumsum(list(whole.values()))
    for num in range(1, 9):
        # Where so many have used the budget up to the last token, no other is begun; one token more buys the next.
        assert list(branches(int(spent[num - 1]))) == order[:num]
        assert list(branches(int(spent[num - 1]) + 1)) == order[: num + 1]


def breaks(how: Callable[[], None], *, what: str, when: Callable[[Dice], bool]) -> MakeEnv:
    def log(happened: str, env: Dice) -> None:
        if happened == what and when(env):
            how()

    return lambda: Dice(log)


@each(
    ("what", "when", "failed"),
    [
        ("step", lambda env: env.generation == 2 and len(env.drawn) == 3, [0, 1, 2, 3]),  # turn 3, wherever they began
        ("fork", lambda env: env.generation == 1 and len(env.drawn) == 2, [2]),
        ("close", lambda env: env.generation == 2 and len(env.drawn) == 5, [0, 1, 2, 3, 4]),
    ],
)
def test_a_branch_whose_environment_raises_is_dropped_and_counted(
    what: str, when: Callable[[Dice], bool], failed: list[int], new_engine: NewEngine, renderer: Renderer
) -> None:
    trajectory = play(breaks(raises, what=what, when=when), new_engine(), renderer)
    assert [len(forked) for forked in rewards_of(trajectory)] == [0 if turn in failed else 2 for turn in range(5)]
    assert (trajectory.metrics["branches"], trajectory.metrics["failed_branches"]) == (10, 2 * len(failed))
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.TERMINATED, None)
    assert without_branches(trajectory) == without_branches(play(Dice, new_engine(), renderer, fork=False))


def test_a_branch_that_hangs_is_the_last_one_and_the_episode_stands(new_engine: NewEngine, renderer: Renderer) -> None:
    make_env = breaks(hang, what="step", when=lambda env: env.generation == 2 and len(env.drawn) == 4)
    trajectory = play(make_env, new_engine(), renderer, env_timeout_s=2.0)
    assert rewards_of(trajectory) == [()] * 5
    assert (trajectory.metrics["branches"], trajectory.metrics["failed_branches"]) == (1, 1)
    assert without_branches(trajectory) == without_branches(play(Dice, new_engine(), renderer, fork=False))


class FailsInBranches(TransformersEngine):
    """Breaks down at the second rollout of each turn."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        if request_id.endswith("/1"):
            raise EngineError("out of memory")
        return await super().generate(prompt_ids, sampling, request_id)


def test_a_branch_whose_engine_fails_is_dropped_and_counted(new_engine: NewEngine, renderer: Renderer) -> None:
    trajectory = play(Dice, new_engine(FailsInBranches), renderer)
    assert [len(forked) for forked in rewards_of(trajectory)] == [1] * 5
    assert trajectory.metrics["failed_branches"] == 5
    assert trajectory.stop_reason is StopReason.TERMINATED


@each(
    ("how", "words"),
    [
        (raises, f"raised KeyError: 'lever' (dice.py:{raises.__code__.co_firstlineno + 2})"),
        (hang, "did not return within rollout.env_timeout_s: 2 s"),
    ],
)
def test_an_environment_that_cannot_be_forked_fails_its_episode_in_its_words(
    how: Callable[[], None], words: str, new_engine: NewEngine, renderer: Renderer
) -> None:
    make_env = breaks(how, what="fork", when=lambda env: env.generation == 0 and len(env.drawn) == 2)
    trajectory = play(make_env, new_engine(), renderer, env_timeout_s=2.0)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error == f"environment Dice: fork() {words}"
    assert len(trajectory.turns) == 2


class Endless(Dice):
    num_turns = 100


def test_a_wrapper_is_forked_with_its_count_of_steps(new_engine: NewEngine, renderer: Renderer) -> None:
    wrappers: list[Any] = []

    def make_env() -> Any:
        wrappers.append(TimeLimit(Endless(), max_episode_steps=4))
        return wrappers[-1]

    trajectory = play(make_env, new_engine(), renderer)
    assert (trajectory.stop_reason, trajectory.truncated, len(trajectory.turns)) == (StopReason.TERMINATED, True, 4)
    # A branch from turn k has what the limit leaves: neither a limit of its own nor one that others have used up.
    assert [[len(forked) for forked in of_turn] for of_turn in rewards_of(trajectory)] == [
        [4 - k] * 2 for k in range(4)
    ]
    assert wrappers[0]._elapsed_steps == 4
    assert len(wrappers[0].unwrapped.drawn) == 4


def test_limits_of_the_rollout_count_what_came_before_the_fork(recording: Recording, renderer: Renderer) -> None:
    trajectory = play(Endless, recording, renderer, max_turns=6)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert [[len(forked) for forked in of_turn] for of_turn in rewards_of(trajectory)] == [
        [6 - k] * 2 for k in range(6)
    ]
    recording.calls.clear()
    trajectory = play(Endless, recording, renderer, max_turns=50, max_turn_tokens=24, max_episode_tokens=24)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    for (turn, _), calls in recording.of_branches().items():
        before = sum(len(t.action_ids) for t in trajectory.turns[:turn])
        assert before + sum(len(call[2].token_ids) for call in calls) == 24


def test_every_environment_that_was_made_or_forked_is_closed_once(new_engine: NewEngine, renderer: Renderer) -> None:
    for what in ("nothing", "step", "fork"):  # and where the episode, or a branch of it, fails half-way
        for generation in range(3):
            born: list[Dice] = []  # held, so that no other gets the same id
            closed: Counter[int] = Counter()

            def log(
                happened: str,
                env: Dice,
                born: list[Dice] = born,
                closed: Counter[int] = closed,
                fault: tuple[str, int] = (what, generation),
            ) -> None:
                if happened in ("made", "forked"):
                    born.append(env)
                if happened == "close":
                    closed[id(env)] += 1
                if (happened, env.generation) == fault and len(env.drawn) == 2:
                    raise RuntimeError("broken")

            trajectory = play(partial(Dice, log), new_engine(), renderer)
            # Nobody else waits for the last of them.
            wait_until(lambda: len(closed) == len(born))  # noqa: B023 - called at once
            assert closed == Counter({id(env): 1 for env in born})
            assert trajectory.failed == (generation == 0 and what != "nothing")
            assert len(born) == (1 + 3 if trajectory.failed and what == "step" else len(born))
    assert len(born) == 1 + 5 + 10


class Coin(Dice):
    """Pays 1 or 0, by chance alone, whatever is said."""

    def draw(self) -> float:
        return float(self.np_random.integers(2))


@pytest.mark.slow
@pytest.mark.process
def test_branches_tell_the_value_of_each_turn(new_engine: NewEngine, renderer: Renderer) -> None:
    trajectory = play(Coin, new_engine(), renderer, branches={"num": 60, "every": 2})
    assert len(trajectory.turns) == 5
    for turn, of_turn in enumerate(rewards_of(trajectory)):
        if turn % 2 == 0:
            left = 5 - turn
            returns = [sum(forked) for forked in of_turn]
            # A sum of `left` coins: mean left / 2, variance left / 4. Four standard errors of 60 draws.
            assert np.mean(returns) == pytest.approx(left / 2, abs=4 * (left / 4 / 60) ** 0.5)
            assert 0.4 * left / 4 < np.var(returns) < 2 * left / 4


def pause_a_while(what: str, _: Dice) -> None:
    if what in ("made", "step", "fork"):
        time.sleep(random.random() * 0.003)


@pytest.fixture
def new_pool(new_engine: NewEngine, renderer: Renderer) -> Callable[..., RolloutPool]:
    def make(make_env: MakeEnv = Dice, *, fork: bool = True, **config: Any) -> RolloutPool:
        settings = {"group_size": 3, "max_turn_tokens": 64, "env_timeout_s": 5.0, "branches": {"num": 2}, **config}
        return RolloutPool(
            player=EnvPlayer(make_env),
            context=EpisodeContext(
                engine=new_engine(), renderer=renderer, config=RolloutConfig.model_validate(settings)
            ),
            tasks=Tasks(seed=5),
            fork=fork,
        )

    return make


def collect(pool: RolloutPool, num_groups: int) -> list[TrajectoryGroup]:
    try:
        return asyncio.run(pool.collect(num_groups))
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.process
def test_a_pool_forks_every_episode_and_repeats_bit_for_bit_whatever_the_timing(
    new_pool: Callable[..., RolloutPool],
) -> None:
    first = collect(new_pool(lambda: Dice(pause_a_while), max_live_episodes=4), 2)
    second = collect(new_pool(lambda: Dice(pause_a_while), max_live_episodes=4), 2)
    prompt = collect(new_pool(max_live_episodes=4), 2)
    turns = [[t.turns for group in groups for t in group.trajectories] for groups in (first, second, prompt)]
    assert turns[0] == turns[1] == turns[2]
    assert len(turns[0]) == 6
    assert all(len(turn.branch_rewards or ()) == 2 for of_one in turns[0] for turn in of_one)


def test_a_pool_that_forks_plays_the_episodes_of_one_that_does_not(new_pool: Callable[..., RolloutPool]) -> None:
    forked, plain = collect(new_pool(), 2), collect(new_pool(fork=False), 2)
    for group, other in zip(forked, plain, strict=True):
        for one, two in zip(group.trajectories, other.trajectories, strict=True):
            assert [turn.action_ids for turn in one.turns] == [turn.action_ids for turn in two.turns]
            assert [turn.reward for turn in one.turns] == [turn.reward for turn in two.turns]
            assert all(turn.branch_rewards is None for turn in two.turns)
            for turn, twin in zip(one.turns, two.turns, strict=True):
                # Branches decode beside the episodes that continue, in larger batches: float32 rounds otherwise.
                np.testing.assert_allclose(turn.behavior_logprobs, twin.behavior_logprobs, rtol=1e-5, atol=1e-6)


def test_a_pool_continues_with_a_fresh_thread_after_a_branch_that_hangs(new_pool: Callable[..., RolloutPool]) -> None:
    hung: list[bool] = []

    def hangs_once() -> None:
        if not hung:
            hung.append(True)
            hang()

    make_env = breaks(hangs_once, what="step", when=lambda env: env.generation == 2)
    pool = new_pool(make_env, env_timeout_s=2.0, max_live_episodes=1)
    (group,) = collect(pool, 1)
    assert [t.failed for t in group.trajectories] == [False] * 3
    assert [t.metrics["branches"] for t in group.trajectories] == [1, 10, 10]
    assert pool.counts == {
        "faults": 1,
        "retries": 0,
        "failed_episodes": 0,
        "unscored_episodes": 0,
        "replaced_groups": 0,
        "zero_spread_groups": 0,
        "lost_threads": 1,
    }
