"""A judge's role of each turn corrects the outcome's advantage: TRIAGE."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, group_normalize
from agentrl_credit.turns import Comparison, Turns, needed

ROLES = {"progress": 1.0, "exploration": 0.5, "infrastructure": -0.1, "regression": -0.5}
"""The paper's score of each role: decisive progress, useful exploration, infrastructure without progress, regression."""


class Triage(Comparison):
    """A_k = whiten(norm(R) + role_weight * score_k), score_k the constant of the role that a judge gave turn k.

    Source: TRIAGE, arXiv 2606.32017. The callable that `signals.judge` names sorts each turn into one of four roles and
    returns `ROLES[role]`; it is shown a few turns on either side, and not the outcome. norm is (x - mean) / (sd + eps)
    over the group's trajectories, whiten the same over all turns of the batch.

    The score is added to the advantage, so that no later turn and no baseline takes it away; `judge` adds it to the reward. A
    role that is useful for the outcome on average helps, one that is not harms: watch the evaluation, which no judge
    enters. Groups whose returns are all equal are trained by the judge's word alone.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_SCORES})
    paper: ClassVar = "TRIAGE 2606.32017"

    role_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of a score beside the outcome's advantage, in standard deviations of the return."""
    normalize: Literal["batch", "none"] = "batch"
    """`batch` subtracts the mean of all turns' advantages over the batch and divides by (their sd + eps)."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of values less this."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        scores_N = np.array([score for t in turns.trajectories for score in needed(t, "turn_scores")], dtype=np.float64)
        outcome_M = group_normalize(turns.returns_M, turns.group_M, ddof=self.ddof, eps=self.eps)
        advantages_N = outcome_M[turns.owner_N] + self.role_weight * scores_N
        if self.normalize == "batch":
            return group_normalize(advantages_N, ddof=self.ddof, eps=self.eps)
        return advantages_N
