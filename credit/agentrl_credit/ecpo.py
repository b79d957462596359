"""What an action led to, less what its state leads to, trusted as far as the evidence goes: ECPO."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, cell_means, is_flat, shrink
from agentrl_credit.turns import Comparison, Turns


class ECPO(Comparison):
    """A_k = gate(s_k) * (Q(s_k, a_k) - V(s_k)): means over the group's turns with the same state, or state and action.

        V(s)    = (n_s * mean of G at s + shrinkage * pool) / (n_s + shrinkage)
        Q(s, a) = (n_sa * mean of G at s after a + shrinkage * V(s)) / (n_sa + shrinkage)
        gate(s) = between / (between + within): the share of the variance of G at s that actions account for

    Source: arXiv 2606.05885. The pool is the mean of G over the group's turns, G_k = r_k + gamma * G_{k+1}. Turns that did
    the same in the same state share one advantage, so that chance after a rare action is shrunk, not rewarded. A state
    in which one action was seen, or whose visits all ended alike, gets 0 by the gate.

    Every trajectory moves the means it is compared with. Action keys that differ in spelling alone leave each action
    with one visit, and nothing is averaged.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS, Need.ACTION_KEYS})
    paper: ClassVar = "ECPO 2606.05885"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    shrinkage: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Number of visits that the prior (the pool of a state, the state of an action) weighs as much as."""
    gate: bool = True
    """Scale each state by the share of its variance that its actions account for."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        returns_N, states = turns.returns_to_go(gamma=self.gamma), turns.keys("state_key")
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
