"""GAE over turns, then over the tokens of each turn: VAGEN and RAGEN."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup
from agentrl_credit.stages import gae
from agentrl_credit.turns import credit_each, final_value, needed


class BilevelGAE(CreditScheme):
    """The return of each turn, by GAE over turns, is the reward at its last token of a GAE over its tokens.

        G_k = A_k + V_k,  A_k = GAE(gamma, lam) over turns, with V_k the critic's value at the turn's first token
        A_t = GAE(token_gamma, token_lam) over the tokens of turn k, with reward G_k at the last one and nothing after it

    Source: VAGEN, arXiv 2510.16907, and RAGEN, 2504.20073. Where a turn ends is known from the turns themselves: the
    authors' code finds it by a reward that is not 0, and so merges turns without a reward into the next.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VALUES})
    granularity: ClassVar = "token"
    paper: ClassVar = "VAGEN 2510.16907, RAGEN 2504.20073"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from turn to turn."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """The lambda of the GAE over turns."""
    token_gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from token to token within a turn."""
    token_lam: float = Field(default=1.0, ge=0, le=1)
    """The lambda of the GAE over tokens."""

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
        first_K = np.array([values_T[0] for values_T in values])
        rewards_K = [turn.reward for turn in trajectory.turns]
        last = final_value(trajectory)
        returns_K = first_K + gae(rewards_K, first_K, gamma=self.gamma, lam=self.lam, final_value=last)
        tokens = [
            gae([0.0] * (len(values_T) - 1) + [total], values_T, gamma=self.token_gamma, lam=self.token_lam)
            for values_T, total in zip(values, returns_K, strict=True)
        ]
        return Credit.from_tokens(trajectory, np.concatenate(tokens))
