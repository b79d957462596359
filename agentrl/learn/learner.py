"""Updates of the policy from credited trajectories, on one process or several.

`T` trained tokens of a minibatch, `U` ratio units.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from agentrl.credit import Credit
from agentrl.distributed.processes import all_gather, broadcast, is_main, num_processes, process_index
from agentrl.distributed.random_state import RandomState
from agentrl.distributed.sharding import load_shards, load_whole, save_shards, save_whole, shard
from agentrl.errors import ConfigError, TrainingError
from agentrl.files import read_json, write_whole
from agentrl.learn.batch import make_batch
from agentrl.learn.loss import LossConfig, kl_loss, mismatch_weights, policy_loss
from agentrl.learn.metrics import Tally, first_metrics, update_metrics
from agentrl.learn.minibatches import draw_minibatches
from agentrl.learn.optimizer import make_optimizer
from agentrl.learn.plan import MicroBatch, micro_batches
from agentrl.learn.train_config import TrainConfig
from agentrl.policy.layout import attending, lay_out
from agentrl.policy.lora import has_adapters, holds_adapters, load_adapter, merged_weights, save_adapter
from agentrl.policy.model import Policy
from agentrl.policy.routing import changed_share, recording, replaying, routers_of
from agentrl.rollout import derive_seed
from agentrl.types import Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

_WEIGHTS, _SHARDS, _OPTIMIZER = "model.safetensors", "shards", "optimizer.pt"


class _Before(NamedTuple):
    """What a pass gave before the first update, where that is needed."""

    logprobs_T: Tensor | None = None
    experts_RPK: Tensor | None = None
    """Of the model's R routers at each place, in a mixture of experts."""


class _Minibatch(NamedTuple):
    """Trajectories of one optimizer step, and their credit."""

    pairs: list[tuple[Trajectory, Credit]]
    num_computed: int
    """The first ones. The others have no gradient, and count in the denominators."""


class _State(BaseModel):
    """What a checkpoint holds beside weights and moments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_minibatches: NonNegativeInt
    """So far: where the schedule stands."""
    random: RandomState


class Learner:
    """The policy, its optimizer, and how a step's credited groups update it.

    Several processes hold the same groups and credits; each computes its share of every minibatch, and all end with the
    same weights, which are those of one process but for the order of sums.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        policy: Policy,
        loss: LossConfig,
        config: TrainConfig,
        temperature: float,
        seed: int,
        reference: Policy | None = None,
    ) -> None:
        """Take the parts.

        Args:
            accelerator: prepared with the recipe's precision and device.
            policy: the weights to train.
            reference: a copy of it, which stays as it is until `keep_reference`: the KL target.
            loss: ratio, clip and aggregation.
            config: optimizer and budgets.
            temperature: of the rollouts.
            seed: of the drawing of minibatches.
        """
        self._accelerator, self._loss, self._config = accelerator, loss, config
        self._temperature, self._seed = temperature, seed
        self._layout = policy.layout
        self._is_routed = _is_routed(policy.model, must_be=loss.routing_replay)
        self._is_sharded = config.sharding == "full" and num_processes() > 1
        self.reference = None if reference is None else reference.eval().requires_grad_(False)
        """The policy with which the run began. Not trained."""
        if self._is_sharded:  # not by accelerate, which knows no FSDP2 on a CPU
            for module in filter(None, (policy, self.reference)):
                shard(module, policy.model._no_split_modules or (), self.device)
        optimizer = make_optimizer(
            config.optimizer,
            policy.parameters(),
            learning_rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self._is_adapted = has_adapters(policy.model)
        self._wrapped: Any = policy
        self._optimizer: Any = optimizer
        if not self._is_sharded:
            self._wrapped, self._optimizer = accelerator.prepare(policy, optimizer)
        # Not prepared: accelerate would advance it once for each process.
        self._schedule = get_scheduler(
            "constant_with_warmup" if config.schedule == "constant" else config.schedule,
            self._optimizer,
            num_warmup_steps=config.warmup_updates,
            num_training_steps=config.steps * config.num_minibatches,
        )
        is_double = next(policy.parameters()).dtype == torch.float64
        self._dtype = torch.float64 if is_double else torch.float32
        self._pairs_per_token = 6 * policy.model.config.get_text_config().hidden_size
        self.is_given_up = False
        """Set from another thread: the update ends at the next micro-batch."""

    @property
    def policy(self) -> Policy:
        """The policy without what accelerate wraps around it."""
        policy: Policy = self._accelerator.unwrap_model(self._wrapped)
        return policy

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        device: torch.device = self._accelerator.device
        return device

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights, adapters merged into them, one whole at a time; called on every process."""
        return merged_weights(self.policy.model)

    def broadcast_weights(self) -> None:
        """Make the weights on all processes those of the first: they were made on each, to rounding the same."""
        if not self._is_sharded:
            with torch.no_grad():
                broadcast(parameter.data for parameter in self.policy.parameters())

    def keep_reference(self) -> None:
        """Make the reference what the policy is now."""
        if self.reference is not None:
            with torch.no_grad():
                for kept, present in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                    kept.copy_(present)

    def save_reference(self, folder: Path) -> None:
        """Write the reference; called on every process, and the first writes."""
        assert self.reference is not None
        if self._is_adapted:
            save_adapter(self.reference.model, folder)
            return
        save_whole(self.reference, folder / _WEIGHTS)

    def load_reference(self, folder: Path) -> None:
        """Read what `save_reference` wrote.

        Raises:
            ConfigError: where adapters were trained and are not now, or the other way round.
        """
        assert self.reference is not None
        _check_adapters(self.reference, folder)
        if self._is_adapted:
            load_adapter(self.reference.model, folder)
        else:
            load_whole(self.reference, load_file(folder / _WEIGHTS))

    def logprobs(self, prompt_ids: Sequence[int], action_ids: Sequence[int]) -> Tensor:
        """Return the log-probability of each token of an action after a prompt, under the present weights: (T,)."""
        row = np.array([*prompt_ids, *action_ids])
        inputs, index = lay_out([row[:-1]], self._layout, device=self.device)
        position_T = np.arange(len(prompt_ids) - 1, len(row) - 1)
        slot_T = torch.from_numpy(index(np.zeros_like(position_T), position_T)).to(self.device)
        target_T = torch.tensor(action_ids, device=self.device)
        with torch.no_grad(), self._accelerator.autocast():
            logprobs_T: Tensor = self._wrapped(inputs, slot_T, target_T, self._temperature)[0]
        return logprobs_T

    def save(self, folder: Path) -> None:
        """Write what is trained, optimizer, schedule and random states into `folder`; called on every process.

        Weights that adapters are added to are not: they are those of `model.name_or_path`. Nothing of it runs code when it is
        read: accelerate's own way does.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._is_adapted:
            save_adapter(self.policy.model, folder)
        if self._is_sharded:
            save_shards(self.policy, self._optimizer, folder / _SHARDS)
        elif not self._is_adapted:
            save_whole(self.policy, folder / _WEIGHTS)
        if is_main() and not self._is_sharded:
            torch.save(self._optimizer.state_dict(), folder / _OPTIMIZER)
        state = _State(num_minibatches=self._schedule.last_epoch, random=RandomState.now())
        write_whole(folder / _state_file(), state.model_dump_json())

    def load_weights(self, folder: Path) -> None:
        """Read the weights alone of what `save` wrote, by however many processes.

        Raises:
            ConfigError: where adapters were trained and are not now, or the other way round.
        """
        load_weights(self.policy, folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Rates and betas are those of the recipe.

        Raises:
            ConfigError: where the weights were laid out among processes otherwise, or adapters were trained and are not now, or
                the other way round.
        """
        _check_adapters(self.policy, folder)
        if (folder / _SHARDS).is_dir() != self._is_sharded:
            raise ConfigError(f"train.sharding: {folder} was written under another; go on as the run began")
        state = read_json(folder / _state_file(), TypeAdapter(_State), fix="go on from an older checkpoint")
        if self._is_sharded:
            load_shards(self.policy, self._optimizer, folder / _SHARDS)
        else:
            load_weights(self.policy, folder)
            self._optimizer.load_state_dict(torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True))
        state.random.restore()
        config, schedule = self._config, self._schedule
        schedule.last_epoch, schedule._step_count = state.num_minibatches, state.num_minibatches + 1
        schedule.base_lrs = [config.learning_rate for _ in schedule.base_lrs]
        for group, factor in zip(self._optimizer.param_groups, schedule.lr_lambdas, strict=True):
            group["initial_lr"] = config.learning_rate
            group["lr"] = config.learning_rate * factor(schedule.last_epoch)
            group["betas"], group["weight_decay"] = config.betas, config.weight_decay
        schedule._last_lr = [group["lr"] for group in self._optimizer.param_groups]

    def update(
        self,
        groups: Sequence[TrajectoryGroup],
        credits: Sequence[Sequence[Credit]],
        *,
        version: int,
        check_agreement: Callable[[float], None] | None = None,
    ) -> dict[str, float]:
        """Go once over a step's trajectories, in minibatches drawn at random; return metrics.

        A minibatch without any gradient moves neither weights nor the optimizer's state, and is counted.

        Args:
            groups: of the step, on every process the same.
            credits: of each trajectory of each group.
            version: of the policy before.
            check_agreement: told the mean |policy - behavior| log-probability in nats of the first minibatch, where its
                tokens were sampled by these very weights.

        Raises:
            TrainingError: where the gradient is not finite, or the update was given up.
        """
        plans = [self._plan(minibatch) for minibatch in self._draw(groups, credits, version)]
        befores = self._before(plans)
        self._wrapped.train()
        tallies: list[Tally] = []
        num_updates = 0
        of_experts: dict[str, float] = {}
        for index, plan in enumerate(plans):
            if plan:
                tally, first_experts = self._add_gradients(plan, befores[index])
                is_current = not (version - tally.column("version_T")).any()
                if index == 0 and is_current and check_agreement is not None:
                    check_agreement(float(np.abs(tally.column("engine_difference_T")).mean()))
                if not math.isfinite(tally.grad_norm):
                    raise TrainingError(
                        f"step {version + 1}: the gradient is not finite. The last checkpoint is whole: lower "
                        "train.learning_rate and go on from it"
                    )
                if tally.grad_norm > 0:  # else AdamW would move by momentum alone, and forget how large gradients are
                    self._optimizer.step()
                    num_updates += 1
                self._optimizer.zero_grad()
                tallies.append(tally)
                if index == 0 and self._is_routed:
                    of_experts = self._changed_experts(first_experts[0], plan[0])
            self._advance_schedule()
        tallies = tallies or [Tally()]
        skipped = {"skipped_minibatches": float(len(plans) - num_updates)}
        return update_metrics(tallies, current_version=version) | first_metrics(tallies[0]) | skipped | of_experts

    def _add_gradients(self, plan: Sequence[MicroBatch], befores: Sequence[_Before]) -> tuple[Tally, list[Tensor]]:
        """Add up a minibatch's gradient and clip it; return what it showed, and the experts of its first pass."""
        tally = Tally()
        first_experts: list[Tensor] = []
        for number, (micro, before) in enumerate(zip(plan, befores, strict=True)):
            if self.is_given_up:
                raise TrainingError("the update was interrupted")
            with (
                self._accumulating(is_last=number == len(plan) - 1),
                attending(self.policy.model, self._layout),
                self._routing(before) as experts,
            ):
                loss = self._loss_of(micro, before.logprobs_T, tally=tally)
                # Processes average their gradients; the loss is a sum over all of them.
                self._accelerator.backward(loss * self._accelerator.num_processes)
            first_experts = first_experts or experts
        tally = Tally.joined(all_gather([tally]))
        norm = self._accelerator.clip_grad_norm_(self._wrapped.parameters(), self._config.max_grad_norm)
        tally.grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        tally.learning_rate = self._schedule.get_last_lr()[0]
        return tally, first_experts

    def _advance_schedule(self) -> None:
        """Count a minibatch, skipped or not: a schedule then ends with the run, and a step begins at the same place in any."""
        with warnings.catch_warnings():  # torch expects each of its steps to follow one of the optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self._schedule.step()

    def _draw(
        self, groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]], version: int
    ) -> list[_Minibatch]:
        """Return the minibatches. Of those that failed and those of which credit keeps no token, nothing is in any."""
        trained = [
            (number, trajectory, credit)
            for number, (group, of_group) in enumerate(zip(groups, credits, strict=True))
            for trajectory, credit in zip(group.trajectories, of_group, strict=True)
            if not trajectory.failed and credit.keep_T.any()
        ]
        has_kl = self._loss.kl_coefficient > 0
        drawn = draw_minibatches(
            [number for number, _, _ in trained],
            has_gradient_I=[has_kl or bool(credit.advantages_T[credit.keep_T].any()) for _, _, credit in trained],
            num_minibatches=self._config.num_minibatches,
            rng=np.random.default_rng(derive_seed(self._seed, "minibatches", version)),
        )
        return [
            _Minibatch([trained[i][1:] for i in (*computed, *counted)], len(computed)) for computed, counted in drawn
        ]

    def _plan(self, minibatch: _Minibatch) -> list[MicroBatch]:
        loss = self._loss
        batch = make_batch(
            [trajectory for trajectory, _ in minibatch.pairs],
            [credit for _, credit in minibatch.pairs],
            unit=loss.unit,
            aggregation=loss.aggregation,
            constant_length=loss.constant_length,
        )
        return list(
            micro_batches(
                batch,
                max_tokens=self._config.max_tokens_per_micro_batch,
                layout=self._layout,
                device=self.device,
                process=self._accelerator.process_index,
                num_processes=self._accelerator.num_processes,
                trajectories=range(minibatch.num_computed),
                pairs_per_token=self._pairs_per_token,
                dtype=self._dtype,
            )
        )

    def _accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context in which gradients are added up on this process, and with the others' at the last.

        Shards are added up over processes every time: a process has no room for all gradients.
        """
        return nullcontext() if is_last or self._is_sharded else self._accelerator.no_sync(self._wrapped)

    def _before(self, plans: list[list[MicroBatch]]) -> list[list[_Before]]:
        """Return what each pass gives before the first update, by the same plan and precision as in training.

        Nothing for the first minibatch: there the policy itself is the anchor, exactly, whatever the noise of a second pass.
        """
        nothing = [[_Before() for _ in plan] for plan in plans]
        if self._loss.anchor == "behavior":
            return nothing
        self._wrapped.train()
        later = []
        for plan in plans[1:]:
            found = []
            for micro in plan:
                with torch.no_grad(), self._routing(_Before()) as experts:
                    logprobs_T = self._forward(self._wrapped, micro)[0]
                found.append(_Before(logprobs_T, experts[0].cpu() if self._loss.routing_replay else None))
            later.append(found)
        return nothing[:1] + later

    def _routing(self, before: _Before) -> AbstractContextManager[list[Tensor]]:
        """Return a context in which the experts of each pass are noted, and are those of before where these are known."""
        if not self._is_routed:
            return nullcontext([])
        if before.experts_RPK is None:
            return recording(self.policy.model)
        return replaying(self.policy.model, before.experts_RPK)

    def _changed_experts(self, before_RPK: Tensor, micro: MicroBatch) -> dict[str, float]:
        """Return the share of experts that an update has changed, at the places where trained tokens are read."""
        with torch.no_grad(), recording(self.policy.model) as after:
            self._forward(self._wrapped, micro)
        changed_T = changed_share(before_RPK, after[0], slots_Q=micro.slot_T)
        return {"moe/changed_experts": float(np.concatenate(all_gather([changed_T.cpu().numpy()])).mean())}

    def _forward(self, policy: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._accelerator.autocast():
            logprobs_T, entropy_T = policy(micro.inputs, micro.slot_T, micro.target_T, self._temperature)
        return logprobs_T, entropy_T

    def _loss_of(self, micro: MicroBatch, proximal_T: Tensor | None, *, tally: Tally) -> Tensor:
        """Return the micro-batch's share of the loss; `proximal_T` are recomputed log-probabilities, the anchor if given."""
        settings = self._loss
        logprobs_T, entropy_T = self._forward(self._wrapped, micro)
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
        if self.reference is not None and settings.kl_coefficient > 0:
            with torch.no_grad():
                reference_T, _ = self._forward(self.reference, micro)
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
            log_ratio_T=result.log_ratio_T,
            engine_difference_T=logprobs_T - micro.behavior_T,
            version_T=micro.version_T,
        )
        tally.loss += float(loss.detach())
        return loss


def load_weights(policy: Policy, folder: Path) -> None:
    """Read the weights of a checkpoint, or of adapters to them, by however many processes it was written.

    Raises:
        ConfigError: where adapters were trained and are not now, or the other way round.
    """
    _check_adapters(policy, folder)
    if has_adapters(policy.model):
        load_adapter(policy.model, folder)
    elif (folder / _SHARDS).is_dir():
        load_shards(policy, None, folder / _SHARDS)
    else:
        load_whole(policy, load_file(folder / _WEIGHTS))


def _check_adapters(policy: Policy, folder: Path) -> None:
    if holds_adapters(folder) != has_adapters(policy.model):
        how = "with" if holds_adapters(folder) else "without"
        raise ConfigError(f"model.lora: {folder} was trained {how} adapters; go on as the run began")


def _state_file() -> str:
    """Return the name of this process's own file in a checkpoint."""
    return f"learner-{process_index()}.json"


def _is_routed(model: Any, *, must_be: bool) -> bool:
    """Tell whether the experts of a model can be noted; a model without any has none.

    Raises:
        ConfigError: where they must be.
    """
    ids_12 = torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad(), recording(model) as experts:
            if is_routed := bool(routers_of(model)):
                model.base_model(input_ids=ids_12, use_cache=False)
                with replaying(model, experts[0]) if must_be else nullcontext():
                    pass
    except TrainingError as error:
        if must_be:
            raise ConfigError(f"loss.routing_replay: {error}") from error
        log.info("the experts of this model are not reported: %s", error)
        return False
    if must_be and not is_routed:
        raise ConfigError(f"loss.routing_replay: {type(model).__name__} is no mixture of experts; set it to false")
    return is_routed
