"""One advantage for the whole trajectory: that of GRPO, GSPO, Dr. GRPO, RLOO, REINFORCE++ with baseline."""

from typing import ClassVar, Literal

from pydantic import Field

from agentrl_credit.stages import Array, batch_normalize, center, group_normalize, leave_one_out
from agentrl_credit.turns import Comparison, Turns


class Uniform(Comparison):
    """Compare each trajectory's return R (undiscounted) with its group's, and give every action token the result.

    `std`: (R - mean) / (sd + eps), GRPO, arXiv 2402.03300.
    `none`: R - mean, Dr. GRPO, arXiv 2503.20783.
    `leave_one_out`: R - mean of the others, RLOO, arXiv 2402.14740.
    `batch`: (R - mean) / (sd of R - mean over the whole batch + eps), REINFORCE++ with baseline, arXiv 2501.03262. The
    paper also subtracts the batch's mean of R - mean; counting each trajectory once, as here, that is 0.

    Mean and sd run over the trajectories of the group that did not fail, each counted once whatever its length. A group
    whose returns are all equal gets exact zeros.
    """

    granularity: ClassVar = "trajectory"
    paper: ClassVar = "GRPO 2402.03300, Dr. GRPO 2503.20783, RLOO 2402.14740, REINFORCE++ 2501.03262"

    normalize: Literal["std", "none", "leave_one_out", "batch"] = "std"
    """Baseline and scale of the difference."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of trajectories less this. Read by `std` and `batch`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std` and `batch`."""

    def advantages(self, turns: Turns) -> Array:
        """Return each trajectory's advantage at all of its turns: (N,)."""
        return self._compare(turns)[turns.owner_N]

    def _compare(self, turns: Turns) -> Array:
        """Return the advantage of each trajectory: (M,)."""
        returns_M, group_M = turns.returns_M, turns.group_M
        match self.normalize:
            case "std":
                return group_normalize(returns_M, group_M, ddof=self.ddof, eps=self.eps)
            case "leave_one_out":
                return leave_one_out(returns_M, group_M)
            case "none":
                return center(returns_M, group_M)
            case "batch":
                return batch_normalize(center(returns_M, group_M), ddof=self.ddof, eps=self.eps)
