"""What training showed of each sampled token, for people to look at beside the rollouts.

`T` sampled tokens of a trajectory, `P` trained tokens of a minibatch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.credit import Credit
from agentrl.distributed.processes import is_main, to_rank_zero
from agentrl.learn.tally import Observations
from agentrl.types import Trajectory

Notes = Mapping[str, npt.NDArray[np.float64]]
"""`ratio`, `entropy` and `clipped` of each token, `(T,)`; NaN where nothing was computed of it."""


class _Seen(NamedTuple):
    """Of one pass."""

    token_T: npt.NDArray[np.int32]
    """Number of each token among the minibatch's."""
    ratio_T: npt.NDArray[np.generic]
    entropy_T: npt.NDArray[np.generic]
    clipped_T: npt.NDArray[np.bool_]


class TokenNotes:
    """Grows by the minibatches of a step: each token is in one, and each process notes those that it computes."""

    def __init__(self) -> None:
        self._minibatches: list[tuple[list[tuple[Trajectory, Credit]], list[_Seen]]] = []

    def add(self, pairs: Sequence[tuple[Trajectory, Credit]], observations: Observations) -> None:
        """Note what this process's passes over a minibatch showed."""
        columns = [observations.columns[name] for name in ("token_T", "unit_T", "ratio_U", "entropy_T", "clipped_T")]
        seen = [
            _Seen(token_T, ratio_U[unit_T], entropy_T, clipped_T)
            for token_T, unit_T, ratio_U, entropy_T, clipped_T in zip(*columns, strict=True)
        ]
        self._minibatches.append((list(pairs), seen))

    def gathered(self) -> Callable[[Trajectory], Notes]:
        """Return the notes of a trajectory; none where it was in no minibatch.

        On the first process; the others, which must call it as often, are asked for theirs and get none.
        """
        found: dict[tuple[str, str], Notes] = {}
        for pairs, own in self._minibatches:
            seen = to_rank_zero(own)
            if not is_main():
                continue
            start, columns = 0, _by_token(seen, num=sum(int(credit.keep_T.sum()) for _, credit in pairs))
            for trajectory, credit in pairs:
                end = start + int(credit.keep_T.sum())
                notes = {name: np.full(credit.keep_T.shape, np.nan) for name in columns}
                for name, column_P in columns.items():
                    notes[name][credit.keep_T] = column_P[start:end]
                found[trajectory.group_id, trajectory.trajectory_id] = notes
                start = end
        return lambda trajectory: found.get((trajectory.group_id, trajectory.trajectory_id), {})


def _by_token(seen: Sequence[_Seen], *, num: int) -> dict[str, npt.NDArray[np.float64]]:
    columns = {name: np.full(num, np.nan) for name in ("ratio", "entropy", "clipped")}
    for token_T, *values in seen:
        for column_P, value_T in zip(columns.values(), values, strict=True):
            column_P[token_T] = value_T
    return columns
