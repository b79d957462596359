"""The pure functions that credit schemes are made of: arrays in, float64 arrays out.

reward transform -> return -> baseline -> normalise -> combine -> tokens: a scheme is a few of these in a row.

Legend: `K` turns of a trajectory, `T` tokens, `N` values that are compared cell by cell, such as all turns of a batch.
A cell is a set of values that are compared with one another; `cells_N` labels the cell of each value by an integer, and
None is one cell for all. `owners_N` labels whose each value is: values of one owner (a trajectory) share their baseline.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl import CreditError

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

FLAT = 1e-12
"""Values whose spread is below this share of their largest magnitude differ by rounding alone."""


def returns_to_go(rewards_K: npt.ArrayLike, *, gamma: float) -> Array:
    """Sum what each turn and those after it earn; the discount ticks once per turn, however many tokens it has.

    G_k = r_k + gamma * G_{k+1}, with G_K = 0.

    Shapes: rewards_K (K,) -> (K,).
    """
    returns_K = _vector(rewards_K).copy()
    reach = 1
    while reach < returns_K.size:  # each pass doubles how many turns the sums reach
        returns_K[:-reach] += gamma**reach * returns_K[reach:]
        reach *= 2
    return returns_K


def discounted_sum(rewards: Iterable[float], *, gamma: float) -> float:
    """Return r_0 + gamma * r_1 + gamma^2 * r_2 + ..., the first of `returns_to_go`."""
    total = 0.0
    for reward in reversed([*rewards]):
        total = reward + gamma * total
    return total


def gae(
    rewards_K: npt.ArrayLike, values_K: npt.ArrayLike, *, gamma: float, lam: float, final_value: float = 0.0
) -> Array:
    """Generalised advantage estimation over steps, turns or tokens.

    A_k = delta_k + gamma * lam * A_{k+1},    delta_k = r_k + gamma * V_{k+1} - V_k,    V_K = final_value

    Source: arXiv 1506.02438, eq. 16. `final_value` is 0 if the task ended; a truncated trajectory has the value of
    what it was cut off from. Shapes: (K,), (K,) -> (K,).

    Raises:
        CreditError: when there is not one value for each reward.
    """
    rewards, values = _vector(rewards_K), _vector(values_K)
    if rewards.size != values.size:
        raise CreditError(f"expected one value for each reward, got {values.size} values and {rewards.size} rewards")
    deltas_K = rewards + gamma * np.append(values[1:], final_value)[: values.size] - values
    return returns_to_go(deltas_K, gamma=gamma * lam)


def broadcast_turns(values_K: npt.ArrayLike, lengths_K: npt.ArrayLike) -> Array:
    """Give each turn's number to every token of its action. Shapes: (K,), (K,) integers -> (T,), T = sum(lengths)."""
    return np.repeat(_vector(values_K), np.asarray(lengths_K, dtype=np.int64))


def label(keys: Iterable[Hashable]) -> Ints:
    """Number equal keys alike: 0, 1, ... in the order in which they first appear. Shape: N keys -> (N,)."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


class CellMeans(NamedTuple):
    """The mean over each value's cell, and how many values it is a mean of."""

    mean_N: Array
    """0 if the count is 0."""
    count_N: Ints


def cell_means(
    values_N: npt.ArrayLike,
    cells_N: npt.ArrayLike | None = None,
    *,
    owners_N: npt.ArrayLike | None = None,
    counted_N: npt.ArrayLike | None = None,
) -> CellMeans:
    """Average over each value's cell: mean_n = mean{x_m : cell_m = cell_n}; with owners, over {... , owner_m != owner_n}.

    With `owners_N` the mean of a value is independent of its owner, who may have several values in the cell. Values
    with `counted_N` False get a mean and enter none: questions about a cell.

    Shapes: (N,) each -> (N,), (N,).
    """
    values, cells = _vector(values_N), _labels(cells_N, like=values_N)
    counted = np.ones(values.size, dtype=np.bool_) if counted_N is None else np.asarray(counted_N, dtype=np.bool_)
    # Deviations from one value of the cell: sums then keep the digits in which the values differ.
    first = np.zeros(cells.max(initial=-1) + 1)
    first[cells[counted]] = values[counted]
    deviations = np.where(counted, values - first[cells], 0.0)
    total, count = _sums(deviations, cells), _sums(counted, cells)
    if owners_N is not None:
        own = _joint(cells, _labels(owners_N, like=values_N))
        total, count = total - _sums(deviations, own), count - _sums(counted, own)
    mean = np.where(count > 0, first[cells] + total / np.maximum(count, 1), 0.0)
    return CellMeans(mean, np.rint(count).astype(np.int64))


def shrink(means: CellMeans, priors_N: npt.ArrayLike, *, kappa: float) -> Array:
    """Pull a mean of few values towards a prior: (n * mean + kappa * prior) / (n + kappa); the prior where n = 0.

    kappa is the number of values that the prior weighs as much as. Shapes: (N,) each -> (N,).
    """
    priors = _vector(priors_N)
    weight: Array = means.count_N / np.maximum(means.count_N + kappa, FLAT)
    return priors + weight * (means.mean_N - priors)


def is_flat(values_N: npt.ArrayLike, cells_N: npt.ArrayLike | None = None) -> Bools:
    """Return for each value whether its cell's are all equal but for rounding: max - min <= 1e-12 * max |x|.

    Rewards such as .1 + .2 and .3 are equal to their author; divided by their standard deviation they would not be.
    Shapes: (N,) -> (N,).
    """
    values, cells = _vector(values_N), _labels(cells_N, like=values_N)
    size = cells.max(initial=-1) + 1
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, cells, values)
    np.maximum.at(high, cells, values)
    is_flat_C: Bools = high - low <= FLAT * np.maximum(np.abs(low), np.abs(high))
    return is_flat_C[cells]


def center(values_N: npt.ArrayLike, cells_N: npt.ArrayLike | None = None) -> Array:
    """Subtract the cell's mean: x_n - mean(x), exactly 0 if all are equal.

    Source: Dr. GRPO, arXiv 2503.20783. Shapes: (N,) -> (N,).
    """
    values = _vector(values_N)
    return np.where(is_flat(values, cells_N), 0.0, values - cell_means(values, cells_N).mean_N)


def standard_deviation(values_N: npt.ArrayLike, cells_N: npt.ArrayLike | None = None, *, ddof: int) -> Array:
    """Return each cell's sqrt(sum (x_n - mean)^2 / (n - ddof)); exactly 0 if all are equal or n <= ddof.

    Shapes: (N,) -> (N,), the same number throughout a cell.
    """
    cells = _labels(cells_N, like=values_N)
    squares, count = _sums(center(values_N, cells) ** 2, cells), _sums(np.ones(cells.size), cells)
    return np.where(count > ddof, np.sqrt(squares / np.maximum(count - ddof, 1)), 0.0)


def group_normalize(values_N: npt.ArrayLike, cells_N: npt.ArrayLike | None = None, *, ddof: int, eps: float) -> Array:
    """Standardise: (x_n - mean) / (sd + eps), exactly 0 if all of a cell are equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2, which leaves `ddof` and `eps` open. Shapes: (N,) -> (N,).
    """
    return center(values_N, cells_N) / (standard_deviation(values_N, cells_N, ddof=ddof) + eps)


def leave_one_out(
    values_N: npt.ArrayLike, cells_N: npt.ArrayLike | None = None, *, owners_N: npt.ArrayLike | None = None
) -> Array:
    """Subtract the mean of what the others got: x_n - mean{x_m : owner_m != owner_n}; 0 if there are no others.

    Without `owners_N` each value is its own owner, which is RLOO, arXiv 2402.14740. With them, all values of the same
    owner leave the baseline, so that it stays independent of a trajectory that has several values in the cell.

    Shapes: values_N (N,), owners_N (N,) of integers -> (N,).
    """
    values = _vector(values_N)
    others = cell_means(values, cells_N, owners_N=np.arange(values.size) if owners_N is None else owners_N)
    return np.where((others.count_N == 0) | is_flat(values, cells_N), 0.0, values - others.mean_N)


def batch_normalize(advantages_N: npt.ArrayLike, *, ddof: int, eps: float) -> Array:
    """Divide by the standard deviation over the whole batch, plus eps; the mean is not moved.

    Advantages that are all equal have no spread to divide by, and stay as they are. Shapes: (N,) -> (N,).
    """
    spread_N = standard_deviation(advantages_N, ddof=ddof)
    divisor_N: Array = np.where(spread_N > 0, spread_N + eps, 1.0)
    return _vector(advantages_N) / divisor_N


def _sums(values_N: npt.NDArray[np.generic], cells_N: Ints) -> Array:
    """Return each cell's sum, at each of its members."""
    return np.bincount(cells_N, weights=values_N)[cells_N].astype(np.float64)


def _labels(labels_N: npt.ArrayLike | None, *, like: npt.ArrayLike) -> Ints:
    size = _vector(like).size
    labels = np.zeros(size, dtype=np.int64) if labels_N is None else np.asarray(labels_N)
    if labels.shape != (size,) or (size and labels.dtype.kind != "i"):
        raise CreditError(f"expected one integer label for each of {size} values, got {labels.dtype} of {labels.shape}")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _joint(first_N: Ints, second_N: Ints) -> Ints:
    """Label pairs of labels."""
    return np.unique(first_N * (second_N.max(initial=0) + 1) + second_N, return_inverse=True)[1].astype(np.int64)


def _vector(values: npt.ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise CreditError(f"expected one number for each entry, shape (N,), got shape {array.shape}")
    return array
