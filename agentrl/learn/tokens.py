"""Trajectories as tokens in their contexts: what a pass through a model reads, whatever is done with it.

`R` rows, `L` positions of a row, `T` tokens of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from agentrl.chat import TurnTokens
from agentrl.types import Trajectory, Turn

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

_UNKNOWN = 0
"""Stands for the token after the end of a row, which is not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One context of a trajectory, from its first token to its last sampled one.

    Of two turns, `P0 + A0 + E0 + A1`, where the tokens of `A0` and `A1` are those in question.
    """

    ids_L: IntArray
    """All tokens as the engine saw and sampled them."""
    positions_T: IntArray
    """Where the tokens in question stand, in the order in which they were sampled. L: the unknown one after the end."""
    turn_T: IntArray
    """Number of the turn of each within the trajectory."""
    experts: tuple["ToldExperts", ...] = ()
    """What the engine told of the experts that it chose for these tokens."""


class ToldExperts(NamedTuple):
    """Experts of neighbouring tokens of a row (see `Completion.experts`)."""

    start: int
    """Position of the first one."""
    packed: bytes


def rows_of(turns: Sequence[Turn | TurnTokens]) -> list[Row]:
    """Lay the turns of an episode out as rows: one, and one more for each turn that rewrote the history."""
    begins = [k for k, turn in enumerate(turns) if k == 0 or not turn.extends]
    rows = []
    for begin, end in pairwise([*begins, len(turns)]):
        ids: list[int] = []
        positions: list[int] = []
        numbers: list[int] = []
        experts: list[ToldExperts] = []
        for k, turn in enumerate(turns[begin:end], start=begin):
            if isinstance(turn, Turn) and turn.experts:
                experts.append(ToldExperts(max(0, len(ids) - 1), turn.experts))
            ids.extend(turn.observation_ids)
            positions.extend(range(len(ids), len(ids) + len(turn.action_ids)))
            ids.extend(turn.action_ids)
            numbers.extend([k] * len(turn.action_ids))
        ids_L, positions_T, turn_T = (np.array(column, dtype=np.int64) for column in (ids, positions, numbers))
        rows.append(Row(ids_L=ids_L, positions_T=positions_T, turn_T=turn_T, experts=tuple(experts)))
    return rows


def with_end(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a trajectory, with the unknown token after its end in question too."""
    *before, last = rows
    return [
        *before,
        replace(
            last,
            positions_T=np.append(last.positions_T, len(last.ids_L)),
            turn_T=np.append(last.turn_T, last.turn_T.max(initial=-1) + 1),
        ),
    ]


def with_ends_of_turns(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a trajectory, with what follows the action of each turn but its last in question too."""
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
    """Tokens in their contexts. What is trained on them, or asked of them, are columns beside it."""

    rows: list[IntArray]
    """Token ids of each of the R rows."""
    row_T: IntArray
    """Row of each token."""
    position_T: IntArray
    """Position of each token's predecessor: where its distribution is read."""
    target_T: IntArray
    """The tokens themselves; 0 for the unknown one after the end of a row."""
    trajectory_T: IntArray
    """Number of the trajectory of each token, 0 to num_trajectories - 1."""
    turn_T: IntArray
    """Number of the turn within the trajectory."""
    groups: list[int]
    """Number of the group of each trajectory."""
    experts: list[tuple[ToldExperts, ...]]
    """What the engine told of the experts of each of the R rows."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Self:
        """Lay out trajectories, with all of their action tokens."""
        return cls.of_rows([rows_of(t.turns) for t in trajectories], group_ids=[t.group_id for t in trajectories])

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Row]], *, group_ids: Sequence[str]) -> Self:
        """Lay out the rows of each trajectory, and the group that it belongs to."""
        owned = [(number, row) for number, of_trajectory in enumerate(rows) for row in of_trajectory]
        lengths = np.array([len(row.positions_T) for _, row in owned], dtype=np.int64)
        return cls(
            rows=[row.ids_L for _, row in owned],
            row_T=np.repeat(np.arange(len(owned)), lengths),
            position_T=_joined([row.positions_T - 1 for _, row in owned]),
            target_T=_joined([np.append(row.ids_L, _UNKNOWN)[row.positions_T] for _, row in owned]),
            trajectory_T=np.repeat(np.array([number for number, _ in owned], dtype=np.int64), lengths),
            turn_T=_joined([row.turn_T for _, row in owned]),
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

    def kept(self, keep_T: npt.NDArray[np.bool_]) -> Self:
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
