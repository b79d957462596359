"""Weights that are sharded over ranks (FSDP2)."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from agentrl.distributed.processes import is_main, num_processes, process_index

_WITHOUT_FROZEN = StateDictOptions(strict=False)


def shard(
    policy: nn.Module,
    layers: Collection[str],
    device: torch.device,
    *,
    replicas: int = 1,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shard a policy's weights, layer by layer (`layers` are class names), and the rest as one unit.

    With `compute_dtype` a layer is put together in that dtype, and freed after it is computed; autocast alone would keep a
    copy of every weight in half precision until the backward pass. Gradients are added up in float32.

    With several `replicas`, as many groups of consecutive ranks each have all shards.
    """
    groups = {"shard": num_processes() // replicas}
    groups = {"replicate": replicas} | groups if replicas > 1 else groups
    mesh = init_device_mesh(device.type, tuple(groups.values()), mesh_dim_names=tuple(groups))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype and torch.float32)
    for module in list(policy.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    # By default the outermost stays whole after a pass without a backward one, and an optimizer made then trains a copy.
    fully_shard(policy, mesh=mesh, reshard_after_forward=True, mp_policy=precision)


def whole(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a module by name, gathered one at a time; every rank must go through all of them."""
    for name, tensor in module.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def gather_to(
    rank: int, named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int = 2**28
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on one rank, and tensors without content on the others; every rank must go through all of them.

    Shards are gathered in buckets of at most `bucket_bytes`, or of one larger tensor, in the dtype that they have, from the
    replica that the rank belongs to.
    """
    bucket, size = list[tuple[str, Tensor]](), 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield from _gather(bucket, rank)
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    yield from _gather(bucket, rank)


def _gather(bucket: Sequence[tuple[str, Tensor]], rank: int) -> Iterator[tuple[str, Tensor]]:
    sharded = {name: tensor for name, tensor in bucket if isinstance(tensor, DTensor)}
    parts = {name: _bytes(tensor) for name, tensor in sharded.items()}
    is_receiver = process_index() == rank
    begin, received = 0, torch.empty(0, dtype=torch.uint8)
    if parts:
        own = torch.cat(list(parts.values()))
        group = next(iter(sharded.values())).device_mesh.get_group(-1)
        ranks = dist.get_process_group_ranks(group)
        if rank in ranks:
            received = own.new_empty(len(ranks) if is_receiver else 0, len(own))
            dist.gather(own, list(received) if is_receiver else None, dst=rank, group=group)
    for name, tensor in bucket:
        if not is_receiver:
            yield name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        elif name in parts:
            stop = begin + len(parts[name])
            rows = received[:, begin:stop].flatten().view(tensor.dtype).view(-1, *tensor.shape[1:])
            begin = stop
            yield name, rows[: len(tensor)]
        else:
            yield name, tensor


def _bytes(tensor: DTensor) -> Tensor:
    """Return this rank's rows of a tensor as bytes, padded to those of the first rank, which has the most."""
    if tensor.placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise ValueError(f"expected a weight whose rows are sharded over ranks, got {tensor.placements}")
    own = tensor.to_local()
    rows = -(-len(tensor) // tensor.device_mesh.size(-1))
    padded = own if len(own) == rows else torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
    return padded.contiguous().flatten().view(torch.uint8)


def save_full(policy: nn.Module, file: Path) -> None:
    """Write the weights of a policy, each once; called on every rank, and rank 0 writes."""
    tied = _tied(policy)
    state = {name: tensor.cpu().contiguous() for name, tensor in whole(policy) if is_main() and name not in tied}
    if is_main():
        save_file(state, file)


def load_full(policy: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace a policy's weights, sharded or not. Those that are tied to others (a head to the embedding) may be absent.

    Raises:
        RuntimeError: for other names or shapes.
    """
    options = StateDictOptions(full_state_dict=True, strict=False)
    result = set_model_state_dict(policy, dict(weights), options=options)
    tied = _tied(policy)
    missing = [name for name in result.missing_keys if name not in tied]
    if wrong := [*missing, *result.unexpected_keys]:
        raise RuntimeError(f"the weight {wrong[0]} is missing, or not the model's")


def save_shards(policy: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write trained weights and the optimizer's moments, each rank its own part.

    The format is safetensors: torch's own would be unpickled on reading.

    Raises:
        Exception: of the rank that failed, such as OSError of a full disk.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(_tensors(policy, _state(policy, optimizer)), storage_writer=writer)
    except CheckpointException as error:  # which is no Exception
        cause, *_ = (met for met, _ in error.failures.values())
        raise cause from error


def load_shards(policy: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Load the files that any number of ranks wrote by `save_shards`; without an optimizer the weights alone.

    Raises:
        RuntimeError: if it is damaged, or of another model.
    """
    state = _state(policy, optimizer)
    reader = HuggingFaceStorageReader(str(folder))
    try:
        load(_tensors(policy, state), storage_reader=reader, no_dist=num_processes() == 1)
    except CheckpointException as error:  # which is no Exception
        (cause, _), *_ = error.failures.values()
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from error
    if optimizer is None:
        set_model_state_dict(policy, state["model"], options=_WITHOUT_FROZEN)
    else:
        set_state_dict(
            policy,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_WITHOUT_FROZEN,
        )


def _tied(policy: nn.Module) -> set[str]:
    """Return the names of tied weights, but one for each."""
    return {name for name, _ in policy.named_parameters(remove_duplicate=False)} - dict(
        policy.named_parameters()
    ).keys()


def _tensors(policy: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state by name, each once; the optimizer's settings are the recipe's."""
    tied = _tied(policy)
    found = {f"model.{name}": weight for name, weight in state["model"].items() if name not in tied}
    for name, moments in state.get("optimizer", {}).get("state", {}).items():
        found |= {f"optimizer.{name}.{key}": moment for key, moment in moments.items()}
    return found


def _state(policy: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    is_fresh = optimizer is not None and not optimizer.state
    model, of_optimizer = get_state_dict(policy, optimizer or [])
    # Not by the option `ignore_frozen_params`, which keeps a head that is tied to the embedding.
    frozen = {name for name, weight in policy.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    model = {name: weight for name, weight in model.items() if name not in frozen}
    if optimizer is not None and is_fresh:  # its state was made up by a step without gradients, which Adam counts
        for state in optimizer.state.values():
            state["step"].zero_()
    return {"model": model} if optimizer is None else {"model": model, "optimizer": of_optimizer}
