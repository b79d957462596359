"""The turn's advantage, and how its tokens differ around it: VETTA."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup
from agentrl_credit.stages import broadcast_turns, gae
from agentrl_credit.turns import credit_each, final_value, needed, turn_lengths, turn_means


class TokenResidual(CreditScheme):
    """A_t = A_k + alpha * (a_t - mean of a over turn k), with A_k a GAE over turns and a_t one over tokens.

    Source: VETTA. Both read the same critic: A_k at each turn's first token, with gamma and lam; a_t at every token of
    the trajectory, with token_lam, no discount, and each turn's reward at its last token. The residual sums to 0 over
    each turn, so that tokens move weight within a turn and never between turns.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VALUES})
    granularity: ClassVar = "token"
    paper: ClassVar = "VETTA"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from turn to turn."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """The lambda of the GAE over turns."""
    token_lam: float = Field(default=0.95, ge=0, le=1)
    """The lambda of the GAE over tokens."""
    alpha: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Weight of the residual; 0 is `turn_gae`."""

    def critic_discount(self) -> float:
        """Return `gamma`."""
        return self.gamma

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a turn without values.
        """
        return credit_each(groups, self._credit)

    def _credit(self, trajectory: Trajectory) -> Credit:
        values = needed(trajectory, "values")
        lengths = turn_lengths(trajectory)
        last = final_value(trajectory)
        rewards_K = [turn.reward for turn in trajectory.turns]
        turns_K = gae(rewards_K, [v[0] for v in values], gamma=self.gamma, lam=self.lam, final_value=last)
        rewards_T = np.zeros(sum(lengths))
        rewards_T[np.cumsum(lengths) - 1] = rewards_K
        tokens_T = gae(rewards_T, np.concatenate(values), gamma=1.0, lam=self.token_lam, final_value=last)
        residuals_T = tokens_T - broadcast_turns(turn_means(tokens_T, lengths), lengths)
        return Credit.from_tokens(trajectory, broadcast_turns(turns_K, lengths) + self.alpha * residuals_T)
