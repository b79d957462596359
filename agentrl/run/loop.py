"""The training loop: the events of a run, in their order.

The policy's version is the number of finished steps. The engine holds a copy of the weights, and each step syncs new
ones. All ranks run this loop: each collects its share of a step's groups, rank 0 credits all of them, and scatters the
update over the ranks. `examples/own_loop.py` is another loop, made of the same parts.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Event

import torch

from agentrl.credit import Credit, assign_credit
from agentrl.distributed.processes import all_gather, from_rank_zero, is_main, naming_absent_ranks, to_rank_zero
from agentrl.learn.batch import fraction_too_old, mask_stale
from agentrl.learn.interrupt import run_until
from agentrl.learn.metrics import process_metrics, rollout_metrics
from agentrl.learn.rewarding import kl_metrics, reward_groups, subtract_kl
from agentrl.report.folder import RunFolder
from agentrl.run.build import Parts, warn_of_move
from agentrl.run.checkpoint import save
from agentrl.run.evaluate import evaluation_metrics
from agentrl.run.record import OnProgress, Stopwatch
from agentrl.run.start import begin_or_resume
from agentrl.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Groups and credits that a step was trained on, and its metrics."""

    groups: list[TrajectoryGroup]
    """The groups of all ranks, ordered by group id, on rank 0; empty on the others."""
    credits: list[list[Credit]]
    """Credit of each trajectory of each group."""
    metrics: dict[str, float]


def train(
    parts: Parts, folder: RunFolder | None = None, *, on_progress: OnProgress = lambda *_: None
) -> tuple[RunFolder, list[dict[str, float]]]:
    """Train to the last step; return the run's folder and the metrics of every step.

    Args:
        parts: parts of the run.
        folder: folder of a run to resume; None: begin one in the recipe's `run_dir`.
        on_progress: called after each step.
    """
    recipe = parts.recipe
    with begin_or_resume(parts, folder, on_progress) as (record, finished_steps):
        for step in range(finished_steps + 1, recipe.train.steps + 1):
            is_last, every = step == recipe.train.steps, recipe.evaluation.every
            is_evaluated = is_last or (every > 0 and step % every == 0)
            is_saved = is_last or step % recipe.train.checkpoint_every == 0
            result = train_step(parts, step, proves_push=is_evaluated or is_saved)
            row = {"step": step, **result.metrics}
            if is_evaluated:
                row |= evaluation_metrics(parts)
            # First the record: a checkpoint never promises what is not on disk.
            row = record.add_step(row, result.groups, result.credits)
            if is_saved:
                save(parts, record.folder, step)
            on_progress("training", step, recipe.train.steps, row)
    return record.folder, record.folder.metrics()


def train_step(parts: Parts, step: int, *, proves_push: bool = False) -> StepResult:
    """Collect, learn and sync weights: the policy goes from version `step - 1` to version `step`.

    Args:
        parts: parts of the run.
        step: number of the step, from 1.
        proves_push: prove at once that the engine samples from the new weights. With `mode: sync`, the next step does too: all
            its tokens are sampled by these weights.

    Raises:
        TrainingError: also if another rank has ended or hangs.
    """
    rollout = parts.recipe.rollout
    clock = Stopwatch()
    busy_before_s = parts.engine.busy_s
    with naming_absent_ranks():
        is_replaying = parts.pool.is_replaying
        with parts.learner.state.sampling():
            own_groups = parts.runner.run(parts.pool.collect())
        clock.lap("collect_s")
        warn_of_move(parts, parts.recipe.player_id)
        update = partial(credit_and_update, parts, own_groups, version=step - 1, is_replaying=is_replaying, clock=clock)
        result = while_sampling(parts.runner, update) if rollout.samples_during_update else update()
        clock.lap()
        push_metrics = parts.weight_sync.push(step)
        if proves_push or not rollout.waits_for_all:
            parts.weight_sync.check_samples()
        clock.lap("push_s")
    metrics = result.metrics | push_metrics | {"time/loop_lag_s": parts.pool.loop_lag_s} | process_metrics()
    sampling_s, sampled = parts.engine.busy_s - busy_before_s, [] if is_replaying else result.groups
    metrics |= clock.metrics(sampled, sampling_s=sampling_s, is_async=rollout.samples_during_update)
    return replace(result, metrics=metrics)


def while_sampling(runner: asyncio.Runner, update: Callable[[], StepResult]) -> StepResult:
    """Update on another thread, while episodes continue on the event loop."""
    interrupted = Event()
    try:
        return runner.run(asyncio.to_thread(run_until, interrupted, update))
    except BaseException:
        interrupted.set()  # An interrupt leaves the thread behind, and the process would wait for its end.
        raise


def credit_and_update(
    parts: Parts,
    own_groups: list[TrajectoryGroup],
    *,
    version: int,
    is_replaying: bool,
    clock: Stopwatch,
) -> StepResult:
    """Gather the groups of all ranks, measure and credit them, and update the policy.

    Args:
        parts: parts of the run.
        own_groups: groups that this rank collected.
        version: policy version before the update.
        is_replaying: whether `own_groups` were collected before a kill: the engine may have other weights than those that
            sampled them.
        clock: times the parts of the step.
    """
    if (device := parts.learner.state.device).type == "cuda" and device.index is not None:  # one of several GPUs
        torch.cuda.set_device(device)  # a setting of each thread
    rollout = parts.recipe.rollout
    own_groups = reward_groups(own_groups, rollout.group_rewards, timeout_s=rollout.env_timeout_s)
    groups = sorted(to_rank_zero(own_groups), key=lambda group: group.group_id)
    everyones = all_gather([(is_replaying, dict(parts.pool.counts))])
    clock.lap()
    groups = parts.signals.measure(groups)
    clock.lap("signals_s")
    oldest = version - rollout.staleness_bound
    loss = parts.recipe.loss
    credited = subtract_kl(groups, coefficient=loss.kl_coefficient) if loss.has_kl_reward else groups
    credits = assign_credit(parts.credit, credited) if is_main() else []
    if rollout.stale == "mask":
        credits = mask_stale(groups, credits, oldest=oldest)
    clock.lap("credit_s")
    # The first minibatch is computed with the weights that sampled it: a difference means that the last weight sync failed.
    # With `keep_cache` some have keys and values of other weights; then the samples after each sync alone show it.
    is_mixed = rollout.keep_cache or any(replaying for replaying, _ in everyones)
    check = None if is_mixed else parts.weight_sync.check_agreement
    metrics = parts.learner.update(groups, credits, version=version, check_agreement=check)
    metrics |= parts.signals.fit(credited)  # the critic, if the scheme reads values
    clock.lap("update_s")
    metrics |= {f"pool/{name}": float(sum(counts[name] for _, counts in everyones)) for name in parts.pool.counts}
    too_old = {"staleness/too_old": fraction_too_old(groups, oldest=oldest)}
    divergence = kl_metrics(groups) if loss.has_kl_reward else {}
    metrics |= from_rank_zero(lambda: too_old | divergence | rollout_metrics(groups, credits))
    return StepResult(groups=groups, credits=credits, metrics=metrics)
