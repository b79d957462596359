"""Batches of ragged trajectories for the loss, and plain loops over their ratio units."""

from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.learn.loss import PolicyLoss, policy_loss
from agentrl.learn.tokens import Aggregation, RatioUnit, aggregation_weights, unit_index
from agentrl.learn.trust import TrustRegion

UNITS: tuple[RatioUnit, ...] = get_args(RatioUnit)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-14)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A global batch of ragged trajectories, flattened."""

    trajectory_T: npt.NDArray[np.int64]
    turn_T: npt.NDArray[np.int64]
    """Numbered within the trajectory."""
    version_T: npt.NDArray[np.int64]
    keep_T: npt.NDArray[np.bool_]
    policy_T: Tensor
    anchor_T: Tensor
    advantages_T: Tensor


def make_batch(seed: int, *, spread: float, drop: float = 0.0) -> Batch:
    """Up to five trajectories of up to four turns of one to five tokens; `spread` scales the log-ratios.

    Probabilities are below 1, also those that rose.
    """
    rng = np.random.default_rng(seed)
    rows = [
        (trajectory, turn, int(version))
        for trajectory in range(rng.integers(1, 6))
        for turn in range(rng.integers(1, 5))
        for version in np.sort(rng.integers(3, size=rng.integers(1, 6)))
    ]
    trajectory_T, turn_T, version_T = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    anchor_T = torch.from_numpy(-rng.exponential(size=len(rows)))
    return Batch(
        trajectory_T=trajectory_T,
        turn_T=turn_T,
        version_T=version_T,
        keep_T=rng.random(len(rows)) >= drop,
        policy_T=(anchor_T + spread * torch.from_numpy(rng.normal(size=len(rows)))).clamp(max=-1e-3),
        anchor_T=anchor_T,
        advantages_T=torch.from_numpy(rng.normal(size=len(rows))),
    )


def loss_and_gradient(
    batch: Batch, unit: RatioUnit, weight_T: Tensor, trust: TrustRegion, order: npt.NDArray[np.int64]
) -> tuple[PolicyLoss, Tensor]:
    """Apply `policy_loss` to the tokens in `order` alone, as one micro-batch; the gradient has its shape."""
    # Version runs follow the order of sampling, so units are numbered before the tokens are shuffled.
    rows = np.sort(order)
    units = unit_index(unit, batch.trajectory_T[rows], batch.turn_T[rows], batch.version_T[rows])
    unit_T = torch.from_numpy(units[np.searchsorted(rows, order)])
    index = torch.from_numpy(order)
    policy_T = batch.policy_T[index].clone().requires_grad_()
    result = policy_loss(
        policy_T,
        anchor_logprobs_T=batch.anchor_T[index],
        advantages_T=batch.advantages_T[index],
        unit_T=unit_T,
        weight_T=weight_T[index],
        trust=trust,
    )
    return result, torch.autograd.grad(result.loss, policy_T)[0]


def slow_units(batch: Batch, unit: RatioUnit) -> list[list[int]]:
    """List the kept tokens of each ratio unit with plain loops."""
    units: list[list[int]] = []
    last: tuple[int, ...] | None = None
    for t in range(len(batch.keep_T)):
        if not batch.keep_T[t]:
            continue
        key = {
            "trajectory": (int(batch.trajectory_T[t]),),
            "turn": (int(batch.trajectory_T[t]), int(batch.turn_T[t])),
            "version": (int(batch.trajectory_T[t]), int(batch.turn_T[t]), int(batch.version_T[t])),
            "token": (t,),
        }[unit]
        if key != last:
            units.append([])
        units[-1].append(t)
        last = key
    return units


def batch_weights(batch: Batch, aggregation: Aggregation) -> npt.NDArray[np.float64]:
    """Weigh the tokens that stay in the loss; 0 for the others."""
    weight_T = np.zeros(len(batch.keep_T))
    weight_T[batch.keep_T] = aggregation_weights(
        aggregation,
        trajectory_T=batch.trajectory_T[batch.keep_T],
        turn_T=batch.turn_T[batch.keep_T],
        constant_length=16 if aggregation == "constant" else None,
    )
    return weight_T
