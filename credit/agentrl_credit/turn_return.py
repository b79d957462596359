"""One advantage for each turn: what followed it, less what followed comparable turns of the siblings."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, Ints, batch_normalize, cell_means, center, leave_one_out, standard_deviation
from agentrl_credit.turns import Comparison, Turns


class TurnReturn(Comparison):
    """Credit turn k of a trajectory with A_k = G_k - b, where G_k = r_k + gamma * G_{k+1}, b a mean over its cell.

    The cell of a turn holds turns of its group: all of them (`pool`), those in the same state (`state`), or those at
    the same turn index (`turn`). b is the mean of G over the cell, each turn counted once; with `leave_one_out`, over
    the cell's turns of the other trajectories. A cell that only one trajectory enters has nothing to compare: 0.

    `pool` with `leave_one_out`, the default, follows the policy gradient in expectation: its baseline is independent
    of the trajectory and always there. The others do not. Without `leave_one_out` a trajectory moves its own baseline.
    With `turn`, where the policy chooses when to stop, few siblings are left at late turns, so that those are scaled
    down by how many remain, and the last one left gets 0; with `state`, so does a state that no sibling saw.
    """

    paper: ClassVar = "REINFORCE with return-to-go, Williams 1992"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    baseline: Literal["pool", "state", "turn"] = "pool"
    """Turns of the group that a turn is compared with. `state` needs the environment's state keys."""
    leave_one_out: bool = True
    """Keep all turns of the own trajectory out of the baseline."""
    normalize: Literal["none", "std", "batch"] = "none"
    """`std` divides by (sd of G over the cell, the own turns included, + eps); `batch` by (sd of all turns' advantages
    over the batch + eps), without moving their mean."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of turns less this. Read by `std` and `batch`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std` and `batch`."""

    def requirements(self) -> frozenset[Need]:
        """Return what this instance reads: states distinguish turns even if only the last one is rewarded."""
        return frozenset({Need.STATE_KEYS if self.baseline == "state" else Need.TURN_REWARDS})

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        returns_N = turns.returns_to_go(gamma=self.gamma)
        cells_N = self._cells(turns)
        owner_N = turns.owner_N
        if self.leave_one_out:
            advantages_N = leave_one_out(returns_N, cells_N, owners_N=owner_N)
        else:
            has_others_N = cell_means(returns_N, cells_N, owners_N=owner_N).count_N > 0
            advantages_N = np.where(has_others_N, center(returns_N, cells_N), 0.0)
        match self.normalize:
            case "none":
                return advantages_N
            case "std":
                return advantages_N / (standard_deviation(returns_N, cells_N, ddof=self.ddof) + self.eps)
            case "batch":
                return batch_normalize(advantages_N, ddof=self.ddof, eps=self.eps)

    def _cells(self, turns: Turns) -> Ints:
        match self.baseline:
            case "pool":
                return turns.group_N
            case "turn":
                return turns.cells(turns.index_N)
            case "state":
                return turns.cells(turns.keys("state_key"))
