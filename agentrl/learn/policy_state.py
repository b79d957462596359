"""The state of training: the policy's weights, its optimizer and schedule; and the reference, which stays as it is."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter
from safetensors.torch import load_file
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from agentrl.data.files import read_json, write_whole
from agentrl.distributed.checkpoints import RandomState
from agentrl.distributed.processes import broadcast, is_main, num_processes, process_index
from agentrl.distributed.sharding import gather_to, load_full, load_shards, save_full, save_shards, shard
from agentrl.engine.base import sent_dtype
from agentrl.errors import ConfigError
from agentrl.learn.calibration import Calibration
from agentrl.learn.config import OptimizerName, TrainConfig, make_optimizer, make_schedule
from agentrl.policy.lora import (
    base_weights,
    check_adapter,
    has_adapters,
    holds_adapters,
    load_adapter,
    lost_change,
    merged_weights,
    save_adapter,
    weight_changes,
)
from agentrl.policy.model import Policy
from agentrl.policy.sharded_checkpoint import materialize

_WEIGHTS = "model.safetensors"
_SHARDS = "shards"
_OPTIMIZER = "optimizer.pt"


class HostMemory:
    """The place of tensors that are away from their device, pinned if that is a GPU.

    A tensor that is away stays what it is, for optimizers, shards and tied weights too: its storage alone has no bytes, as
    FSDP frees it. What comes back is the same to the last bit.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._copies: dict[int, tuple[UntypedStorage, Tensor]] = {}
        """Each storage that was away, by its address, and its bytes on the host."""

    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to the host; those that are away stay there."""
        for storage in _storages(tensors):
            if not storage.nbytes():
                continue
            if storage._cdata not in self._copies:
                kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
                self._copies[storage._cdata] = storage, kept
            self._copies[storage._cdata][1].copy_(_bytes(storage), non_blocking=True)
            storage.resize_(0)

    def move_in(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors that are away back to their device."""
        for storage in _storages(tensors):
            if storage.nbytes() or storage._cdata not in self._copies:
                continue
            _, kept = self._copies[storage._cdata]
            storage.resize_(kept.nbytes)
            _bytes(storage).copy_(kept, non_blocking=True)

    def view(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host with the bytes of one that is away; of another, itself."""
        storage = tensor.untyped_storage()
        if storage.nbytes() or storage._cdata not in self._copies:
            return tensor
        if storage.is_cuda:
            torch.cuda.synchronize(tensor.device)  # the copy may be under way
        _, kept = self._copies[storage._cdata]
        return kept.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    for tensor in tensors:
        yield (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _SavedState(BaseModel):
    """Contents of a checkpoint beside weights and moments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_minibatches: NonNegativeInt
    """Minibatches so far: the schedule's position."""
    minibatches_a_step: PositiveInt
    """Minibatches per step."""
    optimizer: OptimizerName
    """Optimizer whose moments are saved."""
    random: RandomState
    calibration: Calibration = Calibration()


class PolicyState:
    """The policy in training, on one rank or several.

    Each rank holds all weights, or a shard of them (`train.sharding`).
    """

    def __init__(
        self, policy: Policy, *, accelerator: Accelerator, config: TrainConfig, reference: Policy | None = None
    ) -> None:
        """Shard the weights if the recipe asks for it, and make an optimizer for them.

        Args:
            policy: the weights to train.
            accelerator: prepared with the recipe's precision and device.
            config: optimizer, schedule and sharding.
            reference: a copy of the policy, which stays as it is until `keep_reference`: the KL target.
        """
        self.accelerator, self._config = accelerator, config
        self.is_sharded = config.is_sharded(num_processes())
        self.reference = None if reference is None else reference.eval().requires_grad_(False)
        """The policy with which the run began. Not trained."""
        for each in filter(None, (policy, self.reference)):
            each.has_copy = config.bfloat16_copy and not self.is_sharded  # shards are put together from rounded ones
        if self.is_sharded:  # not by accelerate, which knows no FSDP2 on a CPU
            dtype = torch.bfloat16 if config.precision == "bfloat16" else None
            for module in filter(None, (policy, self.reference)):
                layers = policy.model._no_split_modules or ()
                shard(module, layers, self.device, replicas=config.replicas, compute_dtype=dtype)
                materialize(module.model, module.sharded_checkpoint)
                module.sharded_checkpoint.clear()
        optimizer = make_optimizer(
            config.optimizer,
            policy.parameters(),
            learning_rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self.calibration = Calibration()
        """State of `loss.trust: calibrated`: the same on every rank."""
        self._moments, self._away = HostMemory(), HostMemory()
        self._is_adapted = has_adapters(policy.model)
        self.wrapped: Any = policy
        """The policy as a pass of training calls it: gradients are averaged over ranks."""
        self.optimizer: Any = optimizer
        if not self.is_sharded:
            self.wrapped, self.optimizer = accelerator.prepare(policy, optimizer)
        # Not prepared: accelerate would advance it once for each rank.
        self.schedule = make_schedule(
            config.schedule,
            self.optimizer,
            num_warmup=config.warmup_minibatches,
            num_minibatches=config.steps * config.minibatches_a_step,
        )

    @property
    def policy(self) -> Policy:
        """The policy without the wrapper of accelerate."""
        policy: Policy = self.accelerator.unwrap_model(self.wrapped)
        return policy

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return float(self.schedule.get_last_lr()[0])

    def update(self, *, rate_factor: float = 1.0) -> float:
        """Make an optimizer step at the schedule's rate times a factor, for this step alone; return the rate it had."""
        for group in self.optimizer.param_groups:
            group["lr"] *= rate_factor
        rate = float(self.optimizer.param_groups[0]["lr"])
        self._step()
        for group, scheduled in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = scheduled
        return rate

    def _step(self) -> None:
        """Make the optimizer's step; weight by weight if moments wait in the host's memory."""
        if "optimizer" not in self._config.offload:
            self.optimizer.step()
            return
        (group,) = self.optimizer.param_groups
        trained = group["params"]
        try:
            for parameter in trained:
                self._moments.move_in(self._moments_of([parameter]))
                group["params"] = [parameter]
                self.optimizer.step()
                self._moments.move_out(self._moments_of([parameter]))
        finally:
            group["params"] = trained

    def _moments_of(self, parameters: Iterable[Any]) -> Iterator[Tensor]:
        """Yield the optimizer's moments of weights, without its counts of steps."""
        for parameter in parameters:
            yield from (value for value in self.optimizer.state.get(parameter, {}).values() if value.ndim)

    @contextmanager
    def _moments_at_hand(self) -> Iterator[None]:
        """Return a context in which all moments are on the device: those of shards are written and read there."""
        self._moments.move_in(self._moments_of(self.optimizer.state))
        yield
        if "optimizer" in self._config.offload:
            self._moments.move_out(self._moments_of(self.optimizer.state))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Return a context in which engines sample, and the weights are away if `train.offload` has them."""
        weights: list[Tensor] = []
        if "weights" in self._config.offload:
            weights = [*self.policy.parameters(), *(self.reference.parameters() if self.reference else ())]
        self._away.move_out(weights)
        if self.device.type == "cuda" and self._config.offload:
            torch.cuda.empty_cache()  # an engine may take its memory past torch
        try:
            yield
        finally:
            self._away.move_in(weights)

    def advance_schedule(self) -> None:
        """Count a minibatch, skipped or not: a schedule then ends with the run, and a step begins at the same point in any."""
        with warnings.catch_warnings():  # torch expects each of its steps to follow one of the optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.schedule.step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights, adapters merged into them in float32, one whole at a time; called on every rank."""
        return merged_weights(self.policy.model, is_rounded=False)

    def weights_for(self, rank: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for the one rank that sends them, in the dtype in which it does; without content on the others.

        Called on every rank. Weights that are not sharded, or have adapters, are those of `weights`.

        Args:
            rank: rank that sends them.
            dtype: dtype of matrices, of which a sync rounds others than routers' (`sent_dtype`). None: they keep theirs.
        """
        if not self.is_sharded or self.has_adapters:
            return self.weights()
        state = self.policy.model.state_dict().items()
        return gather_to(rank, ((name, tensor.to(sent_dtype(name, tensor, dtype))) for name, tensor in state))

    def lost_change(self, dtype: torch.dtype) -> float:
        """Return the share of the adapters' change that a dtype has no room for; called on every rank."""
        return lost_change(self.policy.model, dtype)

    @property
    def has_adapters(self) -> bool:
        """Adapters are trained, and all else stays as it is."""
        return has_adapters(self.policy.model)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights without adapters, one whole at a time; called on every rank."""
        return base_weights(self.policy.model)

    def weight_changes(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield the adapters' changes of weights, each as two matrices to multiply; called on every rank."""
        return weight_changes(self.policy.model)

    def broadcast_weights(self) -> None:
        """Copy the weights of rank 0 to all ranks, on which they were the same up to rounding."""
        if not self.is_sharded:
            with torch.no_grad():
                broadcast(parameter.data for parameter in self.policy.parameters())

    def keep_reference(self) -> None:
        """Copy the policy's present weights to the reference."""
        if self.reference is not None:
            with torch.no_grad():
                for kept, present in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                    kept.copy_(present)

    def save_reference(self, folder: Path) -> None:
        """Write the reference; called on every rank, and rank 0 writes."""
        assert self.reference is not None
        if self._is_adapted:
            save_adapter(self.reference.model, folder)
            return
        save_full(self.reference, folder / _WEIGHTS)

    def load_reference(self, folder: Path) -> None:
        """Load the reference from the files of `save_reference`.

        Raises:
            ConfigError: if adapters were trained and are not now, or the other way round.
        """
        assert self.reference is not None
        _check_adapters(self.reference, folder)
        if self._is_adapted:
            load_adapter(self.reference.model, folder)
        else:
            load_full(self.reference, load_file(folder / _WEIGHTS))

    def save(self, folder: Path) -> None:
        """Write trained weights, optimizer, schedule and random states into `folder`; called on every rank.

        Weights that adapters are added to are not written: they are those of `model.name_or_path`. Reading the files runs no
        code, unlike with accelerate's own format.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._is_adapted:
            save_adapter(self.policy.model, folder)
        if self.is_sharded:
            with self._moments_at_hand():
                save_shards(self.policy, self.optimizer, folder / _SHARDS)
        elif not self._is_adapted:
            save_full(self.policy, folder / _WEIGHTS)
        if is_main() and not self.is_sharded:
            torch.save(self._optimizer_state(), folder / _OPTIMIZER)
        state = _SavedState(
            num_minibatches=self.schedule.last_epoch,
            minibatches_a_step=self._config.minibatches_a_step,
            optimizer=self._config.optimizer,
            random=RandomState.now(),
            calibration=self.calibration,
        )
        write_whole(folder / _state_file(), state.model_dump_json())

    def load(self, folder: Path) -> None:
        """Load the files of `save`. Rates and betas are those of the recipe.

        Raises:
            ConfigError: if the weights were sharded otherwise, adapters were trained and are not now, or the other way round,
                or another optimizer's moments are there.
        """
        _check_adapters(self.policy, folder)
        if (folder / _SHARDS).is_dir() != self.is_sharded:
            raise ConfigError(f"train.sharding: {folder} was written under another; resume as the run began")
        state = read_json(folder / _state_file(), TypeAdapter(_SavedState), fix="resume from an older checkpoint")
        if state.optimizer != self._config.optimizer:
            raise ConfigError(
                f"train.optimizer: {folder} has the moments of {state.optimizer}, which {self._config.optimizer} cannot "
                "take over; resume as the run began"
            )
        if self.is_sharded:
            if self._is_adapted:
                check_adapter(self.policy.model, folder)
            with self._moments_at_hand():
                self._moments = HostMemory()  # others take their place
                load_shards(self.policy, self.optimizer, folder / _SHARDS)
        else:
            load_weights(self.policy, folder)
            self._load_optimizer_state(torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True))
        state.random.restore()
        self.calibration = state.calibration
        config, schedule = self._config, self.schedule
        position = state.num_minibatches * config.minibatches_a_step // state.minibatches_a_step
        schedule.last_epoch, schedule._step_count = position, position + 1
        schedule.base_lrs = [config.learning_rate for _ in schedule.base_lrs]
        for group, factor in zip(self.optimizer.param_groups, schedule.lr_lambdas, strict=True):
            group["initial_lr"] = config.learning_rate
            group["lr"] = config.learning_rate * factor(schedule.last_epoch)
            group["betas"], group["weight_decay"] = config.betas, config.weight_decay
        schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict`; what waits in the host's memory stays there."""
        whole: dict[str, Any] = self.optimizer.state_dict()
        moments = {
            index: {name: self._moments.view(value) for name, value in state.items()}
            for index, state in whole["state"].items()
        }
        return whole | {"state": moments} if "optimizer" in self._config.offload else whole

    def _load_optimizer_state(self, saved: dict[str, Any]) -> None:
        """Load the optimizer's `state_dict`; moments go to the device weight by weight if they then leave it."""
        self._moments = HostMemory()
        if "optimizer" not in self._config.offload:
            self.optimizer.load_state_dict(saved)
            return
        self.optimizer.load_state_dict(saved | {"state": {}})
        (group,) = self.optimizer.param_groups
        for index, parameter in enumerate(group["params"]):
            for name, value in saved["state"].get(index, {}).items():
                self.optimizer.state[parameter][name] = value.to(parameter.device, copy=True)
            self._moments.move_out(self._moments_of([parameter]))

    def load_weights(self, folder: Path) -> None:
        """Load the weights alone from the files of `save`, on any number of ranks.

        Raises:
            ConfigError: if adapters were trained and are not now, or the other way round.
        """
        load_weights(self.policy, folder)


def load_weights(policy: Policy, folder: Path) -> None:
    """Read the weights of a checkpoint, or of adapters to them, written by any number of ranks.

    Raises:
        ConfigError: if adapters were trained and are not now, or the other way round.
    """
    _check_adapters(policy, folder)
    if has_adapters(policy.model):
        load_adapter(policy.model, folder)
    elif (folder / _SHARDS).is_dir():
        load_shards(policy, None, folder / _SHARDS)
    else:
        load_full(policy, load_file(folder / _WEIGHTS))


def _check_adapters(policy: Policy, folder: Path) -> None:
    if holds_adapters(folder) != has_adapters(policy.model):
        how = "with" if holds_adapters(folder) else "without"
        raise ConfigError(f"model.lora: {folder} was trained {how} adapters; resume as the run began")


def _state_file() -> str:
    """Return the name of this rank's own file in a checkpoint."""
    return f"learner-{process_index()}.json"
