"""ECPO: the value that an action led to, less that of its state, trusted as far as the evidence goes."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, cell_means, is_flat, shrink
from agentrl_credit.turns import Comparison, Turns


class ECPO(Comparison):
    """A_k = Q(s_k, a_k) - V(s_k), optionally gated: means over the group's turns with the same state, or state and action.

        V(s)    = (n_s * mean of G at s + shrinkage * pool) / (n_s + shrinkage)
        Q(s, a) = (n_sa * mean of G at s after a + shrinkage * V(s)) / (n_sa + shrinkage)
        gate(s) = between / (between + within): the share of the variance of G at s that actions account for

    Source: arXiv 2606.05885. The pool is the mean of G over the group's turns, G_k = r_k + gamma * G_{k+1}. Turns that did
    the same in the same state share one advantage, so that chance after a rare action is shrunk, not rewarded.

    lam below 1 is ours: G is then the lambda-return from state to state, V + GAE(gamma, lam) with the plain means of the
    states as values, so that chance in later turns is averaged out before actions are compared.

    The gate gives 0 to a state in which one action was seen, or whose visits all ended alike. With a handful of visits
    it is as noisy as what it weighs: in the exact-advantage bench it halves the signal-to-noise ratio, so it is off.

    Every trajectory moves the means it is compared with. Action keys that differ in spelling alone leave each action
    with one visit, and nothing is averaged.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS, Need.ACTION_KEYS})
    paper: ClassVar = "ECPO 2606.05885"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """1: what followed, as in the paper. 0: one step, then the mean of the next state. Below 1, a truncated trajectory
    continues from the mean of the state it was left in."""
    shrinkage: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Number of visits that the prior (the pool of a state, the state of an action) weighs as much as."""
    gate: bool = False
    """Scale each state by the share of its variance that its actions account for."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        returns_N, states = self._returns(turns), turns.keys("state_key")
        states_N, actions_N = turns.cells(states), turns.cells(states, turns.keys("action_key"))
        pool = cell_means(returns_N, turns.group_N)
        at_state, after_action = cell_means(returns_N, states_N), cell_means(returns_N, actions_N)
        values_N = shrink(at_state, pool.mean_N, kappa=self.shrinkage)
        advantages_N = shrink(after_action, values_N, kappa=self.shrinkage) - values_N
        if self.gate:
            between_N = cell_means((after_action.mean_N - at_state.mean_N) ** 2, states_N).mean_N
            within_N = cell_means((returns_N - after_action.mean_N) ** 2, states_N).mean_N
            total_N = between_N + within_N
            advantages_N *= np.divide(
                between_N, total_N, out=np.zeros_like(total_N), where=~is_flat(returns_N, states_N)
            )
        return advantages_N

    def _returns(self, turns: Turns) -> Array:
        if self.lam == 1:
            return turns.returns_to_go(gamma=self.gamma)
        values_N, final_M = turns.state_values(gamma=self.gamma, leave_one_out=False, shrinkage=0.0)
        return values_N + turns.gae(values_N, gamma=self.gamma, lam=self.lam, final_values_M=final_M)
