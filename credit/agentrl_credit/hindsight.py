"""The return, weighted by how much likelier hindsight makes each turn: HCAPO. Experimental."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, group_normalize
from agentrl_credit.turns import Comparison, Turns, token_column, turn_lengths, turn_means


class Hindsight(Comparison):
    """A_k = norm(R) + step_weight * norm(rho_k R), rho_k = exp(mean over the turn's tokens of hindsight - policy log-prob).

    Source: HCAPO, arXiv 2603.08754. The hindsight log-probabilities are the policy's own, once it has seen how the episode
    ended; rho_k is bounded to 1 / max_ratio .. max_ratio. norm is (x - mean) / (sd + eps): of the return over the
    group's trajectories, of rho_k R over all of the group's turns.

    The policy is its own judge of what its turns were good for; a policy that does not understand the hint gives
    ratios that mean nothing.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.HINDSIGHT_LOGPROBS})
    paper: ClassVar = "HCAPO 2603.08754"
    experimental: ClassVar = True

    step_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the hindsight term."""
    max_ratio: float = Field(default=5.0, gt=1, allow_inf_nan=False)
    """Largest rho, and one over the smallest."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of values less this."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        means = [
            turn_means(token_column(t, "hindsight_logprobs") - token_column(t, "behavior_logprobs"), turn_lengths(t))
            for t in turns.trajectories
        ]
        bound = np.log(self.max_ratio)
        ratios_N = np.exp(np.clip(np.concatenate(means), -bound, bound))
        outcome_M = group_normalize(turns.returns_M, turns.group_M, ddof=self.ddof, eps=self.eps)
        weighted_N = ratios_N * turns.returns_M[turns.owner_N]
        step_N = group_normalize(weighted_N, turns.group_N, ddof=self.ddof, eps=self.eps)
        return outcome_M[turns.owner_N] + self.step_weight * step_N
