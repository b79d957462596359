"""Means of what followed an action, less that of its state, each shrunk as far as its visits are few."""

from typing import ClassVar

from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, cell_means, shrink
from agentrl_credit.turns import Comparison, Turns


class ActionValues(Comparison):
    """A_k = Q(s_k, a_k) - V(s_k), means over the group's turns with the same state, or state and action.

        V(s)    = (n_s * mean of G at s + shrinkage * pool) / (n_s + shrinkage)
        Q(s, a) = (n_sa * mean of G at s after a + shrinkage * V(s)) / (n_sa + shrinkage)

    G is the lambda-return from state to state, V + GAE(gamma, lam) with the plain means of the states as values, so that
    chance in later turns is averaged out before actions are compared. The pool is the mean of G over the group's turns.
    Turns that did the same in the same state share one advantage, so that chance after a rare action is shrunk, not
    rewarded.

    Source: none has it whole. The shrunk action mean is ECPO's (arXiv 2606.05885; the scheme `ecpo` is that paper's formula),
    the values and lambda-returns are as GAGPO's (2605.13217).

    Every trajectory moves the means it is compared with. Action keys that differ in spelling alone leave each action
    with one visit, and nothing is averaged.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS, Need.ACTION_KEYS})
    paper: ClassVar = "no paper; parts of ECPO 2606.05885 and GAGPO 2605.13217"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn. Less than 1 only where each turn earns its own."""
    lam: float = Field(default=0.5, ge=0, le=1)
    """1: all that followed. 0: one step, then the mean of the next state. Below 1, a truncated trajectory continues from
    the mean of the state it was left in."""
    shrinkage: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Number of visits that the prior (the pool of a state, the state of an action) weighs as much as."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        returns_N, states = self._returns(turns), turns.keys("state_key")
        states_N, actions_N = turns.cells(states), turns.cells(states, turns.keys("action_key"))
        pool_N = cell_means(returns_N, turns.group_N).mean_N
        values_N = shrink(cell_means(returns_N, states_N), pool_N, kappa=self.shrinkage)
        return shrink(cell_means(returns_N, actions_N), values_N, kappa=self.shrinkage) - values_N

    def _returns(self, turns: Turns) -> Array:
        if self.lam == 1:
            return turns.returns_to_go(gamma=self.gamma)
        values_N, final_M = turns.state_values(gamma=self.gamma, leave_one_out=False, shrinkage=0.0)
        return values_N + turns.gae(values_N, gamma=self.gamma, lam=self.lam, final_values_M=final_M)
