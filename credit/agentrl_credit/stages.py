"""The pure functions that credit schemes are made of: arrays in, float64 arrays out.

Legend: `K` turns of a trajectory, `N` values that are compared with one another (a cell), such as a group's returns.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from agentrl import Credit, CreditError, Trajectory, TrajectoryGroup

Array = npt.NDArray[np.float64]

Lone = Literal["error", "keep", "drop"]
"""What becomes of a trajectory that has no sibling to be compared with: stop; advantage 0; out of the loss."""

FLAT = 1e-12
"""Values whose spread is below this share of their largest magnitude differ by rounding alone."""


def is_flat(values_N: npt.ArrayLike) -> bool:
    """Tell whether all values are equal but for rounding: max - min <= 1e-12 * max |x|.

    Rewards such as .1 + .2 and .3 are equal to their author; divided by their standard deviation they would not be.
    """
    values = _vector(values_N)
    return values.size == 0 or bool(np.ptp(values) <= FLAT * np.abs(values).max())


def returns_to_go(rewards_K: npt.ArrayLike, *, gamma: float) -> Array:
    """Sum what each turn and those after it earn; the discount ticks once per turn, however many tokens it has.

    G_k = r_k + gamma * G_{k+1}, with G_K = 0.

    Shapes: rewards_K (K,) -> (K,).
    """
    returns_K = _vector(rewards_K).copy()
    for k in range(returns_K.size - 2, -1, -1):
        returns_K[k] += gamma * returns_K[k + 1]
    return returns_K


def center(values_N: npt.ArrayLike) -> Array:
    """Subtract the mean: x_n - mean(x), exactly 0 where all are equal.

    Source: Dr. GRPO, arXiv 2503.20783. Shapes: (N,) -> (N,).
    """
    values = _vector(values_N)
    return np.zeros_like(values) if is_flat(values) else values - values.mean()


def standard_deviation(values_N: npt.ArrayLike, *, ddof: int) -> float:
    """Return sqrt(sum (x_n - mean)^2 / (N - ddof)); exactly 0 where all are equal or N <= ddof."""
    values = _vector(values_N)
    return 0.0 if is_flat(values) or values.size <= ddof else float(values.std(ddof=ddof))


def group_normalize(values_N: npt.ArrayLike, *, ddof: int, eps: float) -> Array:
    """Standardise: (x_n - mean) / (sd + eps), exactly 0 where all are equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2, which leaves `ddof` and `eps` open. Shapes: (N,) -> (N,).
    """
    return center(values_N) / (standard_deviation(values_N, ddof=ddof) + eps)


def leave_one_out(values_N: npt.ArrayLike, *, owners_N: npt.ArrayLike | None = None) -> Array:
    """Subtract the mean of what the others got: x_n - mean{x_m : owner_m != owner_n}; 0 where there are no others.

    Without `owners_N` each value is its own owner, which is RLOO, arXiv 2402.14740. With them, all values of the same
    owner leave the baseline, so that it stays independent of a trajectory that has several values in the cell.

    Shapes: values_N (N,), owners_N (N,) of integers -> (N,).
    """
    values = _vector(values_N)
    owners = np.arange(values.size) if owners_N is None else np.asarray(owners_N)
    if owners.shape != values.shape:
        raise CreditError(f"owners_N must have one entry for each value, got shapes {owners.shape} and {values.shape}")
    advantages = np.zeros_like(values)
    if is_flat(values):
        return advantages
    for owner in np.unique(owners):
        own = owners == owner
        # The others are averaged by themselves: taking the own values off a total would leave their rounding in it.
        if not own.all():
            advantages[own] = values[own] - values[~own].mean()
    return advantages


def per_group(
    groups: Sequence[TrajectoryGroup], credit: Callable[[Sequence[Trajectory]], Sequence[Credit]], *, lone: Lone
) -> list[list[Credit]]:
    """Credit group by group: `credit` gets its trajectories that did not fail (two or more) and credits them in order.

    Failed trajectories are excluded from the loss, and a lone one is treated as `lone` says.

    Raises:
        CreditError: for a lone trajectory where `lone` is "error".
    """
    result = []
    for group in groups:
        valid = group.valid
        found = iter(credit(valid) if len(valid) > 1 else [_lone_credit(t, group=group, lone=lone) for t in valid])
        result.append([Credit.excluded(t) if t.failed else next(found) for t in group.trajectories])
    return result


def _lone_credit(trajectory: Trajectory, *, group: TrajectoryGroup, lone: Lone) -> Credit:
    if lone == "error":
        raise CreditError(
            f"group {group.group_id} has one valid trajectory, {trajectory.trajectory_id}, and nothing to compare it "
            "with: make groups larger, or set lone: keep (advantage 0) or lone: drop (out of the loss)"
        )
    return Credit.uniform(trajectory, 0.0) if lone == "keep" else Credit.excluded(trajectory)


def _vector(values: npt.ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise CreditError(f"expected one number for each entry, shape (N,), got shape {array.shape}")
    return array
