"""A control: another scheme's advantages, dealt out to the wrong turns or trajectories at random."""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup, load_credit
from agentrl_credit.stages import Array, broadcast_turns
from agentrl_credit.turns import Spec, turn_lengths


class Shuffled(CreditScheme):
    """Control: the scheme's advantages are permuted. The gain of being in the right place is lost; their sizes stay.

        turns:         A'_k = A_{pi(k)}, pi a permutation of the trajectory's turns, A_k the mean over the turn's tokens
        trajectories:  A'_i = A_{pi(i)}, pi a permutation of the group's trajectories, A_i the mean over all tokens

    Source: a permutation test, put to a training run. A permutation is drawn from the seed and the ids, any as likely as
    another, the one that moves nothing included: a place then earns the mean of all, whatever was done there. Permutations
    without a fixed point would give each place what it did not earn, and push away from what is right.

    Trajectories that the scheme leaves out of the loss stay out and are not permuted, nor are tokens that it leaves out.
    """

    paper: ClassVar = "a control: permutation test"
    is_control: ClassVar[bool] = True

    of: Spec = Field(default={"scheme": "uniform"})
    """The scheme whose advantages are dealt out, as under `credit:` in a recipe."""
    among: Literal["turns", "trajectories"] | None = None
    """Permuted units: turns within each trajectory, or trajectories within each group. None: turns, if the scheme
    distinguishes them."""
    seed: int = Field(default=0, ge=0)
    """Seed of the permutations."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.among == "turns" and self.inner().finest() == "trajectory":
            raise ValueError(
                f"among: turns changes nothing of {self.of['scheme']!r}, which credits all turns alike; set it to trajectories"
            )
        return self

    def inner(self) -> CreditScheme:
        """Return the scheme whose advantages are dealt out."""
        return load_credit(self.of)

    def requirements(self) -> frozenset[Need]:
        """Return what that scheme reads."""
        return self.inner().requirements()

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: what the scheme raises.
        """
        scheme = self.inner()
        among = self.among or ("trajectories" if scheme.finest() == "trajectory" else "turns")
        deal = self._among_turns if among == "turns" else self._among_trajectories
        assigned = scheme.assign(groups)
        return [deal(group, row) for group, row in zip(groups, assigned, strict=True)]

    def _among_turns(self, group: TrajectoryGroup, row: Sequence[Credit]) -> list[Credit]:
        return [self._permuted(t, credit) for t, credit in zip(group.trajectories, row, strict=True)]

    def _permuted(self, trajectory: Trajectory, credit: Credit) -> Credit:
        if not credit.keep_T.any():
            return credit
        lengths, starts = turn_lengths(trajectory), np.cumsum([0, *turn_lengths(trajectory)[:-1]])
        kept_K = np.add.reduceat(credit.keep_T.astype(np.int64), starts)
        sums_K = np.add.reduceat(np.where(credit.keep_T, credit.advantages_T, 0.0).astype(np.float64), starts)
        means_K = np.divide(sums_K, kept_K, out=np.zeros_like(sums_K), where=kept_K > 0)
        means_K[kept_K > 0] = self._rng(trajectory.trajectory_id).permutation(means_K[kept_K > 0])
        return _credit(trajectory, broadcast_turns(means_K, lengths), credit)

    def _among_trajectories(self, group: TrajectoryGroup, row: Sequence[Credit]) -> list[Credit]:
        trajectories = group.trajectories
        kept = [index for index, credit in enumerate(row) if credit.keep_T.any()]
        kept.sort(key=lambda index: trajectories[index].trajectory_id)  # not their order, which is chance
        dealt = self._rng(group.group_id).permutation(
            [row[index].advantages_T[row[index].keep_T].mean() for index in kept]
        )
        found = list(row)
        for index, advantage in zip(kept, dealt, strict=True):
            found[index] = _credit(trajectories[index], np.full(row[index].keep_T.shape, advantage), row[index])
        return found

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode(errors="surrogatepass")])


def _credit(trajectory: Trajectory, advantages_T: Array, like: Credit) -> Credit:
    return Credit.from_tokens(trajectory, np.where(like.keep_T, advantages_T, 0.0), keep_T=like.keep_T)
