"""Weights through a process group: from a trainer to the workers of one server, by gloo, or by NCCL between GPUs."""

import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

LEFT, RIGHT = ".agentrl_left", ".agentrl_right"
"""Ends of the names of two matrices whose product is added to a weight."""
_ALIGNMENT = 64
"""Bytes at a multiple of which each weight begins."""


class Weight(NamedTuple):
    """A weight, and the dtype in which it is sent."""

    names: tuple[str, ...]
    """Several where some are tied."""
    tensor: Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size on the way, with what is left free behind it."""
        return _padded(self.tensor.numel() * self.dtype.itemsize)


class Bucket(NamedTuple):
    """Some weights, one behind the other."""

    header: Tensor
    """Bytes of JSON: names, dtype and shape of each."""
    payload: Tensor
    """Bytes of the weights."""


def pack(weights: Sequence[Weight], device: torch.device) -> Bucket:
    """Put weights into a bucket on the device from which it is sent; one alone that is as it is sent is not copied."""
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
    """Yield the weights of a bucket, which stays in memory as long as one of them does."""
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
    """Return the address of this machine by which another one reaches it; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Channel:
    """One end of a process group that hands over weights once; the sender is its rank 0.

    What is on the way: the sizes of a bucket's header and payload, then both; at the end sizes of 0. When one end is closed or
    dies, the other one's calls raise RuntimeError.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, device: torch.device, address: str, timeout_s: float
    ) -> None:
        """Wait for all ranks.

        Args:
            store: where they meet, a TCPStore.
            rank: of this one.
            size: number of ranks.
            device: where buckets are; all ranks on GPUs, or none.
            address: of this machine, by which the others reach it.
            timeout_s: how long to wait, here and at every bucket.
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
        self._share(torch.zeros(1, device=device))  # NCCL connects at the first one

    def send(self, bucket: Bucket) -> None:
        """Hand over a bucket."""
        self._send_sizes(len(bucket.header), len(bucket.payload))
        self._share(bucket.header)
        self._share(bucket.payload)

    def end(self) -> None:
        """Tell that there are no more."""
        self._send_sizes(0, 0)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight with its name, while the next bucket comes in."""
        with ThreadPoolExecutor(1) as beside:
            coming = beside.submit(self._receive)
            while (bucket := coming.result()) is not None:
                coming = beside.submit(self._receive)
                yield from unpack(bucket)

    def close(self) -> None:
        """Part from the others."""
        if self._device.type == "cuda" and self._group is not None:
            self._group.abort()
        self._group = None

    def _receive(self) -> Bucket | None:
        sizes = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._share(sizes)
        if not sizes.any():
            return None
        header, payload = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes.tolist())
        self._share(header)
        self._share(payload)
        return Bucket(header, payload)

    def _send_sizes(self, header: int, payload: int) -> None:
        self._share(torch.tensor([header, payload], device=self._device))

    def _share(self, tensor: Tensor) -> None:
        group = self._group  # kept until the end: whoever drops it last waits for what gloo does
        if group is None:
            raise RuntimeError("the channel is closed")
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        group.broadcast([tensor], options).wait()
