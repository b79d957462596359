"""The whole step on a tiny model: real environment, engine, credit, loss and optimizer."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from agentrl import Credit, CreditScheme, Trajectory, TrajectoryGroup
from agentrl.chat import ChatMLRenderer
from agentrl.engine import EngineConfig
from agentrl.engine.batched import Request
from agentrl.engine.transformers import TransformersEngine
from agentrl.env import make_env
from agentrl.errors import EngineError, TrainingError
from agentrl.learn.loss import LossConfig
from agentrl.learn.train_config import TrainConfig
from agentrl.learn.trainer import Trainer
from agentrl.rollout import RolloutConfig, RolloutPool, derive_seed
from tests.support import learners
from tests.support.learners import TOKENIZER, make_learner

ROLLOUT = RolloutConfig(
    num_groups=3, group_size=4, max_turns=3, max_turn_tokens=8, max_episode_tokens=24, max_context_tokens=512
)


class Noise(CreditScheme):
    """Advantages that differ from token to token and follow from the ids alone: a random policy earns no rewards."""

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [[self._credit(trajectory) for trajectory in group.trajectories] for group in groups]

    def _credit(self, trajectory: Trajectory) -> Credit:
        rng = np.random.default_rng(derive_seed(trajectory.trajectory_id))
        return Credit.from_tokens(trajectory, rng.normal(size=trajectory.num_action_tokens))


class Loop:
    """Where trainers live; their pools are closed with it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.run = self.runner.run
        self.pools: list[RolloutPool] = []

    def close(self) -> None:
        for pool in self.pools:
            self.run(pool.stop())
            pool.close()
        self.runner.close()


@pytest.fixture
def runner() -> Iterator[Loop]:
    with closing(Loop()) as runner:
        yield runner


def make_trainer(
    runner: Loop,
    *,
    rollout: RolloutConfig = ROLLOUT,
    loss: LossConfig | None = None,
    engine_class: type[TransformersEngine] = TransformersEngine,
    credit: CreditScheme | None = None,
    has_reference: bool = False,
    **train: Any,
) -> Trainer:
    learner = make_learner(loss=loss, has_reference=has_reference, **train)
    engine = engine_class(copy.deepcopy(learner.state.policy.model), EngineConfig(max_batch_size=8))
    pool = RolloutPool(
        make_env=partial(make_env, "key_door"),
        engine=engine,
        renderer=ChatMLRenderer(TOKENIZER),
        config=rollout,
        seed=1,
    )
    runner.pools.append(pool)
    trainer = Trainer(
        learner=learner,
        engine=engine,
        pool=pool,
        credit=credit or Noise(),
        agreement=TrainConfig().agreement_bound(),
        rollout=rollout,
        seed=1,
        runner=runner.runner,
    )
    trainer.start_engine()
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return learners.weights(trainer._learner)


def repeatable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "process/"))}


@pytest.mark.parametrize("anchor", ["behavior", "recomputed"])
def test_first_minibatch_of_an_on_policy_batch_has_ratio_one_and_clips_nothing(runner: Loop, anchor: Any) -> None:
    trainer = make_trainer(runner, loss=LossConfig(anchor=anchor), num_minibatches=3)
    for _ in range(3):
        metrics = trainer.step().metrics
        assert metrics["first/ratio_deviation"] < 1e-4
        assert metrics["first/clipped_tokens"] == 0
        assert metrics["first/engine_difference"] < 1e-5
        assert metrics["staleness/max"] == 0
        assert metrics["clip/tokens"] > 0  # the later minibatches do move, and far: nothing above is true by chance
        assert metrics["ratio/spread"] > 1e-4


def test_two_trainers_with_one_seed_repeat_bit_for_bit(runner: Loop) -> None:
    first, second = make_trainer(runner), make_trainer(runner)
    for _ in range(3):
        assert repeatable(first.step().metrics) == repeatable(second.step().metrics)
    assert torch.equal(weights(first), weights(second))


def test_saved_and_loaded_equals_uninterrupted_bit_for_bit(runner: Loop, tmp_path: Path) -> None:
    train: dict[str, Any] = {"schedule": "cosine", "steps": 4, "weight_decay": 0.1}
    whole = make_trainer(runner, **train)
    expected = [repeatable(whole.step().metrics) for _ in range(4)]
    early = make_trainer(runner, **train)
    for _ in range(2):
        early.step()
    early.save(tmp_path)
    late = make_trainer(runner, **train)
    late.load(tmp_path)
    late.load_state_dict(early.state_dict())
    late.start_engine()
    assert [repeatable(late.step().metrics) for _ in range(2)] == expected[2:]
    assert torch.equal(weights(late), weights(whole))


def test_the_kl_term_pulls_towards_the_reference(runner: Loop) -> None:
    distance = {}
    for coefficient in (1e-9, 100.0):
        trainer = make_trainer(runner, loss=LossConfig(kl_coefficient=coefficient), has_reference=True)
        shifted = [(n, t + 0.05 if t.ndim > 1 else t) for n, t in trainer._learner.state.weights()]
        trainer._learner.state.policy.model.load_state_dict(dict(shifted))
        trainer.start_engine()
        found = [trainer.step().metrics["kl/reference"] for _ in range(24)]
        assert found[0] > 1e-4  # the policy stands off the reference, under its own samples
        distance[coefficient] = np.mean(found[-12:]) / found[0]  # single ones go up and down
    assert distance[100.0] < 0.3 * distance[1e-9]


def test_mismatch_weights_are_logged_and_used(runner: Loop) -> None:
    plain = make_trainer(runner, loss=LossConfig(anchor="recomputed"))
    corrected = make_trainer(runner, loss=LossConfig(anchor="recomputed", mismatch="truncate"))
    groups = runner.run(plain._pool.collect())
    skewed = [replace(g, trajectories=tuple(_skewed(t) for t in g.trajectories)) for g in groups]
    with pytest.raises(EngineError, match=r"train\.agreement"):  # engine log-probabilities that are plainly wrong
        plain._learn(skewed, is_replaying=False)
    metrics = corrected._learn(groups, is_replaying=False).metrics
    assert metrics["mismatch/mean"] == pytest.approx(1.0, abs=1e-5)


def _skewed(trajectory: Trajectory) -> Trajectory:
    turns = [replace(t, behavior_logprobs=tuple(x - 0.1 for x in t.behavior_logprobs)) for t in trajectory.turns]
    return replace(trajectory, turns=tuple(turns))


class DeafEngine(TransformersEngine):
    """Takes weights and goes on with its own."""

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights([], version)


class CoarseEngine(TransformersEngine):
    """Takes weights in a precision that is too coarse."""

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights([(n, (t * 4).round() / 4) for n, t in named_tensors], version)


@pytest.mark.parametrize(
    ("engine_class", "words"), [(DeafEngine, "do not reach its samples"), (CoarseEngine, r"train\.agreement: 0\.001")]
)
def test_an_engine_that_runs_other_weights_is_found_out_at_the_start(
    runner: Loop, engine_class: type[TransformersEngine], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        make_trainer(runner, engine_class=engine_class)


class TiredEngine(TransformersEngine):
    """Takes the weights of the start and of the first two steps, and then goes on with its own."""

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights(named_tensors if version < 3 else [], version)


@pytest.mark.parametrize(("mode", "step"), [("sync", 4), ("partial", 3), ("async", 3)])
def test_an_engine_that_misses_a_later_push_is_found_out_at_once(
    runner: Loop, mode: Literal["sync", "partial", "async"], step: int
) -> None:
    trainer = make_trainer(runner, rollout=ROLLOUT.model_copy(update={"mode": mode}), engine_class=TiredEngine)
    for _ in range(step - 1):
        trainer.step()
    with pytest.raises(EngineError, match=r"train\.agreement: 0\.001"):  # before another token is trained on
        trainer.step()


class StuckEngine(TransformersEngine):
    """Decodes nothing more from the second version on."""

    async def _advance(self, waiting: list[Request]) -> None:
        if self.version >= 2:
            await asyncio.sleep(60)
        await super()._advance(waiting)


def test_an_engine_that_hangs_after_a_push_has_a_deadline(runner: Loop) -> None:
    rollout = ROLLOUT.model_copy(update={"mode": "partial", "engine_timeout_s": 1.0})
    trainer = make_trainer(runner, rollout=rollout, engine_class=StuckEngine)
    trainer.step()
    with pytest.raises(EngineError, match=r"did not answer its self-proof within rollout\.engine_timeout_s: 1"):
        trainer.step()


def test_an_update_that_is_given_up_ends_soon(runner: Loop) -> None:
    trainer = make_trainer(runner)
    groups = runner.run(trainer._pool.collect())

    def broken() -> Any:
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        trainer._meanwhile(broken)
    before = weights(trainer)
    with pytest.raises(TrainingError, match="the update was interrupted"):
        trainer._learn(groups, is_replaying=False)
    assert torch.equal(weights(trainer), before)
