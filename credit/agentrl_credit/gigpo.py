"""The return among the group's, and what followed a state among its visits: GiGPO."""

from typing import ClassVar, Literal

from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, Ints, center, group_normalize
from agentrl_credit.turns import Comparison, Turns


class GiGPO(Comparison):
    """A_k = norm(R) + step_weight * norm(G_k among the group's turns in the same state).

    Source: arXiv 2505.10978. norm is x - mean, or (x - mean) / (sd + eps); G_k = r_k + gamma * G_{k+1}. A
    state that was met once has step term 0.

    The episode term's mean counts each trajectory once. The authors' code by default counts it once for each of its
    turns, so that long episodes move the baseline more: `weight_by_turns`.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS})
    paper: ClassVar = "GiGPO 2505.10978"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of the step term; it ticks once per turn."""
    step_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the step term."""
    weight_by_turns: bool = False
    """Count a trajectory once for each of its turns in the episode term's mean and standard deviation."""
    normalize: Literal["none", "std"] = "none"
    """`std` divides each term by its standard deviation, plus eps."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of values less this. Read by `std`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        if self.weight_by_turns:
            episode_N = self._norm(turns.returns_M[turns.owner_N], turns.group_N)
        else:
            episode_N = self._norm(turns.returns_M, turns.group_M)[turns.owner_N]
        states_N = turns.cells(turns.keys("state_key"))
        return episode_N + self.step_weight * self._norm(turns.returns_to_go(gamma=self.gamma), states_N)

    def _norm(self, values_N: Array, cells_N: Ints) -> Array:
        if self.normalize == "none":
            return center(values_N, cells_N)
        return group_normalize(values_N, cells_N, ddof=self.ddof, eps=self.eps)
