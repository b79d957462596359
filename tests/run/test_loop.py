"""The whole step on a tiny model: real environment, engine, credit, loss and optimizer."""

import asyncio
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
import pytest
import torch

from agentrl import Trajectory
from agentrl.credit import assign_credit
from agentrl.distributed.checkpoints import checkpoints
from agentrl.engine.batched import Request
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.engine.vllm.engine import VLLMConfig
from agentrl.errors import ConfigError, EngineError, TrainingError
from agentrl.learn.interrupt import _interrupted
from agentrl.learn.rewarding import kl_metrics, subtract_kl
from agentrl.report.folder import RunFolder
from agentrl.run import loop
from agentrl.run.build import Parts, build
from agentrl.run.checkpoint import checkpoint_at, load_checkpoint, save
from agentrl.run.record import Stopwatch
from agentrl.run.weight_sync import WeightSync
from tests.support.each import each
from tests.support.hugging_face import hugging_face_folder
from tests.support.interrupts import After, run_with
from tests.support.processes import in_process
from tests.support.run_files import repeatable
from tests.support.runs import Runs, Steps, recipe
from tests.support.threads import hang
from tests.support.trajectories import some_groups


def weights(parts: Parts) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in parts.learner.state.weights()])


@each("anchor", ["behavior", "recomputed"])
def test_first_minibatch_of_an_on_policy_batch_has_ratio_one_and_clips_nothing(runs: Runs, anchor: str) -> None:
    steps = runs.begin(loss={"anchor": anchor}, train={"num_minibatches": 3})
    for _ in range(3):
        metrics = steps.step().metrics
        assert metrics["first/ratio_deviation"] < 1e-4
        assert metrics["first/clipped_tokens"] == 0
        assert metrics["first/engine_difference"] < 1e-5
        assert metrics["staleness/max"] == 0
        assert metrics["clip/tokens"] > 0  # the later minibatches do move, and far: nothing above is true by chance
        assert metrics["ratio/spread"] > 1e-4


@pytest.mark.process
def test_two_runs_with_one_seed_repeat_bit_for_bit(runs: Runs) -> None:
    first, second = runs.begin(), runs.begin()
    for _ in range(3):
        assert repeatable(first.step().metrics) == repeatable(second.step().metrics)
    assert torch.equal(weights(first.parts), weights(second.parts))


@pytest.mark.process
def test_saved_and_loaded_equals_uninterrupted_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    train: dict[str, Any] = {"schedule": "cosine", "steps": 4, "weight_decay": 0.1}
    whole = runs.begin(train=train)
    expected = [repeatable(whole.step().metrics) for _ in range(4)]
    early = runs.begin(train=train)
    for _ in range(2):
        early.step()
    folder = RunFolder(tmp_path)
    save(early.parts, folder, early.finished)
    parts = runs.build(train=train)
    late = Steps(parts, finished=load_checkpoint(parts, checkpoints(folder.checkpoints)[-1]))
    assert [repeatable(late.step().metrics) for _ in range(2)] == expected[2:]
    assert torch.equal(weights(late.parts), weights(whole.parts))


@pytest.mark.slow
@pytest.mark.process
def test_the_kl_term_pulls_towards_the_reference(runs: Runs) -> None:
    distance = {}
    for coefficient in (1e-9, 100.0):
        parts = runs.build(loss={"kl_coefficient": coefficient})
        shifted = [(n, t + 0.05 if t.ndim > 1 else t) for n, t in parts.learner.state.weights()]
        parts.policy.model.load_state_dict(dict(shifted))
        steps = Steps(parts)
        found = [steps.step().metrics["kl/reference"] for _ in range(24)]
        assert found[0] > 1e-4  # the policy stands off the reference, under its own samples
        distance[coefficient] = np.mean(found[-12:]) / found[0]  # single ones go up and down
    assert distance[100.0] < 0.3 * distance[1e-9]


def test_mismatch_weights_are_logged_and_used(runs: Runs) -> None:
    plain = runs.begin(loss={"anchor": "recomputed"}).parts
    corrected = runs.begin(loss={"anchor": "recomputed", "mismatch": "truncate"}).parts
    groups = plain.runner.run(plain.pool.collect())
    skewed = [replace(g, trajectories=tuple(_skewed(t) for t in g.trajectories)) for g in groups]
    with pytest.raises(EngineError, match=r"train\.agreement"):  # engine log-probabilities that are plainly wrong
        loop.credit_and_update(plain, skewed, version=0, is_replaying=False, clock=Stopwatch())
    metrics = loop.credit_and_update(corrected, groups, version=0, is_replaying=False, clock=Stopwatch()).metrics
    assert metrics["mismatch/mean"] == pytest.approx(1.0, abs=1e-5)


def _skewed(trajectory: Trajectory) -> Trajectory:
    turns = [replace(t, behavior_logprobs=tuple(x - 0.1 for x in t.behavior_logprobs)) for t in trajectory.turns]
    return replace(trajectory, turns=tuple(turns))


class DeafEngine(TransformersEngine):
    """Takes weights and continues with its own."""

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights([], version)


class CoarseEngine(TransformersEngine):
    """Takes weights in a precision that is too coarse."""

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights([(n, (t * 4).round() / 4) for n, t in named_tensors], version)


@each(
    ("engine_class", "words"), [(DeafEngine, "do not reach its samples"), (CoarseEngine, r"train\.agreement: 0\.001")]
)
def test_an_engine_that_runs_other_weights_is_found_out_at_the_start(
    runs: Runs, engine_class: type[TransformersEngine], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        runs.begin(engine_class=engine_class)


class LossyEngine(TransformersEngine):
    """Takes weights and no adapters."""

    async def load_adapters(self, changes: Any, base: Any, version: int) -> None:
        await super().load_adapters([], base, version)


@pytest.mark.slow
@pytest.mark.process
def test_an_engine_that_drops_adapters_is_found_out_at_the_start(tmp_path: Path) -> None:
    in_process(partial(begin_with_adapters, tmp_path))  # accelerate's precision is that of a process


def begin_with_adapters(tmp_path: Path) -> None:
    model = {"name_or_path": hugging_face_folder(tmp_path / "model", rewrites=False), "lora": {"rank": 2}}
    train = {"precision": "bfloat16", "agreement": 0.2}
    with build(recipe(tmp_path, model=model, train=train)) as parts:
        parts.weight_sync.verify_and_push(0)
        parts.engine.__class__ = LossyEngine
        with pytest.raises(EngineError, match="do not reach its samples"):
            parts.weight_sync.verify_and_push(0)


@each("sharpness", [0.01, 1.0, 1000.0])
def test_the_proof_holds_however_sure_a_policy_is(runs: Runs, sharpness: float) -> None:
    parts = runs.build()
    norm = dict(parts.policy.model.named_parameters())["model.norm.weight"]
    norm.data *= sharpness
    assert parts.weight_sync.verify_and_push(0) < 1e-3


def test_a_mismatch_names_the_fields_that_may_cause_it(runs: Runs) -> None:
    config = VLLMConfig(vllm={"kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.5})
    parts = runs.build()
    sync = WeightSync(
        parts.pool, parts.learner, runner=parts.runner, seed=0, config=parts.recipe.train, overrides=config.overrides
    )
    with pytest.raises(EngineError, match=r"train\.agreement: 0\.001\. engine\.vllm\.kv_cache_dtype: fp8 may cause it"):
        sync.check_agreement(0.2)
    with pytest.raises(EngineError, match=r"The engine runs another model than the trainer"):
        parts.weight_sync.check_agreement(0.2)


class TiredEngine(TransformersEngine):
    """Takes the weights of the start and of the first two steps, and then continues with its own."""

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights(named_tensors if version < 3 else [], version)


@pytest.mark.slow
@pytest.mark.process
@each(("mode", "step"), [("sync", 4), ("partial", 3), ("async", 3)])
def test_an_engine_that_misses_a_later_push_is_found_out_at_once(
    runs: Runs, mode: Literal["sync", "partial", "async"], step: int
) -> None:
    steps = runs.begin(rollout={"mode": mode}, engine_class=TiredEngine)
    for _ in range(step - 1):
        steps.step()
    with pytest.raises(EngineError, match=r"train\.agreement: 0\.001"):  # before another token is trained on
        steps.step()


def test_in_sync_no_checkpoint_is_written_after_a_push_that_missed(runs: Runs, tmp_path: Path) -> None:
    train, evaluation = {"steps": 3, "checkpoint_every": 2}, {"num_tasks": 1}
    parts = runs.build(engine_class=TiredEngine, run_dir=tmp_path / "run", train=train, evaluation=evaluation)
    with pytest.raises(EngineError, match=r"train\.agreement: 0\.001"):
        loop.train(parts)
    folder = RunFolder(tmp_path / "run")
    assert [path.name for path in checkpoints(folder.checkpoints)] == ["step-000000", "step-000002"]
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2]


def test_the_checkpoint_with_the_best_evaluation_is_kept_beside_the_newest(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = iter((0.1, 0.9, 0.5, 0.2))
    monkeypatch.setattr(loop, "evaluation_metrics", lambda _: {"eval/episodes": 1.0, "eval/reward": next(rewards)})
    train = {"steps": 4, "checkpoint_every": 1, "keep_last": 1}
    parts = runs.build(run_dir=tmp_path / "run", train=train, evaluation={"every": 1, "num_tasks": 1})
    folder, _ = loop.train(parts)
    assert [path.name for path in checkpoints(folder.checkpoints)] == ["step-000002", "step-000004"]
    assert checkpoint_at(folder, 2).name == "step-000002"
    assert checkpoint_at(folder, None).name == "step-000004"
    with pytest.raises(ConfigError, match="has no checkpoint of step 3; it has 2, 4"):
        checkpoint_at(folder, 3)


def test_a_checkpoint_before_any_step_holds_no_moments(runs: Runs, tmp_path: Path) -> None:
    parts = runs.build(run_dir=tmp_path / "run", train={"steps": 1}, evaluation={"num_tasks": 1})
    first, last = (path / "optimizer.pt" for path in checkpoints(loop.train(parts)[0].checkpoints))
    assert first.stat().st_size < 10_000 < last.stat().st_size


class StuckEngine(TransformersEngine):
    """Decodes nothing more from the second version on."""

    async def _advance(self, waiting: list[Request]) -> None:
        if self.version >= 2:
            await asyncio.sleep(60)
        await super()._advance(waiting)


@pytest.mark.slow
def test_an_engine_that_hangs_after_a_push_has_a_deadline(runs: Runs) -> None:
    steps = runs.begin(rollout={"mode": "partial", "engine_timeout_s": 5.0}, engine_class=StuckEngine)
    steps.step()
    with pytest.raises(EngineError, match=r"did not answer its self-proof within rollout\.engine_timeout_s: 5"):
        steps.step()


def test_an_update_on_another_thread_is_cancelled_when_the_loop_ends(runs: Runs) -> None:
    events: list[Event | None] = []

    def update() -> loop.StepResult:
        events.append(_interrupted.get())
        raise KeyboardInterrupt

    with asyncio.Runner() as runner, pytest.raises(KeyboardInterrupt):
        loop.while_sampling(runner, update)
    (event,) = events
    assert event is not None
    assert event.is_set()
    assert _interrupted.get() is None
    parts = runs.begin().parts
    groups = parts.runner.run(parts.pool.collect())
    before = weights(parts)
    credit_and_update = partial(loop.credit_and_update, parts, groups, version=0, is_replaying=False, clock=Stopwatch())
    with pytest.raises(TrainingError, match="the update was interrupted"):
        run_with(event, credit_and_update)
    assert torch.equal(weights(parts), before)


def sleepy(num_tokens: list[int]) -> list[float]:
    hang()
    return []


def test_an_interrupt_ends_an_update_whose_group_reward_hangs(runs: Runs) -> None:
    rollout = {"group_rewards": [{"reward": "tests.run.test_loop:sleepy"}], "env_timeout_s": 600}
    parts = runs.begin(rollout=rollout).parts
    groups = parts.runner.run(parts.pool.collect())
    update = partial(loop.credit_and_update, parts, groups, version=0, is_replaying=False, clock=Stopwatch())
    begin = time.monotonic()
    with pytest.raises(TrainingError, match="the update was interrupted"):
        run_with(After(3), update)
    assert time.monotonic() - begin < 5  # and waits for nothing: EnvThread's `with` takes up to ten seconds


@pytest.mark.slow
@pytest.mark.process
@each("rule", ["wait", "mask", "keep"])
def test_the_recipe_says_what_becomes_of_tokens_that_are_too_old(rule: str, runs: Runs) -> None:
    rollout = {
        "mode": "partial",
        "max_staleness": 1,
        "stale": rule,
        "num_groups": 2,
        "group_size": 2,
        "max_live_episodes": 2,  # so that a group waits for a long time until all of it is played
        "max_turns": 6,
        "max_turn_tokens": 16,
        "max_episode_tokens": 64,
    }
    steps = runs.begin(rollout=rollout, loss={"unit": "version"}, train={"num_minibatches": 1})
    # Two steps' groups are complete, and the policy is three versions ahead of them: as after a long wait.
    for _ in range(2):
        steps.step()
    steps.finished += 3
    result = steps.step()
    trained = [v for g in result.groups for t in g.trajectories for turn in t.turns for v in turn.versions]
    kept = np.concatenate([credit.keep_T for credits in result.credits for credit in credits])
    oldest = steps.finished - 1 - 1
    assert min(trained) < oldest
    metrics = result.metrics
    assert metrics["staleness/too_old"] == pytest.approx(np.mean(np.array(trained) < oldest))
    if rule == "mask":
        assert kept.tolist() == [version >= oldest for version in trained]
        assert metrics.get("staleness/max", 0) <= 1  # not told where no token is left
    else:
        assert kept.all()
        assert metrics["staleness/max"] > 1


def test_what_was_sampled_before_a_kill_is_no_throughput_of_the_step_that_is_given_it() -> None:
    clock = Stopwatch()
    clock.lap("collect_s")
    names = {
        bool(groups): clock.metrics(groups, sampling_s=0.0, is_async=False).keys() for groups in ([], some_groups([2]))
    }
    assert names[True] - names[False] == {"time/sampled_tokens_per_s", "time/tokens_per_s"}


def test_a_step_credits_what_is_left_of_the_rewards_and_shows_the_environments(runs: Runs) -> None:
    k1: dict[str, Any] = {"kl_coefficient": 0.5, "kl_estimator": "k1_reward"}
    parts = runs.build(loss=k1, credit={"scheme": "uniform", "normalize": "none"})
    shifted = [(n, t + 0.05 if t.ndim > 1 else t) for n, t in parts.learner.state.weights()]
    parts.policy.model.load_state_dict(dict(shifted))
    parts.weight_sync.verify_and_push(0)
    groups = parts.runner.run(parts.pool.collect())
    result = loop.credit_and_update(parts, groups, version=0, is_replaying=False, clock=Stopwatch())
    rewards = {t.trajectory_id: t.reward for group in groups for t in group.trajectories}
    assert {t.trajectory_id: t.reward for group in result.groups for t in group.trajectories} == rewards
    credits = assign_credit(parts.credit, subtract_kl(result.groups, coefficient=0.5))
    for found, expected in zip(chain(*result.credits), chain(*credits), strict=True):
        assert np.array_equal(found.advantages_T, expected.advantages_T)
    assert result.metrics["kl/reference"] == kl_metrics(result.groups)["kl/reference"]
    assert abs(result.metrics["kl/reference"]) > 1e-4
    assert result.metrics["reward/mean"] == np.mean(list(rewards.values()))
