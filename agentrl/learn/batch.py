"""Trajectories to tensors. Loss masks are by construction: a token is trained because it was sampled.

`R` rows, `B` rows of a micro-batch, `L` positions of a row, `T` trained tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    return np.concatenate([np.empty(0, dtype=dtype), *(np.asarray(part, dtype=dtype) for part in parts)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Whole trajectories, as tensors for one forward and backward pass."""

    token_T: IntArray
    """Index of each token in the batch."""
    input_ids_BL: Tensor
    row_T: Tensor
    position_T: Tensor
    target_T: Tensor
    version_T: Tensor
    behavior_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    unit_T: Tensor
    """Ratio units, numbered from 0 within the micro-batch."""


def micro_batches(
    batch: Batch, *, max_tokens: int, device: torch.device | str = "cpu", skip_idle: bool = False
) -> Iterator[MicroBatch]:
    """Split a batch under a budget of tokens (padding included), shortest first; a trajectory is never split.

    A trajectory that exceeds the budget by itself is a micro-batch of its own. Rows end where nothing more is read.

    With `skip_idle`, trajectories whose advantages are all zero are left out, where others remain: the policy's loss has
    no gradient in them, and their share of the denominators is in the weights of the others already.
    """
    num = batch.num_trajectories
    needed_R = np.zeros(len(batch.rows), dtype=np.int64)
    np.maximum.at(needed_R, batch.row_T, batch.position_T + 1)
    members: list[list[int]] = [[] for _ in range(num)]
    for row, trajectory in sorted(set(zip(batch.row_T.tolist(), batch.trajectory_T.tolist(), strict=True))):
        members[trajectory].append(row)
    lengths = [max((int(needed_R[row]) for row in rows), default=0) for rows in members]
    order = sorted((i for i in range(num) if lengths[i]), key=lambda i: (lengths[i], i))
    if skip_idle:
        active = np.bincount(batch.trajectory_T, weights=batch.advantage_T != 0, minlength=num) > 0
        order = [i for i in order if active[i]] or order[:1]  # one keeps the optimizer's step what it was
    chosen: list[int] = []
    num_rows = 0
    for index in order:
        if chosen and (num_rows + len(members[index])) * lengths[index] > max_tokens:
            yield _micro_batch(batch, [row for i in chosen for row in members[i]], needed_R, device)
            chosen, num_rows = [], 0
        chosen.append(index)
        num_rows += len(members[index])
    if chosen:
        yield _micro_batch(batch, [row for i in chosen for row in members[i]], needed_R, device)


def _micro_batch(batch: Batch, rows: list[int], needed_R: IntArray, device: torch.device | str) -> MicroBatch:
    local_R = np.full(len(batch.rows), -1, dtype=np.int64)
    local_R[rows] = np.arange(len(rows))
    token_T = np.flatnonzero(local_R[batch.row_T] >= 0)
    inputs_BL = np.zeros((len(rows), int(needed_R[rows].max())), dtype=np.int64)
    for local, row in enumerate(rows):
        inputs_BL[local, : needed_R[row]] = batch.rows[row][: needed_R[row]]

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        kind = torch.float32 if array.dtype.kind == "f" else torch.int64
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=kind)

    return MicroBatch(
        token_T=token_T,
        input_ids_BL=tensor(inputs_BL),
        row_T=tensor(local_R[batch.row_T[token_T]]),
        position_T=tensor(batch.position_T[token_T]),
        target_T=tensor(batch.target_T[token_T]),
        version_T=tensor(batch.version_T[token_T]),
        behavior_T=tensor(batch.behavior_T[token_T]),
        advantage_T=tensor(batch.advantage_T[token_T]),
        weight_T=tensor(batch.weight_T[token_T]),
        unit_T=tensor(np.unique(batch.unit_T[token_T], return_inverse=True)[1]),
    )
