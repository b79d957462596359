"""Snapshots of trained weights: those of earlier policy versions, and the line search within `train.target_kl`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.learn.policy_state import PolicyState


class TrainedWeights:
    """The weights of a policy that require a gradient; if they are sharded, this rank's shards."""

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
        """Return a copy of the weights."""
        return [local.clone() for local in self.locals()]

    def set(self, weights: list[Tensor], *, share: float = 1.0) -> None:
        """Move the weights to others, or a share of the way."""
        with torch.no_grad():
            for local, value in zip(self.locals(), weights, strict=True):
                local.lerp_(value.to(local.device), share) if share < 1 else local.copy_(value)


class KeptVersions:
    """The trained weights of the newest versions, in the host's memory: adapters alone where these are trained.

    If weights are sharded, each rank keeps its shard.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, most: int) -> None:
        """Keep nothing yet.

        Args:
            parameters: parameters of the policy. Those that require no gradient are the same in every version.
            most: number of versions to keep. 0: none.
        """
        self._trained = TrainedWeights(parameters)
        self._most = most
        self._weights: dict[int, list[Tensor]] = {}

    @property
    def versions(self) -> frozenset[int]:
        """Versions that are kept."""
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


_MOST_HALVINGS = 6


class KLLineSearch:
    """Bounds the KL divergence between the policy before a step and after each of its updates, by backtracking.

    A trust region of the loss stops the push on tokens that have moved; it does not bound the effect of other tokens'
    updates on them. Source of the line search: TRPO, arXiv 1502.05477, appendix C.
    """

    def __init__(self, state: PolicyState, *, target: float | None) -> None:
        """Begin a step.

        Args:
            state: the policy.
            target: the bound, in nats a token. None: there is none.
        """
        self.target = target
        self._weights = TrainedWeights(state.policy.parameters())
        self._before: list[Tensor] | None = None
        self._num_updates = 0
        self._is_counted = False
        """Whether the newest update is counted as shortened: minibatches after it that have no gradient check it again."""

    def keep_weights(self) -> None:
        """Keep the weights before an update, in the host's memory: a single copy, which the next one overwrites."""
        if self.target is None:
            return
        present = self._weights.locals()
        if self._before is None:
            self._before = [torch.empty_like(local, device="cpu", pin_memory=local.is_cuda) for local in present]
        for kept, local in zip(self._before, present, strict=True):
            kept.copy_(local, non_blocking=True)  # the device makes the copy before the update, which it is given later
        self._is_counted = False

    def backtrack(self, divergence: float, measure: Callable[[], float]) -> bool:
        """Halve the newest update until the policy is within the bound; return whether that was necessary.

        Args:
            divergence: divergence of the policy from that before the step, in nats a token.
            measure: measures it again, after the update was shortened.
        """
        if self.target is None or self._before is None:
            return False
        halvings = 0
        while divergence > self.target and halvings < _MOST_HALVINGS:
            halvings += 1
            self._weights.set(self._before, share=0.5 if halvings < _MOST_HALVINGS else 1.0)
            divergence = measure()
        if halvings and not self._is_counted:
            self._num_updates, self._is_counted = self._num_updates + 1, True
        return halvings > 0

    def metrics(self) -> dict[str, float]:
        """Return the number of updates that were shortened."""
        return {} if self.target is None else {"shortened_updates": float(self._num_updates)}
