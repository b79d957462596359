"""GAE over turns with values that are the group's own means: GAGPO."""

from typing import ClassVar, Literal

from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, batch_normalize
from agentrl_credit.turns import Comparison, Turns


class GroupGAE(Comparison):
    """A_k = sum_j (gamma * lam)^j delta_{k+j}, delta_k = r_k + gamma * V(s_{k+1}) - V(s_k), V a mean over the group.

        V(s) = (n * mean of G over the n visits to s + shrinkage * pool) / (n + shrinkage)

    Source: GAGPO, arXiv 2605.13217. The pool is the mean of G over all turns of the group, and stands in for a state
    that no other turn visited. With `leave_one_out`, visits and pool are those of the other trajectories. V is 0 if the
    task ended; a truncated trajectory continues from the value of the state it was left in.

    lam = 1 is the whole return less V: unbiased with `leave_one_out`, the step term of GiGPO (biased) without it and without
    shrinkage, and noisy. lam = 0 trusts the values alone: a decision
    is credited by the step from value to value, so later chance is averaged out, and keys that call different
    situations equal bias it.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS})
    paper: ClassVar = "GAGPO 2605.13217"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    lam: float = Field(default=0.5, ge=0, le=1)
    """0: one step from value to value. 1: the whole return."""
    leave_one_out: bool = True
    """Keep all turns of the own trajectory out of the values it is compared with."""
    shrinkage: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Number of visits that the pool's mean weighs as much as."""
    normalize: Literal["none", "batch"] = "none"
    """`batch` divides by (sd of all turns' advantages over the batch + eps), without moving their mean."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of turns less this. Read by `batch`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `batch`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        values_N, final_values_M = turns.state_values(
            gamma=self.gamma, leave_one_out=self.leave_one_out, shrinkage=self.shrinkage
        )
        advantages_N = turns.gae(values_N, gamma=self.gamma, lam=self.lam, final_values_M=final_values_M)
        if self.normalize == "batch":
            return batch_normalize(advantages_N, ddof=self.ddof, eps=self.eps)
        return advantages_N
