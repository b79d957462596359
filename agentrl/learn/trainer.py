"""One step of learning: collect, credit, update, hand the weights back to the engine.

`T` trained tokens of a minibatch, `U` ratio units.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from transformers import get_scheduler

from agentrl.credit import Credit, CreditScheme, assign_credit
from agentrl.engine import Engine
from agentrl.errors import ConfigError, EngineError, TrainingError
from agentrl.learn.batch import MicroBatch, make_batch, micro_batches
from agentrl.learn.loss import LossConfig, kl_loss, mismatch_weights, policy_loss
from agentrl.learn.metrics import Tally, first_metrics, process_metrics, rollout_metrics, update_metrics
from agentrl.learn.model import Policy
from agentrl.learn.signals import Signals
from agentrl.learn.staleness import mask_stale, share_too_old
from agentrl.rollout import RolloutConfig, RolloutPool, derive_seed
from agentrl.types import Completion, Sampling, Trajectory, TrajectoryGroup

_CRITIC = "critic.pt"

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(BaseModel):
    """The optimizer and what it is fed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: PositiveInt = 100
    """Rounds of collecting and updating."""
    num_minibatches: PositiveInt = 4
    """Optimizer updates for each step's rollouts (the GSPO paper's four)."""
    max_tokens_per_micro_batch: PositiveInt = 16_384
    """Most tokens, padding included, in one forward and backward pass."""
    learning_rate: PositiveFloat = 3e-4
    """Step size of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after its warm-up."""
    warmup_updates: NonNegativeInt = 0
    """Updates over which the learning rate rises from 0."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of Adam's running means of the gradient and of its square."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: autocast over float32 weights."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto`: a GPU where there is one."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints; the last step always has one."""
    keep_last: PositiveInt = 2
    """Checkpoints kept."""
    agreement: PositiveFloat | None = None
    """Largest mean difference allowed between the engine's log-probabilities and the trainer's under the same weights, in
    nats. None: follows the precision (float32 1e-3, bfloat16 0.05)."""

    def agreement_bound(self) -> float:
        """Return `agreement`, the precision's default where it is None."""
        return self.agreement or {"float32": 1e-3, "bfloat16": 0.05}[self.precision]


class _Learned(NamedTuple):
    groups: list[TrajectoryGroup]
    credits: list[list[Credit]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    metrics: dict[str, float]
    groups: list[TrajectoryGroup]
    credits: list[list[Credit]]
    """Credit of each trajectory of each group."""


class Trainer:
    """Trains a policy on one device. The engine holds its own copy of the weights; each step pushes new ones.

    The policy's version is the number of finished steps.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        policy: Policy,
        engine: Engine,
        pool: RolloutPool,
        credit: CreditScheme,
        signals: Signals | None = None,
        loss: LossConfig,
        config: TrainConfig,
        rollout: RolloutConfig,
        seed: int,
        runner: asyncio.Runner,
    ) -> None:
        """Take the parts.

        Args:
            accelerator: prepared with the recipe's precision and device.
            policy: the weights to train.
            engine: samples, from weights that are pushed to it.
            pool: plays episodes on the engine.
            credit: turns rewards into advantages.
            signals: measures what `credit` reads beyond rewards and keys. None: it reads nothing more.
            loss: ratio, clip and aggregation.
            config: optimizer and budgets.
            rollout: how the pool plays.
            seed: order of trajectories over minibatches.
            runner: event loop on which pool and engine live.
        """
        self._accelerator, self._engine, self._pool = accelerator, engine, pool
        self._credit, self._signals, self._loss, self._config = credit, signals, loss, config
        self._critic = None if signals is None else signals.critic
        self._rollout, self._temperature, self._seed, self._runner = rollout, rollout.temperature, seed, runner
        optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._policy, self._optimizer = accelerator.prepare(policy, optimizer)
        # Not prepared: accelerate would advance it once for each process.
        self._schedule = get_scheduler(
            "constant_with_warmup" if config.schedule == "constant" else config.schedule,
            self._optimizer,
            num_warmup_steps=config.warmup_updates,
            num_training_steps=config.steps * config.num_minibatches,
        )
        accelerator.register_for_checkpointing(self._schedule)
        self._reference: Policy | None = None
        self._is_given_up = False
        self.finished_steps = 0

    @property
    def reference(self) -> Policy | None:
        """The policy with which the run began: the KL target, and what a credit scheme may read; never trained."""
        return self._reference

    @reference.setter
    def reference(self, policy: Policy) -> None:
        self._reference = policy.to(self._accelerator.device).eval().requires_grad_(False)
        if self._signals is not None:
            self._signals.reference = self._reference

    def start_engine(self) -> float:
        """Push the weights and prove that the engine samples from them.

        The same prompt must get the trainer's log-probabilities, and others once the weights are perturbed.

        Returns:
            Mean difference of log-probabilities under the same weights, in nats.

        Raises:
            EngineError: with what was found and the bound.
        """
        bound = self._config.agreement_bound()
        moved = [(name, tensor * 1.1 if tensor.is_floating_point() else tensor) for name, tensor in self._weights()]
        self._push(moved)
        perturbed = self._disagreement()
        self._push(self._weights())
        found = self._disagreement()
        if not perturbed > bound:
            raise EngineError(
                "weights pushed to the engine do not reach its samples: after a perturbation its log-probabilities still "
                f"agree with the trainer's to {perturbed:.2e} nats (train.agreement: {bound:g})"
            )
        self._check_agreement(found)
        return found

    def step(self) -> StepResult:
        """Collect, credit, update and push once."""
        begin, busy_s = time.perf_counter(), self._engine.busy_s
        is_async, is_replaying = self._rollout.mode == "async", self._pool.is_replaying
        groups = self._runner.run(self._pool.collect())
        collected = time.perf_counter()
        learn = partial(self._learn, groups, is_replaying=is_replaying)
        groups, credits, metrics = self._meanwhile(learn) if is_async else learn()
        self.finished_steps += 1
        learned = time.perf_counter()
        self._push(self._weights())
        if self._rollout.mode != "sync":  # else the first minibatch of the next step proves it
            self._check_agreement(self._disagreement())
        sampling_s = self._engine.busy_s - busy_s
        done = time.perf_counter()
        sampled_s = (done if is_async else collected) - begin
        everyone = [t for group in groups for t in group.trajectories]
        sampled = sum(t.num_action_tokens + t.metrics.get("branch_tokens", 0.0) for t in everyone)
        metrics |= rollout_metrics(groups, credits)
        metrics |= {f"pool/{name}": float(count) for name, count in self._pool.counts.items()}
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
            self._is_given_up = True  # an interrupt leaves the thread behind, and the process would wait for its end
            raise

    def _learn(self, groups: list[TrajectoryGroup], *, is_replaying: bool) -> _Learned:
        """Measure, credit and update."""
        begin, version, rollout = time.perf_counter(), self.finished_steps, self._rollout
        if self._signals is not None:
            groups = self._signals.measure(groups)
        measured = time.perf_counter()
        credits = assign_credit(self._credit, groups)
        metrics = {"staleness/too_old": share_too_old(groups, oldest=version - rollout.max_staleness)}
        if rollout.stale == "mask":
            credits = mask_stale(groups, credits, oldest=version - rollout.max_staleness)
        credited = time.perf_counter()
        metrics |= self._update(groups, credits, is_replaying=is_replaying)
        if self._signals is not None:
            metrics |= self._signals.learn(groups)
        metrics |= {
            "time/signals_s": measured - begin,
            "time/credit_s": credited - measured,
            "time/update_s": time.perf_counter() - credited,
        }
        return _Learned(groups, credits, metrics)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random states into `folder`."""
        self._accelerator.save_state(str(folder))
        if self._critic is not None:
            torch.save(self._critic.state_dict(), folder / _CRITIC)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; `start_engine` hands the weights on. Rates and betas are those of the recipe.

        Raises:
            ConfigError: for a critic where the run had none.
        """
        self._accelerator.load_state(str(folder))
        if self._critic is not None:
            if not (folder / _CRITIC).is_file():
                raise ConfigError(
                    "the credit scheme reads a critic, and this run trained none; begin a new run with it"
                )
            self._critic.load_state_dict(torch.load(folder / _CRITIC, map_location=self._accelerator.device))
        config, schedule = self._config, self._schedule
        schedule.base_lrs = [config.learning_rate for _ in schedule.base_lrs]
        for group, factor in zip(self._optimizer.param_groups, schedule.lr_lambdas, strict=True):
            group["initial_lr"] = config.learning_rate
            group["lr"] = config.learning_rate * factor(schedule.last_epoch)
            group["betas"], group["weight_decay"] = config.betas, config.weight_decay
        schedule._last_lr = [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that belong to a checkpoint."""
        return {"finished_steps": self.finished_steps, "pool": self._pool.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.finished_steps = state["finished_steps"]
        self._pool.load_state_dict(state["pool"])

    def _weights(self) -> list[tuple[str, Tensor]]:
        model = self._accelerator.unwrap_model(self._policy).model
        return [(name, tensor.detach()) for name, tensor in model.state_dict().items()]

    def _push(self, weights: list[tuple[str, Tensor]]) -> None:
        """Hand weights to the engine, which is paused meanwhile."""

        async def push() -> None:
            await self._pool.hold()
            await self._engine.load_weights(weights, self.finished_steps)

        self._runner.run(push())

    def _disagreement(self) -> float:
        """Sample a few tokens; return the mean difference of engine and trainer over them, in nats."""
        vocab_size = self._accelerator.unwrap_model(self._policy).model.config.vocab_size
        prompt = np.random.default_rng(self._seed).integers(vocab_size, size=16).tolist()
        sampling = Sampling(max_tokens=16, stop_token_ids=(), temperature=self._temperature, seed=self._seed)

        async def sample() -> Completion:
            timeout_s = self._rollout.engine_timeout_s
            await self._pool.go_on()
            try:
                async with asyncio.timeout(timeout_s):
                    with self._engine.conversation("self-proof"):
                        completion = await self._engine.generate(prompt, sampling, "self-proof")
            except TimeoutError:
                raise EngineError(
                    f"the engine did not answer its self-proof within rollout.engine_timeout_s: {timeout_s:g}"
                ) from None
            if self._rollout.mode != "async":
                await self._pool.hold()
            return completion

        completion = self._runner.run(sample())
        device, num = self._accelerator.device, len(completion.token_ids)
        ids_BL = torch.tensor([[*prompt, *completion.token_ids]], device=device)
        with torch.no_grad():
            logprobs_T, _ = self._policy(
                ids_BL[:, :-1],
                torch.zeros(num, dtype=torch.long, device=device),
                torch.arange(len(prompt) - 1, len(prompt) - 1 + num, device=device),
                ids_BL[0, len(prompt) :],
                self._temperature,
            )
        return float((logprobs_T - torch.tensor(completion.logprobs, device=device)).abs().mean())

    def _check_agreement(self, found: float) -> None:
        bound = self._config.agreement_bound()
        if not found <= bound:  # nor where it is not a number
            raise EngineError(
                f"the engine's log-probabilities differ from the trainer's by {found:.2e} nats on average under the same "
                f"weights, more than train.agreement: {bound:g}. In half precision raise it; otherwise the "
                "engine runs another model than the trainer"
            )

    def _update(
        self, groups: Sequence[TrajectoryGroup], credits: list[list[Credit]], *, is_replaying: bool = False
    ) -> dict[str, float]:
        """Go once over the step's trajectories, in minibatches drawn at random."""
        pairs = [
            (trajectory, credit)
            for group, of_group in zip(groups, credits, strict=True)
            for trajectory, credit in zip(group.trajectories, of_group, strict=True)
            if not trajectory.failed
        ]
        rng = np.random.default_rng(derive_seed(self._seed, "minibatches", self.finished_steps))
        order = rng.permutation(len(pairs))
        minibatches = [
            [pairs[i] for i in part] for part in np.array_split(order, self._config.num_minibatches) if len(part)
        ]
        plans = [
            plan for minibatch in minibatches if (plan := self._plan(minibatch))
        ]  # credit may keep no token of one
        anchors = self._recompute(plans) if self._loss.anchor == "recomputed" else None
        self._policy.train()
        tallies = []
        for index, plan in enumerate(plans):
            tally = Tally()
            for number, micro in enumerate(plan):
                if self._is_given_up:
                    raise TrainingError("the update was interrupted")
                proximal_T = None if anchors is None else anchors[index][number]
                loss = self._loss_of(micro, proximal_T, tally=tally)
                self._accelerator.backward(loss)
            tally.grad_norm = float(
                self._accelerator.clip_grad_norm_(self._policy.parameters(), self._config.max_grad_norm)
            )
            tally.learning_rate = self._schedule.get_last_lr()[0]
            is_current = not (self.finished_steps - tally.column("version_T")).any()
            if index == 0 and is_current and not is_replaying:
                # Sampled by these very weights: each step proves the last push.
                self._check_agreement(float(np.abs(tally.column("engine_difference_T")).mean()))
            if not math.isfinite(tally.grad_norm):
                raise TrainingError(
                    f"step {self.finished_steps + 1}: the gradient is not finite. The last checkpoint is whole: lower "
                    "train.learning_rate and go on from it"
                )
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            tallies.append(tally)
        tallies = tallies or [Tally()]
        return update_metrics(tallies) | first_metrics(tallies[0], current_version=self.finished_steps)

    def _plan(self, minibatch: Sequence[tuple[Trajectory, Credit]]) -> list[MicroBatch]:
        loss = self._loss
        batch = make_batch(
            [trajectory for trajectory, _ in minibatch],
            [credit for _, credit in minibatch],
            unit=loss.unit,
            aggregation=loss.aggregation,
            constant_length=loss.constant_length,
        )
        budget = self._config.max_tokens_per_micro_batch
        skip_idle = self._loss.kl_coefficient == 0
        return list(micro_batches(batch, max_tokens=budget, device=self._accelerator.device, skip_idle=skip_idle))

    def _recompute(self, plans: list[list[MicroBatch]]) -> list[list[Tensor | None]]:
        """Return log-probabilities before the first update, by the same plan and precision as the training pass.

        None for the first minibatch: there the policy itself is the anchor, exactly, whatever the noise of a second pass.
        """
        self._policy.train()
        anchors: list[list[Tensor | None]] = [[None for _ in plan] for plan in plans[:1]]
        with torch.no_grad():
            anchors.extend([self._forward(self._policy, micro)[0] for micro in plan] for plan in plans[1:])
        return anchors

    def _forward(self, policy: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        logprobs_T, entropy_T = policy(
            micro.input_ids_BL, micro.row_T, micro.position_T, micro.target_T, self._temperature
        )
        return logprobs_T, entropy_T

    def _loss_of(self, micro: MicroBatch, proximal_T: Tensor | None, *, tally: Tally) -> Tensor:
        """Return the micro-batch's share of the loss; `proximal_T` are recomputed log-probabilities, the anchor if given."""
        settings = self._loss
        logprobs_T, entropy_T = self._forward(self._policy, micro)
        weight_T = micro.weight_T
        anchor_T = micro.behavior_T
        if settings.anchor == "recomputed":
            anchor_T = logprobs_T.detach() if proximal_T is None else proximal_T
        if settings.mismatch != "off":
            mismatch = mismatch_weights(
                anchor_T, micro.behavior_T, micro.unit_T, mode=settings.mismatch, limit=settings.mismatch_limit
            )
            weight_T = weight_T * mismatch.weight_T
            tally.add(mismatch_U=mismatch.raw_U, limited_U=mismatch.limited_U)
        clip_low, clip_high = settings.clip_range()
        result = policy_loss(
            logprobs_T,
            anchor_logprobs_T=anchor_T,
            advantages_T=micro.advantage_T,
            unit_T=micro.unit_T,
            weight_T=weight_T,
            clip_low=clip_low,
            clip_high=clip_high,
        )
        loss = result.loss
        if self._reference is not None and settings.kl_coefficient > 0:
            with torch.no_grad():
                reference_T, _ = self._forward(self._reference, micro)
            loss = loss + kl_loss(
                logprobs_T,
                reference_logprobs_T=reference_T,
                weight_T=micro.weight_T,
                coefficient=settings.kl_coefficient,
            )
            tally.add(reference_kl_T=logprobs_T - reference_T)
        tally.add(
            ratio_U=result.ratio_U,
            clipped_T=result.clipped_T,
            advantage_T=micro.advantage_T,
            unit_T=micro.unit_T,
            entropy_T=entropy_T,
            engine_difference_T=logprobs_T - micro.behavior_T,
            version_T=micro.version_T,
        )
        tally.loss += float(loss.detach())
        return loss
