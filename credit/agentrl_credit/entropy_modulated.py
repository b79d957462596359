"""Another scheme's advantages, larger where the policy was sure: EMPG."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditScheme, Need, Trajectory, TrajectoryGroup, load_credit
from agentrl_credit.stages import Array, broadcast_turns, is_flat
from agentrl_credit.turns import Spec, Turns, credit_each, token_column, turn_lengths, turn_means


class EntropyModulated(CreditScheme):
    """A_k * g(H_k) + zeta * f(H_{k+1}): surer turns learn more, and turns that lead to surer ones earn a little.

        H_k = mean entropy of the turn's tokens, scaled to 0..1 over the batch
        g(H) = exp(-sharpness * H) / mean over the batch of exp(-sharpness * H),    f(H) = exp(-bonus_sharpness * H)

    Source: EMPG, arXiv 2509.09265. The last turn has no bonus. The paper subtracts the mean of the result over the
    batch; here zeta = 0 leaves the scheme below unbiased up to its weights, and a positive zeta rewards certainty
    itself, whatever it leads to: small values only.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.ENTROPIES})
    paper: ClassVar = "EMPG 2509.09265"

    of: Spec = Field(default={"scheme": "uniform"})
    """The scheme whose advantages are weighted, as under `credit:` in a recipe."""
    sharpness: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Ratio of the weight of the surest turn of the batch to that of the least sure: exp(sharpness)."""
    bonus_sharpness: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Ratio of the bonus before the surest turn to that before the least sure: exp(bonus_sharpness)."""
    zeta: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Weight of the bonus, in units of advantage."""

    def inner(self) -> CreditScheme:
        """Return the scheme whose advantages are weighted."""
        return load_credit(self.of)

    def finest(self) -> Literal["trajectory", "turn", "token"]:
        """Return "token" if the inner scheme distinguishes tokens."""
        return "token" if self.inner().finest() == "token" else "turn"

    def requirements(self) -> frozenset[Need]:
        """Return what the weights read, and what the weighted scheme reads."""
        return self.needs | self.inner().requirements()

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a turn without entropies, and what the weighted scheme raises.
        """
        turns = Turns.of([group.valid for group in groups])
        means = [turn_means(token_column(t, "entropies"), turn_lengths(t)) for t in turns.trajectories]
        entropies_N = _scaled(np.concatenate([[], *means]))
        weights_N = np.exp(-self.sharpness * entropies_N)
        weights_N /= weights_N.mean() if weights_N.size else 1.0
        bonuses_N = self.zeta * np.exp(-self.bonus_sharpness * entropies_N)
        columns = zip(turns.split(weights_N), turns.split(bonuses_N), strict=True)
        assigned = self.inner().assign(groups)
        credits = (
            c
            for group, row in zip(groups, assigned, strict=True)
            for t, c in zip(group.trajectories, row, strict=True)
            if not t.failed
        )

        def modulate(trajectory: Trajectory) -> Credit:
            credit, (weights_K, bonuses_K) = next(credits), next(columns)
            lengths = turn_lengths(trajectory)
            following_K = np.append(bonuses_K[1:], 0.0)
            advantages_T = credit.advantages_T * broadcast_turns(weights_K, lengths) + broadcast_turns(
                following_K, lengths
            )
            return Credit.from_tokens(trajectory, advantages_T, keep_T=credit.keep_T)

        return credit_each(groups, modulate)


def _scaled(values_N: Array) -> Array:
    """Map the smallest to 0 and the largest to 1; all to 0 if they are equal but for rounding."""
    return np.zeros_like(values_N) if is_flat(values_N).all() else (values_N - values_N.min()) / np.ptp(values_N)
