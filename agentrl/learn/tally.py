"""What a minibatch shows: of each token on the process that computes it, in sums on all.

`I` trajectories of a minibatch; `T` trained tokens of a pass, `U` its ratio units.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Observations:
    """What this process's passes over a minibatch showed; grows by micro-batches."""

    columns: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    """Of each name an array for each micro-batch, no wider than what was observed. See `passes`."""
    loss: float = 0.0

    def add(self, **tensors: Tensor) -> None:
        """Append observations to the columns of these names."""
        for name, tensor in tensors.items():
            self.columns.setdefault(name, []).append(_narrow(tensor.detach()).cpu().numpy())

    def passes(self) -> Iterator[dict[str, Array]]:
        """Yield what each micro-batch showed, by name."""
        for columns in zip(*self.columns.values(), strict=True):
            yield {name: array.astype(np.float64) for name, array in zip(self.columns, columns, strict=True)}

    def column(self, name: str) -> Array:
        """Return all observations of a name."""
        return np.concatenate([np.empty(0), *self.columns.get(name, [])])


class Sums(NamedTuple):
    """Some numbers, in as many bytes however many they are. All is 0 where there are none."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Of their distances from their mean."""
    peak: float = 0.0
    """The largest."""

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> "Sums":
        """Add up."""
        if not len(values):
            return cls()
        total = float(np.sum(values, dtype=np.float64))
        squares = float(np.sum((values - total / len(values)) ** 2))
        return cls(len(values), total, squares, float(values.max()))

    def plus(self, other: "Sums") -> "Sums":
        """Return those of both together.

        Source: "Updating formulae and a pairwise algorithm for computing sample variances", Chan, Golub and LeVeque, 1979.
        """
        if not (self.num and other.num):
            return self if self.num else other
        num, gap = self.num + other.num, other.mean - self.mean
        squares = self.squares + other.squares + gap * gap * self.num * other.num / num  # gap**2 would raise for 1e200
        return Sums(num, self.total + other.total, squares, max(self.peak, other.peak))

    @property
    def mean(self) -> float:
        """Mean."""
        return self.total / self.num if self.num else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation."""
        return sqrt(self.squares / self.num) if self.num else 0.0


def together(parts: Iterable[Mapping[Key, Sums]]) -> dict[Key, Sums]:
    """Return the sums of parts, by key."""
    found: dict[Key, Sums] = {}
    for part in parts:
        for key, sums in part.items():
            found[key] = found[key].plus(sums) if key in found else sums
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one minibatch showed. Its size does not depend on how many tokens there are: processes gather it."""

    sums: Mapping[str, Sums] = field(default_factory=dict)
    """By name. `T` of tokens, `U` of ratio units."""
    trajectories: Mapping[int, float] = field(default_factory=dict)
    """Sum over the tokens of policy - behavior log-probabilities, by number in the minibatch."""
    versions: Mapping[int, Sums] = field(default_factory=dict)
    """Of |anchor - behavior| log-probabilities, by the policy version that sampled the token."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the gradient before it was clipped."""
    learning_rate: float = 0.0

    @classmethod
    def of(cls, observations: Observations) -> "Tally":
        """Add up what this process saw."""
        tally = cls.joined([_of_pass(part) for part in observations.passes()])
        return replace(tally, loss=observations.loss)

    @classmethod
    def joined(cls, parts: "Sequence[Tally]") -> "Tally":
        """Return what parts of one minibatch showed together."""
        trajectories: dict[int, float] = {}
        for part in parts:
            for number, total in part.trajectories.items():
                trajectories[number] = trajectories.get(number, 0.0) + total
        return cls(
            sums=together(part.sums for part in parts),
            trajectories=trajectories,
            versions=together(part.versions for part in parts),
            loss=sum(part.loss for part in parts),
        )

    def __getitem__(self, name: str) -> Sums:
        """Return the sums of a name; none where it was not observed."""
        return self.sums.get(name, Sums())


def _of_pass(part: Mapping[str, Array]) -> Tally:
    index_T, ratio_U, log_ratio_T = part["unit_T"].astype(np.int64), part["ratio_U"], part["log_ratio_T"]
    engine_T, version_T, trajectory_T = (
        part["engine_difference_T"],
        part["version_T"].astype(np.int64),
        part["trajectory_T"].astype(np.int64),
    )
    moved_T = part["moved_T"][~np.isnan(part["moved_T"])]  # those whose log-probability before the step is known
    clipped_T, is_up_T, is_down_T = part["clipped_T"], part["advantage_T"] > 0, part["advantage_T"] < 0
    clipped_U, has_up_U, has_down_U = (
        np.bincount(index_T, weights=what_T) > 0 for what_T in (clipped_T, is_up_T, is_down_T)
    )
    alone = ("entropy_T", "engine_difference_T", "reference_kl_T", "mismatch_U", "limited_U", "rejected_U")
    columns = {name: part[name] for name in alone if name in part} | {
        "ratio_U": ratio_U,
        "ratio_deviation_U": np.abs(ratio_U - 1),
        "token_ratio_T": np.exp(log_ratio_T),
        "anchor_distance_T": np.abs(log_ratio_T),
        "engine_distance_T": np.abs(engine_T),
        # Source: "Approximating KL divergence", J. Schulman, 2020 (k3).
        "divergence_T": np.expm1(moved_T.clip(max=80)) - moved_T,
        "clipped_T": clipped_T,
        "clipped_up_T": clipped_T * is_up_T,
        "clipped_down_T": clipped_T * is_down_T,
        "clipped_U": clipped_U,
        "mixed_U": has_up_U & has_down_U,
        "one_sided_U": clipped_U & has_up_U & has_down_U,
    }
    distance_T, total_I = np.abs(engine_T - log_ratio_T), np.bincount(trajectory_T, weights=engine_T)
    return Tally(
        sums={name: Sums.of(column) for name, column in columns.items()},
        trajectories={int(number): float(total_I[number]) for number in np.unique(trajectory_T)},
        versions={int(version): Sums.of(distance_T[version_T == version]) for version in np.unique(version_T)},
    )


def _narrow(tensor: Tensor) -> Tensor:
    """Return whole numbers, which are counts and places, in 32 bits, and others in 32 or 64."""
    if tensor.dtype == torch.bool or tensor.dtype == torch.float64:
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.int()
