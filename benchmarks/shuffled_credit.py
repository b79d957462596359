"""A control for credit schemes: the same advantages, dealt out to the turns of each trajectory at random."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup, load_credit


class Shuffled(CreditScheme):
    """Whatever a scheme's advantages gain by being on the right turn is lost here; their size and sum stay."""

    of: dict[str, Any]
    """The scheme whose credit is shuffled, as under `credit:` in a recipe."""
    seed: int = 0
    """Seed of the permutations; each trajectory's also depends on its id."""

    def requirements(self) -> frozenset[Need]:
        """Return what the scheme reads."""
        return load_credit(self.of).requirements()

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Credit with the scheme, then permute the turns of each trajectory."""
        assigned = load_credit(self.of).assign(groups)
        return [
            [self._shuffle(t, credit) for t, credit in zip(group.trajectories, row, strict=True)]
            for group, row in zip(groups, assigned, strict=True)
        ]

    def _shuffle(self, trajectory: Trajectory, credit: Credit) -> Credit:
        if not credit.keep_T.all():
            return credit
        ends = np.cumsum([len(turn.action_ids) for turn in trajectory.turns])
        means_K = [float(part.mean()) for part in np.split(credit.advantages_T, ends[:-1])]
        rng = np.random.default_rng([self.seed, *trajectory.trajectory_id.encode()])
        return Credit.from_turns(trajectory, rng.permutation(means_K))
