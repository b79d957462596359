"""The return, laid out over the turns that it goes with, as rewards for another scheme: RUDDER, SPA-RL."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditScheme, Need, TrajectoryGroup, load_credit
from agentrl_credit.stages import Array, Ints, label
from agentrl_credit.turns import RewardSpec, Turns, map_turns, requirements_after


class Redistribute(CreditScheme):
    """r'_k = w(s_k, a_k) + (R - mean R - sum_j w(s_j, a_j)) / K, mean R more at the last turn; then another scheme.

        w = argmin sum_i (R_i - mean R - sum_k w(s_ik, a_ik))^2 + ridge * |w|^2

    Source: RUDDER, arXiv 1806.07857, and SPA-RL, 2505.20732, with least squares over pairs of state and action in place
    of a network; it is fitted over the batch. Each trajectory's r' sum to its return, so that whole returns stay what they
    were; but what a turn is paid depends on the outcome, so a `then` that credits turns with what followed them is biased
    where it was not. The fit by itself is no advantage: it says what goes with a high return, not what an action adds.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS, Need.ACTION_KEYS})
    paper: ClassVar = "RUDDER 1806.07857, SPA-RL 2505.20732"

    then: RewardSpec = Field(default={"scheme": "turn_return"})
    """The scheme that credits the redistributed rewards, as under `credit:` in a recipe."""
    ridge: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Number of observations that the prior w = 0 weighs as much as."""

    def inner(self) -> CreditScheme:
        """Return the scheme that credits the rewards."""
        return load_credit(self.then)

    def finest(self) -> Literal["trajectory", "turn", "token"]:
        """Return that of the scheme that credits the rewards."""
        return self.inner().finest()

    def requirements(self) -> frozenset[Need]:
        """Return what the fit reads, and what the scheme after it reads beside turn rewards."""
        return self.needs | requirements_after(self.inner())

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a turn without keys, and what the scheme after it raises.
        """
        rewards = self._rewards(Turns.of([group.valid for group in groups]))
        moved = map_turns(
            groups,
            lambda t: [replace(turn, reward=float(r)) for turn, r in zip(t.turns, next(rewards), strict=True)],
        )
        return self.inner().assign(moved)

    def _rewards(self, turns: Turns) -> Iterator[Array]:
        """Yield the redistributed rewards of each trajectory."""
        if not turns.trajectories:
            return
        mean = turns.returns_M.mean()
        pairs_N = label(zip(turns.keys("state_key"), turns.keys("action_key"), strict=True))
        fitted_N = _ridge(pairs_N, turns.owner_N, turns.returns_M - mean, ridge=self.ridge)[pairs_N]
        rest_M = turns.returns_M - mean - np.bincount(turns.owner_N, weights=fitted_N)
        rewards_N = fitted_N + (rest_M / turns.lengths_M)[turns.owner_N]
        rewards_N[np.cumsum(turns.lengths_M) - 1] += mean
        yield from turns.split(rewards_N)


def _ridge(feature_N: Ints, owner_N: Ints, targets_M: Array, *, ridge: float) -> Array:
    """Solve (X^T X + ridge) w = X^T y by conjugate gradients, X[m, f] counting feature f in trajectory m: (F,)."""

    def product(weights_F: Array) -> Array:
        sums_M = np.bincount(owner_N, weights=weights_F[feature_N], minlength=len(targets_M))
        return np.bincount(feature_N, weights=sums_M[owner_N], minlength=len(weights_F)) + ridge * weights_F

    residual = np.bincount(feature_N, weights=targets_M[owner_N]).astype(np.float64)
    solution, direction = np.zeros_like(residual), residual.copy()
    norm = limit = residual @ residual
    for _ in range(len(residual)):
        if norm <= 1e-20 * limit:
            break
        image = product(direction)
        step = norm / (direction @ image)
        solution += step * direction
        residual -= step * image
        norm, previous = residual @ residual, norm
        direction = residual + (norm / previous) * direction
    return solution
