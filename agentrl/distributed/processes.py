"""Communication between the ranks of one run: barriers, gathers and scatters that name the rank that is missing."""

import io
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from agentrl.engine.vllm.weights import address_towards
from agentrl.errors import TrainingError

T = TypeVar("T")

_GRACE_S = 10.0
"""Time for all other ranks to notice that one is missing; they may still be waiting for a third."""
_deadline = timedelta(minutes=30)
_barriers = count()


def set_deadline(timeout_s: float) -> None:
    """Set the longest wait of a rank for the others."""
    global _deadline
    _deadline = timedelta(seconds=timeout_s)


def choose_interface() -> None:
    """Let gloo connect this rank with the others by the network interface that leads to rank 0 (`MASTER_ADDR`).

    By itself it takes the one of the machine's own name, which is often a loopback. `GLOO_SOCKET_IFNAME` names another.
    """
    host = os.environ.get("MASTER_ADDR")
    if host is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):  # a host that nobody knows is an error of whoever connects to it
        own = address_towards(host, int(os.environ.get("MASTER_PORT", "29500")))
        for name, addresses in psutil.net_if_addrs().items():
            if own in [each.address.partition("%")[0] for each in addresses]:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def num_processes() -> int:
    """Return the number of ranks that train this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_index() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if num_processes() > 1 else 0


def is_main() -> bool:
    """Return whether this is rank 0, which writes the run's folder and prints to the terminal."""
    return process_index() == 0


def barrier() -> None:
    """Wait until every rank is here; each must call it as often as the others.

    Raises:
        TrainingError: with the ranks that do not come within the deadline, or have ended.
    """
    if num_processes() == 1:
        return
    number = next(_barriers)
    try:
        _store().set(f"{number}/{process_index()}", "here")
        dist.monitored_barrier(_gloo(), timeout=_deadline, wait_all_ranks=True)
        _store().delete_key(f"{number}/{process_index()}")
    except RuntimeError as error:
        raise TrainingError(
            f"process {', '.join(map(str, _missing(number)))} of {num_processes()} has ended, or did not answer within "
            f"train.process_timeout_s: {_deadline.total_seconds():g}; see what it said. The last checkpoint is whole"
        ) from error


def _missing(number: int) -> list[int]:
    """Return the ranks that did not come to a barrier; others may be about to."""
    others = [index for index in range(num_processes()) if index != process_index()]
    end = time.monotonic() + _GRACE_S
    missing = []
    for index in others:
        try:
            _store().wait([f"{number}/{index}"], timedelta(seconds=max(0.1, end - time.monotonic())))
        except dist.DistStoreError:
            missing.append(index)
        except RuntimeError:
            return [0]  # rank 0 keeps the store
    return missing or others


@contextmanager
def naming_absent_ranks() -> Iterator[None]:
    """Turn the failure of a collective call into an error that names the rank that failed it.

    Raises:
        TrainingError: as `barrier`.
    """
    try:
        yield
    except RuntimeError as error:
        if num_processes() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            barrier()
        raise


def all_gather(values: list[T]) -> list[T]:
    """Return the values of all ranks, in their order; each must call it as often as the others.

    They broadcast in turn, so that beside the result a rank holds one other's bytes at a time.

    Raises:
        TrainingError: as `barrier`.
    """
    if num_processes() == 1:
        return values
    barrier()
    return [value for owner in range(num_processes()) for value in _broadcast_values(owner, values)]


def to_rank_zero(values: list[T]) -> list[T]:
    """Return the values of all ranks, in their order, on rank 0; nothing on the others, which must call it as often.

    They send in turn, so that beside the result rank 0 holds one other's bytes at a time.

    Raises:
        TrainingError: as `barrier`.
    """
    if num_processes() == 1:
        return values
    barrier()
    if not is_main():
        _send(values, to=0)
        return []
    return [*values, *(value for owner in range(1, num_processes()) for value in _receive(owner))]


def scatter(make: Callable[[], Sequence[T]]) -> T:
    """Return to each rank its own of the values that rank 0 makes, one for each. All must call it as often.

    Raises:
        TrainingError: as `barrier`.
    """
    if num_processes() == 1:
        return make()[0]
    made = make() if is_main() else ()
    barrier()
    if not is_main():
        received: T = _receive(0)
        return received
    for index in range(1, num_processes()):
        _send(made[index], to=index)
    return made[0]


def from_rank_zero(make: Callable[[], T]) -> T:
    """Return the value that rank 0 makes, on all ranks: so order, hash seeds and the machine decide once."""
    if num_processes() == 1:
        return make()
    made = [make()] if is_main() else []
    barrier()
    return _broadcast_values(0, made)[0]


def _broadcast_values(owner: int, values: list[T]) -> list[T]:
    """Return the values of one rank, on all ranks; those of the others are ignored."""
    is_own, pickled = process_index() == owner, io.BytesIO()
    if is_own:
        pickle.dump(values, pickled)
    length = torch.tensor([pickled.tell()])
    dist.broadcast(length, src=owner, group=_gloo())
    content = (
        torch.frombuffer(pickled.getbuffer(), dtype=torch.uint8)
        if is_own
        else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(content, src=owner, group=_gloo())
    received: list[T] = values if is_own else pickle.loads(content.numpy().data)
    return received


def _send(value: object, *, to: int) -> None:
    pickled = io.BytesIO()
    pickle.dump(value, pickled, protocol=pickle.HIGHEST_PROTOCOL)
    dist.send(torch.tensor([pickled.tell()]), to, group=_gloo())
    dist.send(torch.frombuffer(pickled.getbuffer(), dtype=torch.uint8), to, group=_gloo())


def _receive(owner: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, owner, group=_gloo())
    content = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(content, owner, group=_gloo())
    return pickle.loads(content.numpy().data)


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copy tensors from rank 0 to all ranks."""
    if num_processes() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def all_reduce(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by their sums over all ranks."""
    if num_processes() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


@cache
def _store() -> Any:
    """Return the store that keeps the messages of ranks that have ended."""
    return PrefixStore("agentrl", distributed_c10d._get_default_store())


@cache
def _gloo() -> Any:
    """Return a group that can name missing ranks, which NCCL cannot."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))
