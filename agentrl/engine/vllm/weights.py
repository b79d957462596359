"""Weights on their way to vLLM: the model that is served, buckets of weights in the right dtype, and the two ways to send them.

A `Channel` is a process group from a trainer to the workers of one server, by gloo, or by NCCL between GPUs. `write_weights`
writes files instead.
"""

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from agentrl.engine.base import sent_dtype
from agentrl.engine.batched import check_weight
from agentrl.engine.vllm.common import BACKEND, EXTENSION
from agentrl.errors import EngineError
from agentrl.models.auto_classes import auto_class

R = TypeVar("R")
LEFT, RIGHT = ".agentrl_left", ".agentrl_right"
"""Name suffixes of two matrices whose product is added to a weight."""
_ALIGNMENT = 64
"""Alignment of each weight, in bytes."""


Changes: TypeAlias = Iterable[tuple[str, tuple[Tensor, Tensor]]]
"""By weight name, two matrices whose product is added to the weight."""


class Weight(NamedTuple):
    """A weight, and the dtype in which it is sent."""

    names: tuple[str, ...]
    """Several names if weights are tied."""
    tensor: Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the weight in a bucket, with padding."""
        return _padded(self.tensor.numel() * self.dtype.itemsize)


class Bucket(NamedTuple):
    """Some weights, one after the other."""

    header: Tensor
    """JSON as bytes: names, dtype and shape of each weight."""
    payload: Tensor
    """Bytes of the weights."""


def pack(weights: Sequence[Weight], device: torch.device) -> Bucket:
    """Put weights into a bucket on the sending device. A single weight is not copied if it needs no conversion."""
    kinds = [(names, str(dtype).removeprefix("torch."), list(tensor.shape)) for names, tensor, dtype in weights]
    header = torch.frombuffer(bytearray(json.dumps(kinds).encode()), dtype=torch.uint8).to(device)
    if len(weights) == 1:
        alone = weights[0].tensor.detach().to(device, weights[0].dtype).contiguous()
        return Bucket(header, alone.view(-1).view(torch.uint8))
    payload = torch.empty(sum(weight.num_bytes for weight in weights), dtype=torch.uint8, device=device)
    for weight, place in zip(weights, _views(payload, ((w.dtype, w.tensor.shape) for w in weights)), strict=True):
        place.copy_(weight.tensor.detach())
    return Bucket(header, payload)


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a bucket, which are views of it."""
    kinds = json.loads(bytes(bucket.header.cpu().numpy()))
    shapes = ((getattr(torch, dtype), torch.Size(shape)) for _, dtype, shape in kinds)
    for (names, _, _), tensor in zip(kinds, _views(bucket.payload, shapes), strict=True):
        for name in names:
            yield name, tensor


def _views(payload: Tensor, kinds: Iterable[tuple[torch.dtype, torch.Size]]) -> Iterator[Tensor]:
    begin = 0
    for dtype, shape in kinds:
        size = shape.numel() * dtype.itemsize
        yield payload[begin : begin + size].view(dtype).view(shape)
        begin += _padded(size)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def address_towards(host: str, port: int) -> str:
    """Return the address by which `host` reaches this machine; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Channel:
    """One end of a process group that transfers weights once; rank 0 sends.

    Each bucket is sent as the sizes of its header and payload, then both; sizes of 0 mark the end. When one end closes or
    dies, calls at the other one raise RuntimeError.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, device: torch.device, address: str, timeout_s: float
    ) -> None:
        """Wait for all ranks.

        Args:
            store: TCPStore of the rendezvous.
            rank: rank of this end.
            size: number of ranks.
            device: device of the buckets: all ranks on GPUs, or none.
            address: address by which the others reach this machine.
            timeout_s: deadline here and at every bucket, in seconds.
        """
        timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._group: Any
        options: Any
        if device.type == "cuda":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = c10d.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timeout
            self._group = c10d.ProcessGroupGloo(store, rank, size, options)
        self._broadcast(torch.zeros(1, device=device))  # NCCL connects at the first one

    def send(self, bucket: Bucket) -> None:
        """Send a bucket."""
        self._send_sizes(len(bucket.header), len(bucket.payload))
        self._broadcast(bucket.header)
        self._broadcast(bucket.payload)

    def end(self) -> None:
        """Mark the end of the weights."""
        self._send_sizes(0, 0)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight with its name, while the next bucket is received."""
        with ThreadPoolExecutor(1) as executor:
            coming = executor.submit(self._receive)
            while (bucket := coming.result()) is not None:
                coming = executor.submit(self._receive)
                if self._device.type == "cuda":
                    for tensor in bucket:  # of the executor's stream, on which the next bucket may get its memory
                        tensor.record_stream(torch.cuda.current_stream(self._device))
                yield from unpack(bucket)

    def close(self) -> None:
        """Leave the process group."""
        if self._device.type == "cuda" and self._group is not None:
            self._group.abort()
        self._group = None

    def _receive(self) -> Bucket | None:
        sizes = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._broadcast(sizes)
        if not sizes.any():
            return None
        header, payload = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes.tolist())
        self._broadcast(header)
        self._broadcast(payload)
        if self._device.type == "cuda":
            # Only this thread's stream waits for NCCL, and another thread reads the weights.
            torch.cuda.current_stream(self._device).synchronize()
        return Bucket(header, payload)

    def _send_sizes(self, header: int, payload: int) -> None:
        self._broadcast(torch.tensor([header, payload], device=self._device))

    def _broadcast(self, tensor: Tensor) -> None:
        group = self._group  # kept until the end: dropping the last reference waits for gloo
        if group is None:
            raise RuntimeError("the channel is closed")
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        group.broadcast([tensor], options).wait()


_BUCKET_BYTES, _GPU_BUCKET_BYTES = 2**24, 2**28
"""Largest size of a bucket, of which there is a copy in memory; a larger weight is sent alone. Each bucket costs a few calls,
which GPUs wait for."""
_COMPARED = 2**22
"""Numbers of a weight that are rounded at once to see whether rounding changes them."""


class ServerInfo(NamedTuple):
    """Configuration that a server reports."""

    name: str
    """Name of its model."""
    dtype: torch.dtype
    """Dtype in which it computes."""
    logprobs_mode: str
    num_workers: int
    """Number of its worker processes, if they can receive from a channel. 0: it reads files only."""
    is_gpu: bool
    adapter_rank: int
    """Largest rank of adapters that it keeps apart from weights. 0: it keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that a server runs, as far as the client must know it."""

    shapes: Mapping[str, torch.Tensor]
    """Its `state_dict`, without values."""
    vocab_size: int
    dtype: torch.dtype
    num_workers: int = 0
    is_gpu: bool = False
    adapter_rank: int = 0
    ties: Mapping[str, str] = field(default_factory=dict)
    """Tied weights: name of a weight to the name of the one that it equals."""


def parse_server_info(answer: Any) -> ServerInfo:
    """Parse a server's configuration."""
    config = answer["vllm_config"]
    model, workers = config["model_config"], config["parallel_config"]
    transfer = config.get("weight_transfer_config") or {}
    can_receive = workers["worker_extension_cls"] == EXTENSION and transfer.get("backend") == BACKEND
    return ServerInfo(
        name=str(model["model"]),
        dtype=getattr(torch, model["dtype"].removeprefix("torch.")),
        logprobs_mode=model["logprobs_mode"],
        num_workers=workers["world_size"] if can_receive and workers["data_parallel_size"] == 1 else 0,
        is_gpu=config["device_config"]["device"].startswith("cuda"),
        adapter_rank=(config.get("lora_config") or {}).get("max_lora_rank", 0),
    )


def load_served_model(answer: ServerInfo) -> ServedModel:
    """Read the configuration of a server's model, and derive the shapes of its weights."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(answer.name)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot read here the configuration of {answer.name!r}, the model of vLLM's server: {error}. Start the server "
            "with a name on the hub, or with the whole path of a folder that both see"
        ) from error
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return ServedModel(
        shapes=model.state_dict(),
        ties=find_ties(model),
        vocab_size=config.get_text_config().vocab_size,
        dtype=answer.dtype,
        num_workers=answer.num_workers,
        is_gpu=answer.is_gpu,
        adapter_rank=answer.adapter_rank,
    )


def find_ties(model: torch.nn.Module) -> dict[str, str]:
    """Return the tied parameters of a model: name to the name of the one that it equals."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(weight), name) for name, weight in model.named_parameters(remove_duplicate=False)
    }
    return {name: other for name, other in names.items() if name != other}


def in_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], model: ServedModel, *, is_exact: bool = False
) -> Iterator[list[Weight]]:
    """Yield weights in buckets, each with the dtype in which it is sent.

    That is `sent_dtype`; with `is_exact`, every weight that rounding would change keeps its own.

    Raises:
        EngineError: if names or shapes are not the model's, or weights are missing: vLLM would keep stale ones.
    """
    missing = set(model.shapes)

    def checked() -> Iterator[Weight]:
        for name, tensor in named_tensors:
            check_weight(name, tensor, model.shapes)
            missing.discard(name)
            if name in model.ties:  # sent with the other one
                continue
            names = (name, *(tied for tied, other in model.ties.items() if other == name))
            dtype = sent_dtype(name, tensor, model.dtype)
            if is_exact and dtype != tensor.dtype:
                parts = tensor.flatten().split(_COMPARED)  # in parts: of a whole embedding two copies would be held
                dtype = dtype if all(part.to(dtype).to(part.dtype).equal(part) for part in parts) else tensor.dtype
            yield Weight(names, tensor, dtype)
        if missing:
            raise EngineError(f"load_weights needs every weight of the model; {min(missing)!r} is missing")

    return _in_buckets(checked(), model)


def changes_in_buckets(changes: Changes, model: ServedModel) -> Iterator[list[Weight]]:
    """Yield low-rank changes in buckets; each change is two matrices that the worker multiplies.

    Raises:
        EngineError: if names or shapes are not the model's.
    """

    def checked() -> Iterator[Weight]:
        for name, (left, right) in changes:
            check_weight(name, torch.empty(left.shape[0], right.shape[1], device="meta"), model.shapes)
            yield Weight((name + LEFT,), left, left.dtype)
            yield Weight((name + RIGHT,), right, right.dtype)

    return _in_buckets(checked(), model)


def sync_buckets(
    model: ServedModel, named_tensors: Iterable[tuple[str, Tensor]] | None, changes: Changes | None
) -> Iterator[list[Weight]]:
    """Return changes and weights in buckets. Errors in the first bucket are raised at once, before any server is touched."""
    buckets = chain(
        () if changes is None else changes_in_buckets(changes, model),
        () if named_tensors is None else in_buckets(named_tensors, model, is_exact=changes is not None),
    )
    return chain([next(buckets)], buckets)


def _in_buckets(weights: Iterable[Weight], model: ServedModel) -> Iterator[list[Weight]]:
    most = _GPU_BUCKET_BYTES if model.is_gpu else _BUCKET_BYTES
    bucket: list[Weight] = []
    size = 0
    for weight in weights:
        if bucket and size + weight.num_bytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.num_bytes
    yield bucket


async def write_weights(folder: Path, buckets: Iterable[list[Weight]], *, has_ties: bool) -> None:
    """Write weights as files that vLLM's loader reads, one bucket per file.

    Args:
        folder: existing folder for the files.
        buckets: the weights.
        has_ties: write tied weights under each of their names, in files of their own.
    """
    num_files = 0
    for bucket in buckets:
        files = [[(weight.names[0], weight) for weight in bucket]]
        if has_ties:
            files += [[(name, weight)] for weight in bucket for name in weight.names[1:]]
        for file in files:
            path = folder / f"model-{num_files:05}.safetensors"
            tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, (_, tensor, dtype) in file}
            await asyncio.to_thread(save_file, tensors, path)
            path.chmod(0o644)  # the server may run under another user
            num_files += 1


async def on_daemon_thread(function: Callable[[], R]) -> R:
    """Call on a daemon thread, abandoned after an interrupt: gloo returns late if the other end hangs."""
    called: Future[R] = Future()

    def call() -> None:
        called.set_running_or_notify_cancel()
        try:
            called.set_result(function())
        except Exception as error:  # noqa: BLE001 - carried over
            called.set_exception(error)

    threading.Thread(target=call, name="agentrl-weight-sync", daemon=True).start()
    return await asyncio.wrap_future(called)


def listen(address: str, timeout_s: float) -> tuple[Any, int]:
    """Return the store of the rendezvous with a server's workers, and its port."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, store.port


@contextmanager
def weights_folder(folder: Path, version: int) -> Iterator[Path]:
    """Make a folder for weights, and remove it when the context ends."""
    place = (folder / f"version-{version}-{uuid4().hex[:8]}").resolve()
    try:
        place.mkdir(parents=True)
        yield place
    except (OSError, SafetensorError) as error:
        raise EngineError(f"load_weights: cannot write to engine.server.folder: {error}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
