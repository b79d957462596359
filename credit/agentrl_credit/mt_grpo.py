"""Outcome and turn reward, each compared with the siblings': MT-GRPO."""

from typing import ClassVar, Literal

from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, Ints, center, group_normalize
from agentrl_credit.turns import Comparison, Turns


class MTGRPO(Comparison):
    """A_k = norm(R) + turn_weight * norm(r_k): the return among the group's, the turn's reward among its turn index.

    Source: arXiv 2505.11821, written for one turn with a reward of its own before the outcome; here every turn
    has both terms, and the outcome is the undiscounted return. norm is (x - mean) / (sd + eps), or x - mean.

    What a turn makes possible later is credited by the outcome term alone, which is the same on every turn. Where the
    policy chooses when to stop, late turns are compared with the few siblings that got as far, and the last one left
    has no turn term.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_REWARDS})
    paper: ClassVar = "MT-GRPO 2505.11821"

    turn_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the turn term, the lambda of the paper."""
    normalize: Literal["std", "none"] = "std"
    """`std` divides each term by its standard deviation, plus eps."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of values less this. Read by `std`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        outcome_M = self._norm(turns.returns_M, turns.group_M)
        return outcome_M[turns.owner_N] + self.turn_weight * self._norm(turns.rewards_N, turns.cells(turns.index_N))

    def _norm(self, values_N: Array, cells_N: Ints) -> Array:
        if self.normalize == "none":
            return center(values_N, cells_N)
        return group_normalize(values_N, cells_N, ddof=self.ddof, eps=self.eps)
