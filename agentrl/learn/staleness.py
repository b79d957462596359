"""Tokens that were sampled under weights of long ago: masked or counted.

`T` action tokens of a trajectory.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from agentrl.credit import Credit
from agentrl.types import Trajectory, TrajectoryGroup, valid_trajectories


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


def share_too_old(groups: Sequence[TrajectoryGroup], *, oldest: int) -> float:
    """Return the share of the usable trajectories' action tokens that were sampled before policy version `oldest`."""
    versions_T = np.concatenate([np.empty(0), *map(_versions, valid_trajectories(groups))])
    return float(np.mean(versions_T < oldest)) if len(versions_T) else 0.0


def _versions(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    return np.array([version for turn in trajectory.turns for version in turn.versions], dtype=np.int64)
