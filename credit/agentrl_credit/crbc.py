"""Values that satisfy Bellman's equation on the group's own transitions, by one linear solve: CRBC."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, Ints, cell_means, center, group_normalize
from agentrl_credit.turns import Comparison, Turns


def closed_values(rewards_N: Array, states_N: Ints, next_N: Ints, *, gamma: float) -> Array:
    """Solve V(s) = mean over the visits to s of r + gamma * V(next state); nothing follows where `next_N` is -1.

    Source: arXiv 2609.35082, eq. 8 and 9. From every state some visit reaches an end, so that the solution is unique, with
    gamma 1 too. Shapes: (N,) each, states labelled from 0 -> (N,), the value of each visit's state.
    """
    visits_S = np.bincount(states_N)
    equations_SS, follows = np.eye(visits_S.size), next_N >= 0
    sources = states_N[follows]
    np.subtract.at(equations_SS, (sources, next_N[follows]), gamma / visits_S[sources])
    values_S = np.linalg.solve(equations_SS, np.bincount(states_N, weights=rewards_N) / visits_S)
    return values_S[states_N].astype(np.float64)


class CRBC(Comparison):
    """A_k = episode_weight * norm(R) + step_weight * (Q(s_k, a_k) - V(s_k)) / max(sd(s_k), min_std).

        V(s)    = mean over the group's visits to s of r + gamma * V(s')
        Q(s, a) = the same mean over the visits that took a
        sd(s)   = root of the mean over the visits of (Q - V)^2

    Source: cross-rollout Bellman closure, arXiv 2609.35082, eq. 9, 13 and 14. What followed a state in one trajectory
    counts in all that passed through a state before it. norm is (x - mean) / (sd + eps). Turns that did the same in the same
    state share one step term; it is 0 if one action was seen. A truncated trajectory ends there: nothing follows.

    The paper has a reward of 0 or 1 at the end; here rewards of turns enter the same equation, and the reward of the last turn
    is not discounted. The division makes every decision that mattered at all weigh alike: with `normalize: none` it
    weighs what it was worth. Keys that call different situations equal bias the values of all states before them.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS, Need.ACTION_KEYS})
    paper: ClassVar = "CRBC 2609.35082"

    gamma: float = Field(default=0.98, ge=0, le=1)
    """Discount of the step term; it ticks once per turn."""
    episode_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the episode term."""
    step_weight: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Weight of the step term."""
    normalize: Literal["std", "none"] = "std"
    """`std` divides each term by its standard deviation; `none` leaves both in units of reward."""
    min_std: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Least divisor of the step term, in units of reward; the paper's success is worth 1. Read by `std`."""
    ddof: Literal[0, 1] = 1
    """The episode term's standard deviation divides by the number of trajectories less this. Read by `std`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the episode term's standard deviation, in units of reward. Read by `std`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        states = turns.keys("state_key")
        states_N = turns.cells(states)
        values_N, targets_N = self._closure(turns, states_N)
        step_N = cell_means(targets_N, turns.cells(states, turns.keys("action_key"))).mean_N - values_N
        if self.normalize == "none":
            episode_M = center(turns.returns_M, turns.group_M)
        else:
            episode_M = group_normalize(turns.returns_M, turns.group_M, ddof=self.ddof, eps=self.eps)
            step_N /= np.maximum(np.sqrt(cell_means(step_N**2, states_N).mean_N), self.min_std)
        return self.episode_weight * episode_M[turns.owner_N] + self.step_weight * step_N

    def _closure(self, turns: Turns, states_N: Ints) -> tuple[Array, Array]:
        """Return V of each turn's state, and r + gamma * V of the next: (N,), (N,)."""
        is_last_N = turns.index_N == turns.lengths_M[turns.owner_N] - 1
        next_N = np.where(is_last_N, -1, np.roll(states_N, -1))
        values_N = np.empty_like(turns.rewards_N)
        for group in np.unique(turns.group_N):  # the states of a group are numbered in a row
            among = turns.group_N == group
            first = states_N[among].min()
            local_N = np.where(is_last_N[among], -1, next_N[among] - first)
            values_N[among] = closed_values(turns.rewards_N[among], states_N[among] - first, local_N, gamma=self.gamma)
        following_N = np.where(is_last_N, 0.0, np.roll(values_N, -1))
        return values_N, turns.rewards_N + self.gamma * following_N
