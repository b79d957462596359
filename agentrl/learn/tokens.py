"""Trajectories as tokens in their contexts, what each weighs in the loss, and which share one importance ratio.

`R` rows, `L` positions of a row, `T` action tokens of a batch or minibatch. Weights and units are computed over a whole
minibatch, before it is split among ranks and micro-batches. No torch here: checks of credit schemes read these names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from agentrl.chat import TurnTokens
from agentrl.types import Trajectory, Turn, chains_of, path_to

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

_UNKNOWN = 0
"""Placeholder for the unknown token after the end of a row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One context of a trajectory, from its first token to its last sampled one.

    Two turns make the row `P0 + A0 + E0 + A1`, in which the tokens of `A0` and `A1` are selected.
    """

    ids_L: IntArray
    """All tokens as the engine saw and sampled them."""
    positions_T: IntArray
    """Positions of the selected tokens, in the order in which they were sampled. L: the unknown token after the end."""
    turn_T: IntArray
    """Turn of each selected token, numbered within the trajectory."""
    experts: tuple["EngineExperts", ...] = ()
    """Experts that the engine chose for these tokens, if it returned them."""


class EngineExperts(NamedTuple):
    """Experts of neighbouring tokens of a row (see `Completion.experts`)."""

    start: int
    """Position of the first one."""
    packed: bytes


def rows_of(turns: Sequence[Turn | TurnTokens]) -> list[Row]:
    """Lay the turns of an episode out as rows: one, and one more for each turn that rewrote the history or forked.

    A fork's row begins with the turns that it continues. They are context there; their tokens are selected in their own rows.
    """
    rows = []
    for chain in chains_of(turns):
        ids: list[int] = []
        positions: list[int] = []
        numbers: list[int] = []
        experts: list[EngineExperts] = []
        for k in path_to(turns, chain[-1]):
            turn = turns[k]
            if isinstance(turn, Turn) and turn.experts:
                experts.append(EngineExperts(max(0, len(ids) - 1), turn.experts))
            ids.extend(turn.observation_ids)
            if k >= chain[0]:
                positions.extend(range(len(ids), len(ids) + len(turn.action_ids)))
                numbers.extend([k] * len(turn.action_ids))
            ids.extend(turn.action_ids)
        ids_L, positions_T, turn_T = (np.array(column, dtype=np.int64) for column in (ids, positions, numbers))
        rows.append(Row(ids_L=ids_L, positions_T=positions_T, turn_T=turn_T, experts=tuple(experts)))
    return rows


def with_end(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a trajectory, with the unknown token after its last turn selected too."""
    last_R = [row.turn_T.max(initial=-1) for row in rows]
    number = max(range(len(rows)), key=lambda r: (last_R[r], r))
    last = rows[number]
    ended = replace(
        last,
        positions_T=np.append(last.positions_T, len(last.ids_L)),
        turn_T=np.append(last.turn_T, last_R[number] + 1),
    )
    return [*rows[:number], ended, *rows[number + 1 :]]


def with_ends_of_turns(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a trajectory, with the token after the action of each turn but its last selected too."""
    last = max((row.turn_T.max(initial=-1) for row in rows), default=-1)
    found = []
    for row in rows:
        is_end_T = np.append(np.diff(row.turn_T) != 0, True)[: len(row.turn_T)] & (row.turn_T != last)
        (end_K,) = np.nonzero(is_end_T)
        positions_T = np.insert(row.positions_T, end_K + 1, row.positions_T[end_K] + 1)
        found.append(replace(row, positions_T=positions_T, turn_T=np.insert(row.turn_T, end_K + 1, row.turn_T[end_K])))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """Tokens in their contexts, in the order of trajectories and turns. Values of the tokens are kept in separate columns."""

    rows: list[IntArray]
    """Token ids of each of the R rows."""
    row_T: IntArray
    """Row of each token."""
    position_T: IntArray
    """Position of each token's predecessor, at which its distribution is read."""
    target_T: IntArray
    """The tokens themselves; 0 for the unknown one after the end of a row."""
    trajectory_T: IntArray
    """Number of the trajectory of each token, 0 to num_trajectories - 1."""
    turn_T: IntArray
    """Number of the turn within the trajectory."""
    groups: list[int]
    """Number of the group of each trajectory."""
    experts: list[tuple[EngineExperts, ...]]
    """Experts that the engine returned for each of the R rows."""

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Self:
        """Lay out trajectories, with all of their action tokens."""
        return cls.from_rows([rows_of(t.turns) for t in trajectories], group_ids=[t.group_id for t in trajectories])

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Row]], *, group_ids: Sequence[str]) -> Self:
        """Lay out the rows of each trajectory, and the group that it belongs to."""
        owned = [(number, row) for number, of_trajectory in enumerate(rows) for row in of_trajectory]
        lengths = np.array([len(row.positions_T) for _, row in owned], dtype=np.int64)
        turn_T = _joined([row.turn_T for _, row in owned])
        trajectory_T = np.repeat(np.array([number for number, _ in owned], dtype=np.int64), lengths)
        order_T = np.lexsort((turn_T, trajectory_T))  # turns of one row may lie between those of another
        return cls(
            rows=[row.ids_L for _, row in owned],
            row_T=np.repeat(np.arange(len(owned)), lengths)[order_T],
            position_T=_joined([row.positions_T - 1 for _, row in owned])[order_T],
            target_T=_joined([np.append(row.ids_L, _UNKNOWN)[row.positions_T] for _, row in owned])[order_T],
            trajectory_T=trajectory_T[order_T],
            turn_T=turn_T[order_T],
            groups=np.unique(group_ids, return_inverse=True)[1].tolist(),
            experts=[row.experts for _, row in owned],
        )

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, those without a token included."""
        return len(self.groups)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.target_T)

    def select(self, keep_T: npt.NDArray[np.bool_]) -> Self:
        """Return the batch of some of its tokens; the others are context only."""
        return replace(
            self,
            row_T=self.row_T[keep_T],
            position_T=self.position_T[keep_T],
            target_T=self.target_T[keep_T],
            trajectory_T=self.trajectory_T[keep_T],
            turn_T=self.turn_T[keep_T],
        )


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


RatioUnit = Literal["trajectory", "turn", "version", "token"]
"""The tokens that share one importance ratio."""
Aggregation = Literal["trajectory-mean", "turn-mean", "token-mean", "constant"]
"""Average over the tokens of a minibatch."""

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
    """Weight of each token in the loss, over the whole minibatch, before it is split among ranks or micro-batches.

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
        # An empty list has no integers from which its dtype is known.
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
