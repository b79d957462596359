"""The return among the group's, and how an action compares with its state's others, as far as the visits tell: ECPO."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, cell_means, group_normalize, is_flat, shrink, standard_deviation
from agentrl_credit.turns import Comparison, Turns


class ECPO(Comparison):
    """A_k = (R - mean R) / (sd of R + eps) + step_weight * rho(s_k) * (Q(s_k, a_k) - m(s_k)) / (sd of G at s_k + eps).

        Q(s, a) = (n_sa * mean of G at s after a + kappa * m(s)) / (n_sa + kappa),    m(s) = mean of G at s
        rho(s)  = tanh(n_s / tau) * between / (between + within + eps)

    Source: arXiv 2606.05885. R is compared over the group's trajectories, G_k = r_k + gamma * G_{k+1} over the group's turns
    in the same state; `between` and `within` are the variance of G there between and within actions, each visit counted
    once. A state in which one action was seen, or whose visits all ended alike, has step term 0.

    The paper's full text could not be had. Q, rho, their sum with R's term, and kappa 2 are as in summaries of it; which
    standard deviation divides Q - m, the default of `tau` and `ddof` are unverified, `gamma` is GiGPO's.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS, Need.ACTION_KEYS})
    paper: ClassVar = "ECPO 2606.05885"

    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount of the step term; it ticks once per turn."""
    step_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the step term, the omega of the paper."""
    kappa: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Number of visits that the state's mean weighs as much as in the mean of an action."""
    tau: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    """Number of visits at which a state has tanh(1) = .76 of its weight."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of values less this."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to standard deviations, in units of reward, and to the variances of the gate."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        episode_M = group_normalize(turns.returns_M, turns.group_M, ddof=self.ddof, eps=self.eps)
        returns_N, states = turns.returns_to_go(gamma=self.gamma), turns.keys("state_key")
        states_N, actions_N = turns.cells(states), turns.cells(states, turns.keys("action_key"))
        at_state, after_action = cell_means(returns_N, states_N), cell_means(returns_N, actions_N)
        values_N = shrink(after_action, at_state.mean_N, kappa=self.kappa)
        spread_N = standard_deviation(returns_N, states_N, ddof=self.ddof)
        steps_N = (values_N - at_state.mean_N) / (spread_N + self.eps)
        between_N = cell_means((after_action.mean_N - at_state.mean_N) ** 2, states_N).mean_N
        within_N = cell_means((returns_N - after_action.mean_N) ** 2, states_N).mean_N
        gate_N = np.tanh(at_state.count_N / self.tau) * between_N / (between_N + within_N + self.eps)
        gate_N[is_flat(returns_N, states_N)] = 0.0
        return episode_M[turns.owner_N] + self.step_weight * gate_N * steps_N
