"""What each token weighs in the loss, and which tokens share one importance ratio.

`T` action tokens of a minibatch: what one optimizer step is made of, on all processes. Both are computed over all of it,
before it is split among processes and micro-batches.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

RatioUnit = Literal["trajectory", "turn", "version", "token"]
"""The tokens that share one importance ratio."""
Aggregation = Literal["trajectory-mean", "turn-mean", "token-mean", "constant"]
"""How the tokens of a minibatch are averaged."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def unit_index(
    unit: RatioUnit, trajectory_T: npt.ArrayLike, turn_T: npt.ArrayLike, version_T: npt.ArrayLike
) -> IntArray:
    """Number the ratio units of tokens 0..U-1.

    A turn is a pair (trajectory, turn), so turns may be numbered within their trajectory. `version` is a run of equal
    policy versions within a turn: the tokens of a turn must come in the order in which they were sampled (other turns'
    tokens may lie between them). For the other units any order does.

    Tokens that leave the loss are in none of the three arrays.

    Shapes: `(T,)` integers each; returns int64 `(T,)`.

    Raises:
        ValueError: for a wrong rank, dtype or length, or an unknown unit.
    """
    trajectory_T, turn_T, version_T = _index_arrays(trajectory_T=trajectory_T, turn_T=turn_T, version_T=version_T)
    if unit == "token":
        return np.arange(len(trajectory_T), dtype=np.int64)
    if unit == "trajectory":
        return _dense(trajectory_T)
    if unit == "turn":
        return _dense(trajectory_T, turn_T)
    if unit == "version":
        turns_T = _dense(trajectory_T, turn_T)
        order_T = np.argsort(turns_T, kind="stable")
        starts_T = np.zeros(len(order_T), dtype=np.bool_)
        starts_T[1:] = (np.diff(turns_T[order_T]) != 0) | (np.diff(version_T[order_T]) != 0)
        units_T = np.empty(len(order_T), dtype=np.int64)
        units_T[order_T] = np.cumsum(starts_T)
        return units_T
    raise ValueError(f"expected unit 'trajectory', 'turn', 'version' or 'token', got {unit!r}")


def aggregation_weights(
    aggregation: Aggregation,
    *,
    trajectory_T: npt.ArrayLike,
    turn_T: npt.ArrayLike,
    constant_length: int | None = None,
) -> FloatArray:
    """Weight of each token in the loss, over the whole minibatch, before it is split among processes or micro-batches.

        trajectory-mean   1 / (N |y_i|)        every trajectory weighs 1/N, as in arXiv 2507.18071 eq. 5 and 13
        turn-mean         1 / (K |y_ik|)       every turn weighs 1/K
        token-mean        1 / sum_i |y_i|      every token weighs the same
        constant          1 / (N L)            every token weighs the same, whatever the lengths

    N, K and |y| count trajectories, (trajectory, turn) pairs and tokens, those of advantage 0 too. L is `constant_length`.
    Tokens that leave the loss are in none of the arrays, and count nowhere.

    Shapes: `(T,)` integers, in any order; returns float64 `(T,)`.

    Raises:
        ValueError: for a wrong rank, dtype or length, an unknown aggregation, or a `constant_length` that is missing or
            of no use.
    """
    trajectory_T, turn_T = _index_arrays(trajectory_T=trajectory_T, turn_T=turn_T)
    if (aggregation == "constant") != (constant_length is not None):
        raise ValueError(
            f"constant_length goes with aggregation 'constant' and no other, got {aggregation!r} and {constant_length}"
        )
    if not len(trajectory_T):
        return np.empty(0, dtype=np.float64)
    trajectories_T = _dense(trajectory_T)
    num_trajectories = trajectories_T.max() + 1
    if aggregation == "trajectory-mean":
        denominator_T = num_trajectories * np.bincount(trajectories_T)[trajectories_T]
    elif aggregation == "turn-mean":
        turns_T = _dense(trajectory_T, turn_T)
        denominator_T = (turns_T.max() + 1) * np.bincount(turns_T)[turns_T]
    elif aggregation == "token-mean":
        denominator_T = np.full(len(trajectory_T), len(trajectory_T))
    elif constant_length is not None:
        if constant_length < 1:
            raise ValueError(f"expected constant_length >= 1, got {constant_length}")
        denominator_T = np.full(len(trajectory_T), num_trajectories * constant_length)
    else:
        raise ValueError(
            f"expected aggregation 'trajectory-mean', 'turn-mean', 'token-mean' or 'constant', got {aggregation!r}"
        )
    weight_T: FloatArray = 1 / denominator_T
    return weight_T


def _index_arrays(**arrays: npt.ArrayLike) -> list[IntArray]:
    """Check integer arrays of one length."""
    checked = {name: np.asarray(array) for name, array in arrays.items()}
    length = len(next(iter(checked.values())))
    for name, array in checked.items():
        # An empty list has no integers to tell its dtype by.
        if array.shape != (length,) or (length and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(f"expected {name} integers of shape ({length},), got {array.dtype} of {array.shape}")
    return [array.astype(np.int64) for array in checked.values()]


def _dense(*keys: IntArray) -> IntArray:
    """Number the distinct (tuples of) keys 0, 1, ... in sorted order."""
    index_T = np.unique(keys[0], return_inverse=True)[1].astype(np.int64)
    for key_T in keys[1:]:
        distinct, inner_T = np.unique(key_T, return_inverse=True)
        index_T = np.unique(index_T * len(distinct) + inner_T, return_inverse=True)[1].astype(np.int64)
    return index_T
