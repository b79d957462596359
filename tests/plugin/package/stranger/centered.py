"""A credit scheme as somebody else would publish it."""

from collections.abc import Sequence
from statistics import fmean

from agentrl import Credit, CreditScheme, TrajectoryGroup


class Centered(CreditScheme):
    """scale * (R - mean of the group's R)."""

    scale: float = 1.0

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [self._group(group) for group in groups]

    def _group(self, group: TrajectoryGroup) -> list[Credit]:
        mean = fmean(t.reward for t in group.valid) if group.valid else 0.0
        return [
            Credit.excluded(t) if t.failed else Credit.uniform(t, self.scale * (t.reward - mean))
            for t in group.trajectories
        ]
