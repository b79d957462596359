"""One advantage for each turn: what followed it, less what followed comparable turns of the siblings."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditError, CreditScheme, Need, Trajectory, TrajectoryGroup
from agentrl_credit.stages import (
    Array,
    Lone,
    center,
    leave_one_out,
    per_group,
    returns_to_go,
    standard_deviation,
)


class TurnReturn(CreditScheme):
    """Credit turn k of a trajectory with A_k = G_k - b, where G_k = r_k + gamma * G_{k+1} b a mean over its cell.

    The cell of a turn holds turns of its group: all of them (`pool`), those in the same state (`state`), or those at
    the same turn index (`turn`). b is the mean of G over the cell, each turn counted once; with `leave_one_out`, over
    the cell's turns of the other trajectories. A cell that only one trajectory enters has nothing to compare: 0.

    `pool` with `leave_one_out`, the default, follows the policy gradient in expectation: its baseline is independent
    of the trajectory and always there. The others do not. Without `leave_one_out` a trajectory moves its own baseline.
    With `turn`, where the policy chooses when to stop, few siblings are left at late turns, so that those are scaled
    down by how many remain, and the last one left gets 0; with `state`, so does a state that no sibling saw.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_REWARDS})

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    baseline: Literal["pool", "state", "turn"] = "pool"
    """Which turns of the group a turn is compared with. `state` needs the environment's state keys."""
    leave_one_out: bool = True
    """Keep all turns of the own trajectory out of the baseline."""
    normalize: Literal["none", "std", "batch"] = "none"
    """`std` divides by (sd of G over the cell, the own turns included, + eps); `batch` by (sd of all turns' advantages
    over the batch + eps), without moving their mean."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of turns less this. Read by `std` and `batch`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std` and `batch`."""
    lone: Lone = "error"
    """The only trajectory of its group that did not fail: "error" stops, "keep" gives it advantage 0 (it still counts
    in the loss's denominators), "drop" takes it out of the loss. Either way it enters no statistic."""

    def requirements(self) -> frozenset[Need]:
        """Return what this instance reads: state keys only where the baseline goes by them."""
        return self.needs | {Need.STATE_KEYS} if self.baseline == "state" else self.needs

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a lone trajectory where `lone` is "error", and for a turn without the state key it needs.
        """
        scale = 1.0
        if self.normalize == "batch":
            compared = [array for group in groups if len(group.valid) > 1 for array in self._advantages(group.valid)]
            scale = standard_deviation(np.concatenate([[], *compared]), ddof=self.ddof) + self.eps

        def credit(trajectories: Sequence[Trajectory]) -> list[Credit]:
            advantages = self._advantages(trajectories)
            return [Credit.from_turns(t, a_K / scale) for t, a_K in zip(trajectories, advantages, strict=True)]

        return per_group(groups, credit, lone=self.lone)

    def _advantages(self, trajectories: Sequence[Trajectory]) -> list[Array]:
        """Compare the turns of one group, before any division by a statistic of the batch: (K,) a trajectory."""
        returns = [returns_to_go([turn.reward for turn in t.turns], gamma=self.gamma) for t in trajectories]
        lengths = [len(t.turns) for t in trajectories]
        returns_N, owners_N = np.concatenate(returns), np.repeat(np.arange(len(lengths)), lengths)
        cells: dict[Hashable, list[int]] = defaultdict(list)
        for n, cell in enumerate(self._cell(t, k) for t in trajectories for k in range(len(t.turns))):
            cells[cell].append(n)
        advantages_N = np.zeros_like(returns_N)
        for cell_N in cells.values():
            advantages_N[cell_N] = self._compare(returns_N[cell_N], owners_N=owners_N[cell_N])
        return np.split(advantages_N, np.cumsum(lengths)[:-1])

    def _cell(self, trajectory: Trajectory, k: int) -> Hashable:
        match self.baseline:
            case "pool":
                return None
            case "turn":
                return k
            case "state":
                if (key := trajectory.turns[k].state_key) is None:
                    raise CreditError(
                        f"trajectory {trajectory.trajectory_id}, turn {k}: no state key, which baseline: state needs. "
                        "Let the environment's state_key() return one, or choose baseline: pool"
                    )
                return key

    def _compare(self, returns_N: Array, *, owners_N: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Array:
        if np.unique(owners_N).size < 2:
            return np.zeros_like(returns_N)
        advantages_N = leave_one_out(returns_N, owners_N=owners_N) if self.leave_one_out else center(returns_N)
        if self.normalize == "std":
            advantages_N = advantages_N / (standard_deviation(returns_N, ddof=self.ddof) + self.eps)
        return advantages_N
