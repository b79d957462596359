"""A judge's scores as rewards of turns, for another scheme."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup, Turn, load_credit
from agentrl_credit.turns import RewardSpec, map_turns, needed, requirements_after


class Judge(CreditScheme):
    """r'_k = r_k + score_weight * score_k, then another scheme on these rewards.

    The scores come from the callable that `signals.judge` names. The policy is then trained to please it: a judge that
    likes long or flattering turns gets them, whatever the environment pays. Keep `score_weight` small beside the true
    reward, and watch that the evaluation, which no judge enters, keeps rising.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_SCORES})
    paper: ClassVar = "process rewards by a judge"

    then: RewardSpec = Field(default={"scheme": "turn_return"})
    """The scheme that credits the rewards, as under `credit:` in a recipe."""
    score_weight: float = Field(default=1.0, allow_inf_nan=False)
    """Weight of a score beside the environment's reward, in units of reward."""

    def inner(self) -> CreditScheme:
        """Return the scheme that credits the rewards."""
        return load_credit(self.then)

    def finest(self) -> Literal["trajectory", "turn", "token"]:
        """Return that of the scheme that credits the rewards."""
        return self.inner().finest()

    def requirements(self) -> frozenset[Need]:
        """Return the scores, and what the scheme after them reads beside turn rewards."""
        return self.needs | requirements_after(self.inner())

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a turn without a score, and what the scheme after it raises.
        """
        return self.inner().assign(map_turns(groups, self._rewarded))

    def _rewarded(self, trajectory: Trajectory) -> list[Turn]:
        scored = zip(trajectory.turns, needed(trajectory, "turn_scores"), strict=True)
        return [replace(turn, reward=turn.reward + self.score_weight * score) for turn, score in scored]
