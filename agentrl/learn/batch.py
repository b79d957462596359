"""Trajectories to tensors. Loss masks are by construction: a token is trained because it was sampled.

`R` rows, `L` positions of a row, `T` trained tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.credit import Credit
from agentrl.learn.loss import Aggregation, RatioUnit, aggregation_weights, unit_index
from agentrl.types import Trajectory

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One context of a trajectory, from its first token to its last sampled one."""

    ids_L: IntArray
    """All tokens as the engine saw and sampled them."""
    positions_T: IntArray
    """Where the sampled tokens stand, in the order in which they were sampled."""


def rows_of(trajectory: Trajectory) -> list[Row]:
    """Lay a trajectory out as rows: one, and one more for each turn that rewrote the history."""
    rows = []
    for segment in trajectory.segments():
        ids: list[int] = []
        positions: list[int] = []
        for turn in segment:
            ids.extend(turn.observation_ids)
            positions.extend(range(len(ids), len(ids) + len(turn.action_ids)))
            ids.extend(turn.action_ids)
        rows.append(Row(ids_L=np.array(ids, dtype=np.int64), positions_T=np.array(positions, dtype=np.int64)))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The tokens of one optimizer step, with weights computed over all of it, before any split."""

    rows: list[IntArray]
    """Token ids of each of the R rows."""
    row_T: IntArray
    """Row of each trained token."""
    position_T: IntArray
    """Position of each trained token's predecessor: where its distribution is read."""
    target_T: IntArray
    """The trained tokens themselves."""
    trajectory_T: IntArray
    """Number of the trajectory of each token, 0 to num_trajectories - 1."""
    turn_T: IntArray
    """Number of the turn within the trajectory."""
    version_T: IntArray
    """Policy version that sampled the token."""
    behavior_T: FloatArray
    """Log-probability under which the token was sampled."""
    advantage_T: FloatArray
    weight_T: FloatArray
    """Share of each token in the loss (see `aggregation_weights`)."""
    unit_T: IntArray
    """Ratio unit of each token."""
    num_trajectories: int
    groups: list[int]
    """Number of the group of each trajectory."""


def make_batch(
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    *,
    unit: RatioUnit,
    aggregation: Aggregation,
    constant_length: int | None = None,
) -> Batch:
    """Lay out the trajectories of one optimizer step. Tokens that credit does not keep are context only."""
    rows: list[IntArray] = []
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _COLUMNS}
    for number, (trajectory, credit) in enumerate(zip(trajectories, credits, strict=True)):
        credit.check(trajectory)
        turns = trajectory.turns
        laid_out = rows_of(trajectory)
        tokens = {
            "row": np.repeat(np.arange(len(laid_out)) + len(rows), [len(row.positions_T) for row in laid_out]),
            "position": _joined([row.positions_T - 1 for row in laid_out], np.int64),
            "target": _joined([row.ids_L[row.positions_T] for row in laid_out], np.int64),
            "trajectory": np.full(trajectory.num_action_tokens, number),
            "turn": np.repeat(np.arange(len(turns)), [len(turn.action_ids) for turn in turns]),
            "version": _joined([turn.versions for turn in turns], np.int64),
            "behavior": _joined([turn.behavior_logprobs for turn in turns], np.float64),
            "advantage": credit.advantages_T.astype(np.float64),
        }
        for name, column in tokens.items():
            columns[name].append(column[credit.keep_T])
        rows.extend(row.ids_L for row in laid_out)
    joined = {
        name: _joined(parts, dtype) for (name, parts), dtype in zip(columns.items(), _COLUMNS.values(), strict=True)
    }
    trajectory_T, turn_T = joined["trajectory"], joined["turn"]
    return Batch(
        rows=rows,
        **{f"{name}_T": column for name, column in joined.items()},
        weight_T=aggregation_weights(
            aggregation,
            trajectory_T=trajectory_T,
            turn_T=turn_T,
            keep_T=np.ones(len(trajectory_T), dtype=np.bool_),
            constant_length=constant_length,
        ),
        unit_T=unit_index(unit, trajectory_T, turn_T, joined["version"]),
        num_trajectories=len(trajectories),
        groups=np.unique([t.group_id for t in trajectories], return_inverse=True)[1].tolist(),
    )


_COLUMNS: dict[str, type[np.generic]] = {
    "row": np.int64,
    "position": np.int64,
    "target": np.int64,
    "trajectory": np.int64,
    "turn": np.int64,
    "version": np.int64,
    "behavior": np.float64,
    "advantage": np.float64,
}


def _joined(parts: Sequence[npt.ArrayLike], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=dtype), *parts])
