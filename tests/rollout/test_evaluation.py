import asyncio
from itertools import combinations
from math import comb
from typing import Any

import pytest

from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.env import MessageEnv
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks, held_out_seed, task_seed
from agentrl.rollout.evaluation import (
    Evaluation,
    EvaluationConfig,
    pass_at_k,
    play_evaluation,
    reported_means,
    summarize_evaluation,
)
from agentrl.types import Message, StopReason, TaskShard, Trajectory, TrajectoryGroup
from tests.support.each import each


class OneTurn(MessageEnv):
    """Ends after a turn; `outcome(seed, member)` tells how: True, False, or None for an environment that breaks."""

    played: list[tuple[int, int]]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        assert options is not None
        self.task = (seed, options["rollout_index"])
        self.played.append(self.task)
        return ({"role": "user", "content": "Well?"},), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        success = self.outcome(*self.task)
        if success is None:
            raise RuntimeError("broken")
        return (), 2.0 if success else 0.5, True, False, {"success": success, "length": 10.0}

    def outcome(self, seed: int, member: int) -> bool | None:
        return (seed + member) % 3 == 0


class EndsAtOnce(ChatMLRenderer):
    """Any token ends a turn."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(range(261))


def played(
    env: type[OneTurn], config: EvaluationConfig, *, seed: int = 3, max_retries: int = 0, num_processes: int = 1
) -> Evaluation:
    tokenizer = train_tokenizer([], vocab_size=261)
    sizes = LocalModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
    env.played = []
    pool = RolloutPool(
        player=EnvPlayer(env),
        context=EpisodeContext(
            engine=TransformersEngine(make_local_model(sizes, tokenizer)),
            renderer=EndsAtOnce(tokenizer),
            config=RolloutConfig(max_retries=max_retries, max_consecutive_failures=1000),
        ),
        tasks=Tasks(seed=seed),
    )

    async def play() -> list[TrajectoryGroup]:
        shares = [
            await play_evaluation(pool, config, shard=TaskShard(1, process, num_processes))
            for process in range(num_processes)
        ]
        return [group for share in shares for group in share]

    try:
        return summarize_evaluation(asyncio.run(play()), config)
    finally:
        pool.close()


@each("num_samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_choices_with_one_that_is_right(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            right = [sample < num_right for sample in range(num_samples)]
            chosen = [any(choice) for choice in combinations(right, k)]
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(sum(chosen) / len(chosen), rel=1e-12)


@each("num_processes", [1, 2, 3])
def test_each_held_out_task_is_played_as_often_as_asked(num_processes: int) -> None:
    evaluation = played(OneTurn, EvaluationConfig(num_tasks=7, samples=3), num_processes=num_processes)
    seeds = [held_out_seed(3, i) for i in range(7)]
    assert sorted(OneTurn.played) == sorted((seed, member) for seed in seeds for member in range(3))
    assert [group.group_id for group in evaluation.groups] == [f"eval/{i:06d}" for i in range(7)]
    assert [{t.seed for t in group.trajectories} for group in evaluation.groups] == [{seed} for seed in seeds]


def test_held_out_tasks_are_never_trained_on() -> None:
    played(OneTurn, EvaluationConfig(num_tasks=50))
    training = {task_seed(run, index) for run in range(4) for index in range(500)}
    assert not training & {seed for seed, _ in OneTurn.played}
    assert all(seed >= 2**30 for seed, _ in OneTurn.played)
    assert all(seed < 2**30 for seed in training)


def test_means_and_pass_rates_are_those_of_the_episodes() -> None:
    config = EvaluationConfig(num_tasks=12, samples=3, pass_at=(1, 2, 3))
    metrics = played(OneTurn, config).metrics
    right = [[(held_out_seed(3, i) + member) % 3 == 0 for member in range(3)] for i in range(12)]
    # Of three members in a row exactly one number divides by 3.
    assert [sum(row) for row in right] == [1] * 12
    rates = {k: 1 - comb(2, k) / comb(3, k) for k in (1, 2, 3)}
    expected = {"episodes": 36, "failed": 0, "success": 1 / 3, "reward": (2.0 + 2 * 0.5) / 3, "turns": 1, "length": 10}
    expected |= {f"pass@{k}": rate for k, rate in rates.items()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_failed_episodes_are_counted_and_leave_every_mean() -> None:
    broken = held_out_seed(3, 1)

    class Breaks(OneTurn):
        def outcome(self, seed: int, member: int) -> bool | None:
            return None if seed == broken or member == 0 else member == 1

    evaluation = played(Breaks, EvaluationConfig(num_tasks=4, samples=3, pass_at=(1, 2)))
    metrics = evaluation.metrics
    # Three tasks keep members 1 (right) and 2 (wrong); the broken one keeps none and enters no rate.
    assert metrics["episodes"] == 6
    assert metrics["failed"] == 3 + 3
    assert metrics["success"] == 0.5
    assert metrics["reward"] == (2.0 + 0.5) / 2
    assert (metrics["pass@1"], metrics["pass@2"]) == (0.5, 1.0)
    assert [len(group.valid) for group in evaluation.groups] == [2, 0, 2, 2]
    assert {t.stop_reason for t in evaluation.groups[1].trajectories} == {StopReason.ENV_ERROR}


def test_episodes_that_nothing_could_score_are_counted_and_leave_every_mean() -> None:
    class CannotTell(OneTurn):
        def step(self, action: str | Message) -> Any:
            _, reward, _, _, info = super().step(action)
            seed, member = self.task
            if member == 0:
                return (), None, True, False, {"length": 90.0}
            if member == 1 and seed % 2:  # scored, but whether it is a success is not known
                return (), 1.0, True, False, {"success": None, "score": None, "length": 10.0}
            return (), reward, True, False, info | {"score": 0.5}

        def outcome(self, seed: int, member: int) -> bool | None:
            return member == 1

    evaluation = played(CannotTell, EvaluationConfig(num_tasks=4, samples=3, pass_at=(1, 2)), max_retries=2)
    seeds = [held_out_seed(3, index) for index in range(4)]
    odd = sum(seed % 2 for seed in seeds)
    assert 0 < odd < 4
    metrics = evaluation.metrics
    assert len(CannotTell.played) == 4 * 3  # none is played again
    assert (metrics["episodes"], metrics["failed"], metrics["unscored"]) == (8, 0, 4)
    assert metrics["stop/unscored"] == pytest.approx(1 / 3)
    # Member 1 earns 2 and is right, or earns 1 and is unknown; member 2 earns .5 and is wrong.
    assert metrics["reward"] == (2.0 * (4 - odd) + 1.0 * odd + 0.5 * 4) / 8
    assert metrics["success"] == (4 - odd) / (8 - odd)
    assert (metrics["score"], metrics["length"]) == (0.5, 10.0)
    assert metrics["pass@1"] == pytest.approx(0.5 * (4 - odd) / 4)
    assert metrics["pass@2"] == 1.0
    assert sum(task.solved or 0 for task in evaluation.tasks()) == 4 - odd
    assert evaluation.intervals()["success"].low < metrics["success"] < evaluation.intervals()["success"].high


def test_an_environment_that_never_works_leaves_no_means() -> None:
    class Never(OneTurn):
        def outcome(self, seed: int, member: int) -> bool | None:
            return None

    metrics = played(Never, EvaluationConfig(num_tasks=2)).metrics
    assert metrics == {"episodes": 0.0, "failed": 2.0, "unscored": 0.0}


def episode(metrics: dict[str, float]) -> Trajectory:
    return Trajectory(
        group_id="g",
        trajectory_id="g/0",
        env_id="e",
        seed=0,
        turns=(),
        stop_reason=StopReason.MAX_TURNS,
        metrics=metrics,
    )


def test_an_episode_that_was_cut_off_before_it_reported_counts_as_zero() -> None:
    cut, done = episode({"env_s": 1.0}), episode({"success": 1.0, "score": 0.5, "env_s": 1.0})
    assert reported_means([cut, done]) == {"success": 0.5, "score": 0.25}


def test_the_panel_names_tasks_by_what_they_show_and_not_by_what_becomes_of_them() -> None:
    class Numbered(OneTurn):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed, options=options)
            return ({"role": "user", "content": f"Task {seed}."},), {}

    config = EvaluationConfig(num_tasks=3)
    panel = played(Numbered, config).panel
    assert len(set(panel)) == 3
    assert None not in panel
    assert played(Numbered, EvaluationConfig(num_tasks=3, samples=2)).panel == panel
    assert played(Numbered, config, seed=4).panel != panel
    assert len(set(played(OneTurn, config).panel)) == 1, "its tasks all show the same"
