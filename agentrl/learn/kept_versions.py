"""Weights of earlier policy versions, by which the trainer computes again what they sampled."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class TrainedWeights:
    """The weights of a policy that require a gradient, as they are; of those that are shared out, this process's shards."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the parameters of the policy."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    def locals(self) -> list[Tensor]:
        """Return them, without copying."""
        return [
            parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
            for parameter in self._parameters
        ]

    def copy(self) -> list[Tensor]:
        """Return what they are now."""
        return [local.clone() for local in self.locals()]

    def set(self, weights: list[Tensor], *, share: float = 1.0) -> None:
        """Move them to others, or a share of the way."""
        with torch.no_grad():
            for local, value in zip(self.locals(), weights, strict=True):
                local.lerp_(value.to(local.device), share) if share < 1 else local.copy_(value)


class KeptVersions:
    """The trained weights of the newest versions, in the host's memory: adapters alone where these are trained.

    Of weights that are shared out, each process keeps its shard.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, most: int) -> None:
        """Keep nothing yet.

        Args:
            parameters: of the policy. Those that require no gradient are the same in every version.
            most: versions that are kept. 0: none is.
        """
        self._trained = TrainedWeights(parameters)
        self._most = most
        self._weights: dict[int, list[Tensor]] = {}

    @property
    def versions(self) -> frozenset[int]:
        """Those that are kept."""
        return frozenset(self._weights)

    def keep(self, version: int) -> None:
        """Keep the present weights as those of a version, and forget the oldest."""
        if self._most:
            self._weights[version] = [local.to("cpu", copy=True) for local in self._trained.locals()]
            while len(self._weights) > self._most:
                del self._weights[min(self._weights)]

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Return a context in which the policy has the weights of a version that is kept."""
        present = self._trained.copy()
        self._trained.set(self._weights[version])
        try:
            yield
        finally:
            self._trained.set(present)
