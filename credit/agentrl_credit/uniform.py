"""One advantage for the whole trajectory: GRPO, Dr. GRPO, RLOO, REINFORCE++ with baseline; plain GSPO."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditScheme, Trajectory, TrajectoryGroup
from agentrl_credit.stages import Array, Lone, center, group_normalize, leave_one_out, per_group, standard_deviation


class Uniform(CreditScheme):
    """Compare each trajectory's return R (undiscounted) with its group's, and give every action token the result.

    `std`: (R - mean) / (sd + eps), GRPO, arXiv 2402.03300.
    `none`: R - mean, Dr. GRPO, arXiv 2503.20783.
    `leave_one_out`: R - mean of the others, RLOO, arXiv 2402.14740.
    `batch`: (R - mean) / (sd of R - mean over the whole batch + eps), REINFORCE++ with baseline, arXiv 2501.03262. The
    paper also subtracts the batch's mean of R - mean; counting each trajectory once, as here, that is 0.

    Mean and sd run over the trajectories of the group that did not fail, each counted once whatever its length. A group
    whose returns are all equal gets exact zeros.
    """

    normalize: Literal["std", "none", "leave_one_out", "batch"] = "std"
    """What the difference is taken from and divided by."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of trajectories less this. Read by `std` and `batch`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std` and `batch`."""
    lone: Lone = "error"
    """The only trajectory of its group that did not fail: "error" stops, "keep" gives it advantage 0 (it still counts
    in the loss's denominators), "drop" takes it out of the loss. Either way it enters no statistic."""

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a lone trajectory where `lone` is "error".
        """
        scale = 1.0
        if self.normalize == "batch":
            compared = [self._advantages(group.valid) for group in groups if len(group.valid) > 1]
            scale = standard_deviation(np.concatenate([[], *compared]), ddof=self.ddof) + self.eps

        def credit(trajectories: Sequence[Trajectory]) -> list[Credit]:
            advantages_G = self._advantages(trajectories) / scale
            return [Credit.uniform(t, float(a)) for t, a in zip(trajectories, advantages_G, strict=True)]

        return per_group(groups, credit, lone=self.lone)

    def _advantages(self, trajectories: Sequence[Trajectory]) -> Array:
        """Compare the returns of one group, before any division by a statistic of the batch."""
        returns_G = [trajectory.reward for trajectory in trajectories]
        match self.normalize:
            case "std":
                return group_normalize(returns_G, ddof=self.ddof, eps=self.eps)
            case "leave_one_out":
                return leave_one_out(returns_G)
            case "none" | "batch":
                return center(returns_G)
