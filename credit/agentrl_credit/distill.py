"""On-policy distillation: how much more likely a teacher finds each token than the policy does."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup
from agentrl_credit.stages import returns_to_go
from agentrl_credit.turns import credit_each, token_column

_NEEDS = {
    "model": Need.TEACHER_LOGPROBS,
    "reference": Need.REFERENCE_LOGPROBS,
    "hindsight": Need.HINDSIGHT_LOGPROBS,
}


class Distill(CreditScheme):
    """A_t = sum_j discount^j d_{t+j}, d_t = -(policy log-prob - teacher log-prob) of action token t.

    Source: on-policy distillation, arXiv 2306.13649 with the reverse KL; SDPO, 2601.20802, where the teacher is the
    policy itself, shown how the episode ended (`teacher: hindsight`). The policy's log-probability is the one recorded at
    sampling, so that the mean of d is the negative KL divergence from the teacher. The sum runs over action tokens
    alone, across turns. With discount 0 each token is credited for itself.

    Rewards play no part: what the teacher does not know is not learned.
    """

    granularity: ClassVar = "token"
    reads_rewards: ClassVar[bool] = False
    paper: ClassVar = "on-policy distillation 2306.13649, SDPO 2601.20802"

    teacher: Literal["model", "reference", "hindsight"] = "model"
    """`model`: the one that `signals.teacher` names. `reference`: the policy with which the run began. `hindsight`: the
    policy itself, shown how the episode ended."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """Weight of the next action token's difference in this one's advantage."""

    def requirements(self) -> frozenset[Need]:
        """Return what this instance reads: the log-probabilities of its teacher."""
        return frozenset({_NEEDS[self.teacher]})

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a turn without the teacher's log-probabilities.
        """
        return credit_each(groups, self._credit)

    def _credit(self, trajectory: Trajectory) -> Credit:
        difference_T = token_column(trajectory, _NEEDS[self.teacher]) - token_column(trajectory, "behavior_logprobs")
        return Credit.from_tokens(trajectory, returns_to_go(difference_T, gamma=self.discount))
