"""GAE over turns with a critic: Turn-PPO."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup
from agentrl_credit.stages import Array, batch_normalize, gae
from agentrl_credit.turns import credit_each, final_value, needed


class TurnGAE(CreditScheme):
    """A_k = sum_j (gamma * lam)^j delta_{k+j}, delta_k = r_k + gamma * V_{k+1} - V_k, the same on all tokens of a turn.

    Source: Turn-PPO, arXiv 2511.20718. V_k is the critic's value at the turn's first token (what the turn begins with) or
    at its last one. After the last turn V is 0 if the task ended; a truncated trajectory has the critic's value of
    where it was cut off.

    It is as good as its critic: watch `critic/explained_variance`.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VALUES})
    paper: ClassVar = "Turn-PPO 2511.20718"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """0: one step from value to value. 1: the whole return less the value."""
    read: Literal["first", "last"] = "first"
    """The action token at which a turn's value is read."""
    normalize: Literal["none", "batch"] = "none"
    """`batch` divides by (sd of all turns' advantages over the batch + eps), without moving their mean."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of turns less this. Read by `batch`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `batch`."""

    def critic_discount(self) -> float:
        """Return `gamma`."""
        return self.gamma

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a turn without values.
        """
        advantages = [self._advantages(t) for group in groups for t in group.valid]
        if self.normalize == "batch" and advantages:
            lengths = [len(a_K) for a_K in advantages]
            scaled_N = batch_normalize(np.concatenate(advantages), ddof=self.ddof, eps=self.eps)
            advantages = np.split(scaled_N, np.cumsum(lengths)[:-1])
        found = iter(advantages)
        return credit_each(groups, lambda trajectory: Credit.from_turns(trajectory, next(found)))

    def _advantages(self, trajectory: Trajectory) -> Array:
        place = 0 if self.read == "first" else -1
        values_K = [values[place] for values in needed(trajectory, "values")]
        rewards_K = [turn.reward for turn in trajectory.turns]
        return gae(rewards_K, values_K, gamma=self.gamma, lam=self.lam, final_value=final_value(trajectory))
