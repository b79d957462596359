"""What training showed of each sampled token, for people to look at beside the rollouts.

`T` sampled tokens of a trajectory, `P` trained tokens of a minibatch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from agentrl.credit import Credit
from agentrl.learn.metrics import Tally
from agentrl.types import Trajectory

Notes = Mapping[str, npt.NDArray[np.float64]]
"""`ratio`, `entropy` and `clipped` of each token, `(T,)`; NaN where nothing was computed of it."""


class TokenNotes:
    """Grows by the minibatches of a step: each token is in one."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], Notes] = {}

    def add(self, pairs: Sequence[tuple[Trajectory, Credit]], tally: Tally) -> None:
        """Note what a minibatch showed."""
        num = sum(int(credit.keep_T.sum()) for _, credit in pairs)
        of_minibatch_P = {name: np.full(num, np.nan) for name in ("ratio", "entropy", "clipped")}
        names = ("token_T", "unit_T", "ratio_U", "entropy_T", "clipped_T")
        for token, unit, ratio_U, entropy, clipped in zip(*(tally.parts(n) for n in names), strict=True):
            at = token.astype(np.int64)
            of_minibatch_P["ratio"][at] = ratio_U[unit.astype(np.int64)]
            of_minibatch_P["entropy"][at] = entropy
            of_minibatch_P["clipped"][at] = clipped
        start = 0
        for trajectory, credit in pairs:
            end = start + int(credit.keep_T.sum())
            notes = {}
            for name, column_P in of_minibatch_P.items():
                notes[name] = np.full(credit.keep_T.shape, np.nan)
                notes[name][credit.keep_T] = column_P[start:end]
            self._notes[trajectory.group_id, trajectory.trajectory_id] = notes
            start = end

    def of(self, trajectory: Trajectory) -> Notes:
        """Return the notes of a trajectory; none where it was in no minibatch."""
        return self._notes.get((trajectory.group_id, trajectory.trajectory_id), {})
