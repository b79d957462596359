"""The minibatch that is trained on: its tokens, and beside each the columns that the loss reads.

`T` trained tokens. A token is trained because it was sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.credit import Credit
from agentrl.learn.tokens import (
    Aggregation,
    Int32Array,
    RatioUnit,
    TokenBatch,
    aggregation_weights,
    unit_index,
)
from agentrl.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossColumns:
    """Columns that the loss reads beside the policy's log-probabilities: `(T,)` each."""

    advantage_T: Tensor
    weight_T: Tensor
    """Share of each token in the loss (see `aggregation_weights`)."""
    behavior_T: Tensor
    """Log-probability under which the token was sampled."""
    unit_T: Tensor
    """Ratio unit of each token."""
    version_T: Tensor
    """Policy version that sampled the token."""
    trajectory_T: Tensor
    """Number of the token's trajectory in the minibatch."""

    def select(self, token_T: Int32Array) -> "LossColumns":
        """Return the columns of some tokens; ratio units are numbered from 0 among them."""
        found = self.map(lambda column_T: column_T[token_T])
        return replace(found, unit_T=torch.unique(found.unit_T, return_inverse=True)[1])

    def map(self, function: Callable[[Tensor], Tensor]) -> "LossColumns":
        """Apply a function to each column."""
        return LossColumns(**{field.name: function(getattr(self, field.name)) for field in fields(self)})


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
        version_T=torch.from_numpy(version_T),
        trajectory_T=torch.from_numpy(tokens.trajectory_T),
    )
    return Batch(tokens, columns)
