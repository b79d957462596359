"""The minibatch that is trained on: its tokens, and beside each the columns that the loss reads.

`T` trained tokens. A token is trained because it was sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.credit import Credit
from agentrl.errors import ConfigError
from agentrl.learn.config import LossConfig
from agentrl.learn.loss import select_by_covariance
from agentrl.learn.tokens import (
    Aggregation,
    FloatArray,
    Int32Array,
    RatioUnit,
    TokenBatch,
    aggregation_weights,
    unit_index,
)
from agentrl.types import Need, Trajectory, TrajectoryGroup, valid_trajectories

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossColumns:
    """Columns that the loss reads beside the policy's log-probabilities: `(T,)` each, but for `count_U`."""

    advantage_T: Tensor
    weight_T: Tensor
    """Share of each token in the loss (see `aggregation_weights`)."""
    behavior_T: Tensor
    """Log-probability under which the token was sampled."""
    unit_T: Tensor
    """Ratio unit of each token."""
    count_U: Tensor
    """Tokens of each ratio unit, `(U,)`."""
    version_T: Tensor
    """Policy version that sampled the token."""
    trajectory_T: Tensor
    """Number of the token's trajectory in the minibatch."""
    nll_weight_T: Tensor | None = None
    """Weight of each token among those to imitate; 0: it is none of them. None: no term of the loss imitates any."""
    teacher_T: Tensor | None = None
    """Log-probability under the teacher. None: the loss has no term of it."""
    selected_T: Tensor | None = None
    """Tokens that `loss.covariance` concerns. None: the recipe has none."""

    def select(self, token_T: Int32Array) -> "LossColumns":
        """Return the columns of some tokens; ratio units are numbered from 0 among them."""
        found = replace(self, count_U=self.unit_T).map(lambda column_T: column_T[token_T])
        _, unit_T, count_U = torch.unique(found.unit_T, return_inverse=True, return_counts=True)
        return replace(found, unit_T=unit_T, count_U=count_U)

    def map(self, function: Callable[[Tensor], Tensor]) -> "LossColumns":
        """Apply a function to each column that there is."""
        columns: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            columns[field.name] = None if column is None else function(column)
        return LossColumns(**columns)


class Batch(NamedTuple):
    """The tokens of one optimizer step, with weights computed over all of it, before any split."""

    tokens: TokenBatch
    columns: LossColumns


def make_batch(
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    *,
    unit: RatioUnit,
    aggregation: Aggregation,
    constant_length: int | None = None,
) -> Batch:
    """Lay out the trajectories of one optimizer step. Tokens that credit does not keep are context only."""
    for trajectory, credit in zip(trajectories, credits, strict=True):
        credit.check(trajectory)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    keep_T = np.concatenate([np.empty(0, dtype=np.bool_), *(credit.keep_T for credit in credits)])
    tokens = TokenBatch.from_trajectories(trajectories).select(keep_T)
    advantage_T = np.concatenate([np.empty(0), *(credit.advantages_T for credit in credits)])[keep_T]
    behavior_T = np.concatenate([np.empty(0), *(turn.behavior_logprobs for turn in turns)])[keep_T]
    version_T = np.concatenate([np.empty(0, dtype=np.int64), *(turn.versions for turn in turns)])[keep_T]
    weight_T = aggregation_weights(
        aggregation,
        trajectory_T=tokens.trajectory_T,
        turn_T=tokens.turn_T,
        constant_length=constant_length,
    )
    unit_T = unit_index(unit, tokens.trajectory_T, tokens.turn_T, version_T)
    columns = LossColumns(
        advantage_T=torch.from_numpy(advantage_T),
        weight_T=torch.from_numpy(weight_T),
        behavior_T=torch.from_numpy(behavior_T),
        unit_T=torch.from_numpy(unit_T),
        count_U=torch.from_numpy(np.bincount(unit_T)),
        version_T=torch.from_numpy(version_T),
        trajectory_T=torch.from_numpy(tokens.trajectory_T),
    )
    return Batch(tokens, columns)


def mask_stale(
    groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]], *, oldest: int
) -> list[list[Credit]]:
    """Take tokens that were sampled before policy version `oldest` out of the loss and its denominators."""
    return [
        [
            replace(credit, keep_T=credit.keep_T & (_versions(trajectory) >= oldest))
            for trajectory, credit in zip(group.trajectories, of_group, strict=True)
        ]
        for group, of_group in zip(groups, credits, strict=True)
    ]


def fraction_too_old(groups: Sequence[TrajectoryGroup], *, oldest: int) -> float:
    """Return the share of the usable trajectories' action tokens that were sampled before policy version `oldest`."""
    versions_T = np.concatenate([np.empty(0), *map(_versions, valid_trajectories(groups))])
    return float(np.mean(versions_T < oldest)) if len(versions_T) else 0.0


def _versions(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    return np.array([version for turn in trajectory.turns for version in turn.versions], dtype=np.int64)


def add_terms(
    batch: Batch, trajectories: Sequence[Trajectory], credits: Sequence[Credit], *, config: LossConfig, seed: int
) -> Batch:
    """Return the batch of `make_batch` with the columns of those further terms that a recipe's loss has.

    Args:
        batch: of the trajectories.
        trajectories: of one optimizer step.
        credits: of these.
        config: terms.
        seed: of the tokens that `loss.covariance` draws.

    Raises:
        ConfigError: if a signal that the loss reads (`LossConfig.needs`) was not measured.
    """
    columns: dict[str, Tensor] = {}
    if config.nll is not None and config.nll.of == "successes":
        is_success_I = np.array([bool(trajectory.reported("success")) for trajectory in trajectories], dtype=np.bool_)
        columns["nll_weight_T"] = torch.from_numpy(_imitation_weights(batch.tokens, is_success_I, config=config))
    if config.distill_coefficient > 0:
        keep_T = np.concatenate([np.empty(0, dtype=np.bool_), *(credit.keep_T for credit in credits)])
        columns["teacher_T"] = torch.from_numpy(_signal(trajectories, Need.TEACHER_LOGPROBS)[keep_T])
    if config.covariance is not None:
        columns["selected_T"] = select_by_covariance(
            batch.columns.advantage_T,
            batch.columns.behavior_T,
            rule=config.covariance.rule,
            share=config.covariance.share,
            band=config.covariance.band,
            generator=torch.Generator().manual_seed(seed),
        )
    return batch._replace(columns=replace(batch.columns, **columns))


def _imitation_weights(tokens: TokenBatch, is_imitated_I: BoolArray, *, config: LossConfig) -> FloatArray:
    """Return the weights of the tokens of some trajectories among themselves, and 0 for the others."""
    is_imitated_T = is_imitated_I[tokens.trajectory_T]
    weight_T = np.zeros(len(tokens))
    weight_T[is_imitated_T] = aggregation_weights(
        config.aggregation,
        trajectory_T=tokens.trajectory_T[is_imitated_T],
        turn_T=tokens.turn_T[is_imitated_T],
        constant_length=config.constant_length,
    )
    return weight_T


def _signal(trajectories: Sequence[Trajectory], need: Need) -> FloatArray:
    """Return a signal of every action token."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if any(need not in turn.signals for turn in turns):
        raise ConfigError(f"loss: it reads {need}, which turns do not have; measure the signals of `LossConfig.needs`")
    return np.concatenate([np.empty(0), *(turn.signals[need] for turn in turns)])
