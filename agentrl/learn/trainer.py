"""One step of learning: collect, credit, update, hand the weights back to the engine."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from torch import Tensor

from agentrl.credit import Credit, CreditScheme, assign_credit
from agentrl.distributed.processes import all_gather, from_rank_zero, is_main, naming_absent_ranks, num_processes
from agentrl.engine import Engine
from agentrl.errors import ConfigError, EngineError
from agentrl.learn.learner import Learner
from agentrl.learn.metrics import process_metrics, rollout_metrics
from agentrl.learn.signals.signals import Signals
from agentrl.learn.staleness import mask_stale, share_too_old
from agentrl.rollout import RolloutConfig, RolloutPool
from agentrl.types import Completion, Sampling, TrajectoryGroup

_CRITIC = "critic.pt"


class _Learned(NamedTuple):
    groups: list[TrajectoryGroup]
    credits: list[list[Credit]]
    counts: dict[str, int]
    """Of the pools of all processes."""
    metrics: dict[str, float]


class TrainerState(BaseModel):
    """Where training stands, beside weights and moments."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    finished_steps: NonNegativeInt
    num_processes: PositiveInt
    """That train the run together."""
    pool: dict[str, Any]
    """State of this process's stream of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    metrics: dict[str, float]
    groups: list[TrajectoryGroup]
    credits: list[list[Credit]]
    """Credit of each trajectory of each group."""


class Trainer:
    """Trains a policy. The engine holds its own copy of the weights; each step pushes new ones.

    The policy's version is the number of finished steps.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        engine: Engine,
        pool: RolloutPool,
        credit: CreditScheme,
        signals: Signals | None = None,
        agreement: float,
        rollout: RolloutConfig,
        seed: int,
        runner: asyncio.Runner,
    ) -> None:
        """Take the parts.

        Args:
            learner: holds the weights and updates them.
            engine: samples, from weights that are pushed to it.
            pool: plays episodes on the engine.
            credit: turns rewards into advantages.
            signals: measures what `credit` reads beyond rewards and keys. None: it reads nothing more.
            agreement: largest mean difference allowed between the engine's log-probabilities and the learner's, in nats.
            rollout: how the pool of this process plays; `num_groups: 0`: it does not.
            seed: of the engine's self-proof.
            runner: event loop on which pool and engine live.
        """
        self._learner, self._state, self._engine, self._pool = learner, learner.state, engine, pool
        self._credit, self._signals, self._agreement = credit, signals, agreement
        self._critic = None if signals is None else signals.critic
        self._rollout, self._seed, self._runner = rollout, seed, runner
        self._cancelled = threading.Event()
        self.finished_steps = 0

    def start_engine(self) -> float:
        """Push the weights and prove that the engine samples from them.

        The same prompt must get the trainer's log-probabilities, and others once the weights are perturbed.

        Returns:
            Mean difference of log-probabilities under the same weights, in nats.

        Raises:
            EngineError: with what was found and the bound.
        """
        bound, weights = self._agreement, self._state.weights
        self._push((name, tensor * 1.1 if tensor.is_floating_point() else tensor) for name, tensor in weights())
        perturbed = min(self._disagreements())
        self._push(weights())
        found = max(self._disagreements())
        if not perturbed > bound:
            raise EngineError(
                "weights pushed to the engine do not reach its samples: after a perturbation its log-probabilities still "
                f"agree with the trainer's to {perturbed:.2e} nats (train.agreement: {bound:g})"
            )
        self._check_agreement(found)
        return found

    def step(self) -> StepResult:
        """Collect, credit, update and push once.

        Raises:
            TrainingError: also where another process has ended or hangs.
        """
        with naming_absent_ranks():
            return self._step()

    def _step(self) -> StepResult:
        begin, busy_s = time.perf_counter(), self._engine.busy_s
        is_async, is_replaying = self._rollout.samples_during_update, self._pool.is_replaying
        share = self._runner.run(self._pool.collect())
        collected = time.perf_counter()
        learn = partial(self._learn, share, is_replaying=is_replaying)
        groups, credits, counts, metrics = self._meanwhile(learn) if is_async else learn()
        self.finished_steps += 1
        learned = time.perf_counter()
        self._push(self._state.weights())
        if not self._rollout.waits_for_all:  # else the first minibatch of the next step proves it
            self._check_agreement(max(self._disagreements()))
        sampling_s = self._engine.busy_s - busy_s
        done = time.perf_counter()
        sampled_s = (done if is_async else collected) - begin
        everyone = [t for group in groups for t in group.trajectories]
        sampled = sum(t.num_action_tokens + t.metrics.get("branch_tokens", 0.0) for t in everyone)
        metrics |= rollout_metrics(groups, credits)
        metrics |= {f"pool/{name}": float(count) for name, count in counts.items()}
        metrics |= {
            "time/collect_s": collected - begin,
            "time/sampling_s": sampling_s,
            "time/environment_s": max(0.0, collected - begin - sampling_s),
            "time/push_s": done - learned,
            "time/step_s": done - begin,
            "time/loop_lag_s": self._pool.loop_lag_s,
            "time/sampled_tokens_per_s": sampled / sampled_s,
            "time/tokens_per_s": sampled / (done - begin),
        }
        return StepResult(step=self.finished_steps, metrics=metrics | process_metrics(), groups=groups, credits=credits)

    def _meanwhile(self, learn: Callable[[], _Learned]) -> _Learned:
        """Learn on another thread; the episodes go on meanwhile."""
        try:
            return self._runner.run(asyncio.to_thread(learn))
        except BaseException:
            # An interrupt leaves the thread behind, and the process would wait for its end.
            self._cancelled.set()
            raise

    def _learn(self, share: list[TrajectoryGroup], *, is_replaying: bool) -> _Learned:
        """Put together what the processes collected; measure, credit and update."""
        if self._state.device.type == "cuda":
            torch.cuda.set_device(self._state.device)  # which each thread has of its own
        parts = all_gather([(share, is_replaying, dict(self._pool.counts))])
        groups = sorted((group for part, *_ in parts for group in part), key=lambda group: group.group_id)
        is_replaying = any(replaying for _, replaying, _ in parts)
        counts = {name: sum(of_part[name] for *_, of_part in parts) for name in self._pool.counts}
        begin, version, rollout = time.perf_counter(), self.finished_steps, self._rollout
        if self._signals is not None:
            groups = self._signals.measure(groups)
        measured = time.perf_counter()
        credits = from_rank_zero(lambda: assign_credit(self._credit, groups))  # all plan the same passes by them
        metrics = {"staleness/too_old": share_too_old(groups, oldest=version - rollout.staleness_bound)}
        if rollout.stale == "mask":
            credits = mask_stale(groups, credits, oldest=version - rollout.staleness_bound)
        credited = time.perf_counter()
        # Sampled by the very weights that are updated first: each step proves the last push.
        check = None if is_replaying else self._check_agreement
        metrics |= self._learner.update(
            groups, credits, version=version, check_agreement=check, cancelled=self._cancelled
        )
        if self._signals is not None:
            metrics |= self._signals.learn(groups)
        metrics |= {
            "time/signals_s": measured - begin,
            "time/credit_s": credited - measured,
            "time/update_s": time.perf_counter() - credited,
        }
        return _Learned(groups, credits, counts, metrics)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random states into `folder`; called on every process."""
        self._state.save(folder)
        if self._critic is not None and is_main():
            torch.save(self._critic.state_dict(), folder / _CRITIC)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; `start_engine` hands the weights on.

        Raises:
            ConfigError: for a critic where the run had none.
        """
        self._state.load(folder)
        if self._critic is not None:
            if not (folder / _CRITIC).is_file():
                raise ConfigError(
                    "the credit scheme reads a critic, and this run trained none; begin a new run with it"
                )
            self._critic.load_state_dict(
                torch.load(folder / _CRITIC, map_location=self._state.device, weights_only=True)
            )

    def state_dict(self) -> TrainerState:
        """Return the counters that belong to a checkpoint, those of this process."""
        return TrainerState(
            finished_steps=self.finished_steps, num_processes=num_processes(), pool=self._pool.state_dict()
        )

    def load_state_dict(self, state: TrainerState) -> None:
        """Go on from `state_dict`."""
        self.finished_steps = state.finished_steps
        self._pool.load_state_dict(state.pool)

    def _push(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Hand weights to the engine, which is paused meanwhile."""

        async def push() -> None:
            await self._pool.pause()
            await self._engine.load_weights(weights, self.finished_steps)

        self._runner.run(push())

    def _disagreements(self) -> list[float]:
        """Sample a few tokens from each process's engine; return the mean difference to the trainer over them, in nats."""
        vocab_size = self._state.policy.model.config.get_text_config().vocab_size
        prompt = np.random.default_rng(self._seed).integers(vocab_size, size=16).tolist()
        sampling = Sampling(max_tokens=16, stop_token_ids=(), temperature=self._rollout.temperature, seed=self._seed)

        async def sample() -> Completion:
            timeout_s = self._rollout.engine_timeout_s
            await self._pool.resume()
            try:
                async with asyncio.timeout(timeout_s):
                    with self._engine.conversation("self-proof"):
                        completion = await self._engine.generate(prompt, sampling, "self-proof")
            except TimeoutError:
                raise EngineError(
                    f"the engine did not answer its self-proof within rollout.engine_timeout_s: {timeout_s:g}"
                ) from None
            if (
                not self._rollout.samples_during_update or num_processes() > 1
            ):  # no deadline shall pass while others are waited for
                await self._pool.pause()
            return completion

        found = []
        for completion in all_gather([self._runner.run(sample())] if self._rollout.num_groups else []):
            logprobs_T = self._learner.logprobs(prompt, completion.token_ids)
            found.append(float((logprobs_T.cpu() - torch.tensor(completion.logprobs)).abs().mean()))
        if self._rollout.samples_during_update and num_processes() > 1:
            self._runner.run(self._pool.resume())
        return found

    def _check_agreement(self, found: float) -> None:
        bound = self._agreement
        if not found <= bound:  # nor where it is not a number
            raise EngineError(
                f"the engine's log-probabilities differ from the trainer's by {found:.2e} nats on average under the same "
                f"weights, more than train.agreement: {bound:g}. In half precision raise it; otherwise the "
                "engine runs another model than the trainer"
            )
