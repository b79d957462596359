"""The whole step on a tiny model: real environment, engine, credit, loss and optimizer."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from agentrl import Credit, CreditScheme, StopReason, Trajectory, TrajectoryGroup
from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.engine import EngineConfig
from agentrl.engine.batched import Request
from agentrl.engine.transformers import TransformersEngine
from agentrl.env import make_env
from agentrl.errors import EngineError, TrainingError
from agentrl.learn.loss import LossConfig
from agentrl.learn.model import LocalModelConfig, Policy, make_local_model
from agentrl.learn.trainer import TrainConfig, Trainer
from agentrl.rollout import RolloutConfig, RolloutPool, derive_seed

TINY = LocalModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
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


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def make_trainer(
    runner: asyncio.Runner,
    *,
    rollout: RolloutConfig = ROLLOUT,
    loss: LossConfig | None = None,
    engine_class: type[TransformersEngine] = TransformersEngine,
    credit: CreditScheme | None = None,
    has_reference: bool = False,
    **train: Any,
) -> Trainer:
    torch.manual_seed(0)
    tokenizer = train_tokenizer([], vocab_size=261)
    model = make_local_model(TINY, tokenizer)
    engine = engine_class(copy.deepcopy(model), EngineConfig(max_batch_size=8))
    pool = RolloutPool(
        make_env=partial(make_env, "key_door"),
        engine=engine,
        renderer=ChatMLRenderer(tokenizer),
        config=rollout,
        seed=1,
    )
    policy = Policy(model)
    trainer = Trainer(
        accelerator=Accelerator(cpu=True),
        policy=policy,
        engine=engine,
        pool=pool,
        credit=credit or Noise(),
        loss=loss or LossConfig(),
        config=TrainConfig(device="cpu", **{"learning_rate": 1e-2, **train}),
        rollout=rollout,
        seed=1,
        runner=runner,
    )
    if has_reference:
        trainer.reference = copy.deepcopy(policy)
    trainer.start_engine()
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in trainer._weights()])


def repeatable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "process/"))}


@pytest.mark.parametrize("anchor", ["behavior", "recomputed"])
def test_first_minibatch_of_an_on_policy_batch_has_ratio_one_and_clips_nothing(
    runner: asyncio.Runner, anchor: Any
) -> None:
    trainer = make_trainer(runner, loss=LossConfig(anchor=anchor), num_minibatches=3)
    for _ in range(3):
        metrics = trainer.step().metrics
        assert metrics["first/ratio_deviation"] < 1e-4
        assert metrics["first/clipped_tokens"] == 0
        assert metrics["first/engine_difference"] < 1e-5
        assert metrics["staleness/max"] == 0
        assert metrics["clip/tokens"] > 0  # the later minibatches do move, and far: nothing above is true by chance
        assert metrics["ratio/spread"] > 1e-4


def test_two_trainers_with_one_seed_repeat_bit_for_bit(runner: asyncio.Runner) -> None:
    first, second = make_trainer(runner), make_trainer(runner)
    for _ in range(3):
        assert repeatable(first.step().metrics) == repeatable(second.step().metrics)
    assert torch.equal(weights(first), weights(second))


def test_saved_and_loaded_equals_uninterrupted_bit_for_bit(runner: asyncio.Runner, tmp_path: Path) -> None:
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


def test_an_update_equals_a_plain_loop_over_trajectories(runner: asyncio.Runner) -> None:
    settings = LossConfig(unit="turn")
    trainer = make_trainer(runner, loss=settings, num_minibatches=1, max_tokens_per_micro_batch=300)
    model = copy.deepcopy(trainer._policy.model)
    result = trainer.step()
    pairs = [
        (trajectory, credit)
        for group, credits in zip(result.groups, result.credits, strict=True)
        for trajectory, credit in zip(group.trajectories, credits, strict=True)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    low, high = settings.clip_range()
    loss = torch.zeros(())
    for trajectory, credit in pairs:
        ids: list[int] = []
        advantages = iter(credit.advantages_T.tolist())
        for turn in trajectory.turns:
            ids += turn.observation_ids
            start = len(ids)
            ids += turn.action_ids
            table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            logprobs = torch.stack([table[start + j - 1, token] for j, token in enumerate(turn.action_ids)])
            log_ratio = (logprobs - torch.tensor(turn.behavior_logprobs)).mean().detach()
            for logprob in logprobs:
                advantage = next(advantages)
                ratio = log_ratio.exp() * (logprob - logprob.detach()).exp()
                term = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
                loss = loss - term / (len(pairs) * trajectory.num_action_tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    expected = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    # Adam's first step is lr * sign(gradient) but for tiny gradients, so float32 noise shows where those cross zero.
    moved = (weights(trainer) - expected).abs()
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert (moved < 1e-5).double().mean() > 0.999
    assert result.metrics["grad_norm"] > 0


def test_a_failed_episode_changes_neither_loss_nor_weights(runner: asyncio.Runner) -> None:
    with_failure, without = make_trainer(runner), make_trainer(runner)
    groups = runner.run(without._pool.collect())
    credits = Noise().assign(groups)
    lost = replace(groups[0].trajectories[0], trajectory_id="lost", stop_reason=StopReason.ENV_ERROR)
    group = replace(groups[0], trajectories=(*groups[0].trajectories, lost))
    expected = without._update(groups, credits)
    got = with_failure._update([group, *groups[1:]], [[*credits[0], Noise()._credit(lost)], *credits[1:]])
    assert got == expected
    assert torch.equal(weights(with_failure), weights(without))


def test_the_kl_term_pulls_towards_the_reference(runner: asyncio.Runner) -> None:
    distance = {}
    for coefficient in (1e-9, 100.0):
        trainer = make_trainer(runner, loss=LossConfig(kl_coefficient=coefficient), has_reference=True)
        shifted = [(n, t + 0.05 if t.ndim > 1 else t) for n, t in trainer._weights()]
        trainer._policy.model.load_state_dict(dict(shifted))
        trainer.start_engine()
        first = trainer.step().metrics["kl/reference"]
        assert first > 1e-4  # the policy stands off the reference, under its own samples
        for _ in range(15):
            last = trainer.step().metrics["kl/reference"]
        distance[coefficient] = last / first
    assert distance[100.0] < 0.3 * distance[1e-9]


def test_mismatch_weights_are_logged_and_used(runner: asyncio.Runner) -> None:
    plain = make_trainer(runner, loss=LossConfig(anchor="recomputed"))
    corrected = make_trainer(runner, loss=LossConfig(anchor="recomputed", mismatch="truncate"))
    groups = runner.run(plain._pool.collect())
    skewed = [replace(g, trajectories=tuple(_skewed(t) for t in g.trajectories)) for g in groups]
    with pytest.raises(EngineError, match=r"train\.agreement"):  # engine log-probabilities that are plainly wrong
        plain._update(skewed, Noise().assign(skewed))
    metrics = corrected._update(groups, Noise().assign(groups))
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
    runner: asyncio.Runner, engine_class: type[TransformersEngine], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        make_trainer(runner, engine_class=engine_class)


class TiredEngine(TransformersEngine):
    """Takes the weights of the start and of the first two steps, and then goes on with its own."""

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights(named_tensors if version < 3 else [], version)


@pytest.mark.parametrize(("mode", "step"), [("sync", 4), ("partial", 3), ("async", 3)])
def test_an_engine_that_misses_a_later_push_is_found_out_at_once(
    runner: asyncio.Runner, mode: Literal["sync", "partial", "async"], step: int
) -> None:
    trainer = make_trainer(runner, rollout=ROLLOUT.model_copy(update={"mode": mode}), engine_class=TiredEngine)
    for _ in range(step - 1):
        trainer.step()
    with pytest.raises(EngineError, match=r"train\.agreement: 0\.001"):  # before another token is trained on
        trainer.step()
    runner.run(trainer._pool.stop())


class StuckEngine(TransformersEngine):
    """Decodes nothing more from the second version on."""

    async def _advance(self, waiting: list[Request]) -> None:
        if self.version >= 2:
            await asyncio.sleep(60)
        await super()._advance(waiting)


def test_an_engine_that_hangs_after_a_push_has_a_deadline(runner: asyncio.Runner) -> None:
    rollout = ROLLOUT.model_copy(update={"mode": "partial", "engine_timeout_s": 1.0})
    trainer = make_trainer(runner, rollout=rollout, engine_class=StuckEngine)
    trainer.step()
    with pytest.raises(EngineError, match=r"did not answer its self-proof within rollout\.engine_timeout_s: 1"):
        trainer.step()
    runner.run(trainer._pool.stop())


def test_an_update_that_is_given_up_ends_soon(runner: asyncio.Runner) -> None:
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


def test_the_learning_rate_rises_over_its_warm_up_whatever_the_schedule(runner: asyncio.Runner) -> None:
    trainer = make_trainer(runner, warmup_updates=8, num_minibatches=4)
    assert [trainer.step().metrics["learning_rate"] for _ in range(3)] == pytest.approx([3 / 8e2, 7 / 8e2, 1e-2])


def test_going_on_takes_the_recipes_rates_and_not_the_checkpoints(runner: asyncio.Runner, tmp_path: Path) -> None:
    early = make_trainer(runner)
    early.step()
    early.save(tmp_path)
    late = make_trainer(runner, learning_rate=1e-3, betas=(0.5, 0.6), weight_decay=0.25)
    late.load(tmp_path)
    late.load_state_dict(early.state_dict())
    late.start_engine()
    assert late.step().metrics["learning_rate"] == 1e-3
    (group,) = late._optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.5, 0.6), 0.25)


class KeepsFirstGroup(Noise):
    """Leaves everything but the first group out of the loss."""

    keep: int = 1

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        kept = super().assign(groups[: self.keep])
        return kept + [[Credit.excluded(t) for t in group.trajectories] for group in groups[self.keep :]]


def test_minibatches_without_a_kept_token_are_passed_over(runner: asyncio.Runner) -> None:
    trainer = make_trainer(runner, credit=KeepsFirstGroup(), num_minibatches=12)
    before = weights(trainer)
    metrics = trainer.step().metrics
    assert trainer._schedule.last_epoch == 4  # the four trajectories of the first group
    assert not torch.equal(weights(trainer), before)
    assert metrics["credit/zero_advantage"] == pytest.approx(8 / 12)
    idle = make_trainer(runner, credit=KeepsFirstGroup(keep=0))
    before = weights(idle)
    assert idle.step().metrics["grad_norm"] == 0
    assert torch.equal(weights(idle), before)


class Overflow(Noise):
    """Advantages whose squares are not finite in float32."""

    def _credit(self, trajectory: Trajectory) -> Credit:
        return Credit.uniform(trajectory, 1e38)


def test_a_gradient_that_is_not_finite_is_never_applied(runner: asyncio.Runner) -> None:
    trainer = make_trainer(runner, credit=Overflow(), loss=LossConfig(aggregation="constant", constant_length=1))
    before = weights(trainer)
    with pytest.raises(TrainingError, match=r"step 1: the gradient is not finite.*train\.learning_rate"):
        trainer.step()
    assert torch.equal(weights(trainer), before)
