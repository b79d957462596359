"""Three comparisons of each step on the group's graph of states: episode, next state, gain in value. G2PO."""

from typing import ClassVar, Literal

from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, Ints, center, group_normalize
from agentrl_credit.turns import Comparison, Turns


class G2PO(Comparison):
    """A_k = norm(R) + step_weight * (norm(n_k among turns in the same state) + norm(n_k - V(s_k) over the group)).

        V(s) = gamma * mean of G over the group's visits to s,    n_k = r_k + V(s_{k+1})

    Source: arXiv 2606.22995, the episode, node-centric and edge-centric advantages. norm is (x - mean) / (sd + eps), or
    x - mean. The last term is compared over all steps of the group, so that a step which moved the task on stands out among
    steps that changed nothing.

    The paper has one reward, at the end; here every turn's counts where it was earned. V is 0 if the task ended; a
    truncated trajectory continues from the value of the state it was left in. The paper's penalty of invalid actions is left
    to the environment. V is discounted and n_k is not again, as in the paper: a step towards the end gains 1 - gamma of
    the value by itself, the later the more.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS})
    paper: ClassVar = "G2PO 2606.22995"

    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount; it ticks once per turn."""
    step_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the two step terms."""
    normalize: Literal["std", "none"] = "std"
    """`std` divides each term by its standard deviation, plus eps."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of values less this. Read by `std`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        means_N, final_M = turns.state_values(gamma=self.gamma, leave_one_out=False, shrinkage=0.0)
        values_N = self.gamma * means_N
        gains_N = turns.gae(values_N, gamma=1.0, lam=0.0, final_values_M=self.gamma * final_M)
        episode_M = self._norm(turns.returns_M, turns.group_M)
        node_N = self._norm(values_N + gains_N, turns.cells(turns.keys("state_key")))
        edge_N = self._norm(gains_N, turns.group_N)
        return episode_M[turns.owner_N] + self.step_weight * (node_N + edge_N)

    def _norm(self, values_N: Array, cells_N: Ints) -> Array:
        if self.normalize == "none":
            return center(values_N, cells_N)
        return group_normalize(values_N, cells_N, ddof=self.ddof, eps=self.eps)
