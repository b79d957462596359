"""Tensors that wait in the host's memory while a GPU needs their room (`train.offload`)."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


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
