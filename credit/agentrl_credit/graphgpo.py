"""The distance to success on the group's graph of states, and which step shortened it: GraphGPO."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, Bools, Ints, center, group_normalize, label
from agentrl_credit.turns import Comparison, Turns

ROUNDING = 1e-9
"""Rewards that sum to the return of a success miss it by no more than this."""


def distances(sources_N: Ints, targets_N: Ints, *, goals_N: Bools) -> tuple[Array, Array]:
    """Count the fewest steps to a goal from where each step began, and from where it led; infinite if there is no way.

    d(source) = min over the steps from it of 1 + d(target); steps with `goals_N` lead to a goal, whose distance is 0.
    Shapes: (N,) each -> (N,), (N,).
    """
    to_goal_S = np.full(max(sources_N.max(), targets_N.max()) + 1, np.inf)
    while True:
        beyond_N = np.where(goals_N, 0.0, to_goal_S[targets_N])
        shorter_S = to_goal_S.copy()
        np.minimum.at(shorter_S, sources_N, 1.0 + beyond_N)
        if np.array_equal(shorter_S, to_goal_S):
            return to_goal_S[sources_N], beyond_N
        to_goal_S = shorter_S


class GraphGPO(Comparison):
    """A_k = norm(R) + step_weight * norm(omega^(d(s_{k+1}) + 1) among the group's turns in the same state).

    d(s) is the smallest number of steps from s to success by transitions that any trajectory of the group made, and 1 more
    than the largest such number where there is no way.

    Source: arXiv 2605.26684, eq. 4, at cost 1 for each step. norm is (x - mean) / (sd + eps), or x - mean. A step is
    credited by where it led, whatever the trajectory made of it later; a group without success has step term 0.

    Rewards play no part but to tell which episodes are a success, so that rewards of turns and partial scores are
    not read. The shortest way counts however rarely it was found: luck that one step met is credited to
    every step that leads there. Steps that lead round in a circle are penalised, whether or not time costs anything.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS})
    paper: ClassVar = "GraphGPO 2605.26684"

    success: float = Field(default=1.0, allow_inf_nan=False)
    """Return from which an episode that was not truncated counts as a success."""
    omega: float = Field(default=0.1, gt=0, lt=1)
    """Factor for each step of distance."""
    step_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the step term."""
    normalize: Literal["std", "none"] = "std"
    """`std` divides each term by its standard deviation, plus eps."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of values less this. Read by `std`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        returns_M, keys = turns.returns_M, turns.keys("state_key")
        sources_N, targets_N = self._steps(turns, keys)
        is_truncated_M = np.array([trajectory.truncated for trajectory in turns.trajectories])
        is_success_M = ~is_truncated_M & (returns_M >= self.success - ROUNDING)
        is_last_N = turns.index_N == turns.lengths_M[turns.owner_N] - 1
        from_N, beyond_N = distances(sources_N, targets_N, goals_N=is_last_N & is_success_M[turns.owner_N])
        farthest_G = np.zeros(turns.group_M.max() + 1)
        np.maximum.at(farthest_G, turns.group_N, np.where(np.isfinite(from_N), from_N, 0.0))
        distance_N = np.where(np.isfinite(beyond_N), beyond_N, 1.0 + farthest_G[turns.group_N])
        step_N = self._norm(self.omega ** (1.0 + distance_N), turns.cells(keys))
        return self._norm(returns_M, turns.group_M)[turns.owner_N] + self.step_weight * step_N

    def _steps(self, turns: Turns, keys: Sequence[str | None]) -> tuple[Ints, Ints]:
        """Number the state that each turn began in, and the one that it led to: (N,), (N,)."""
        after_M = [trajectory.turns[-1].next_state_key for trajectory in turns.trajectories]
        key_rows = turns.split(np.array([*keys], dtype=object))
        after = [key for row, last in zip(key_rows, after_M, strict=True) for key in (*row[1:], last)]
        groups = turns.group_N.tolist()
        numbers = label(zip([*groups, *groups], [*keys, *after], strict=True))
        return numbers[: len(keys)], numbers[len(keys) :]

    def _norm(self, values_N: Array, cells_N: Ints) -> Array:
        if self.normalize == "none":
            return center(values_N, cells_N)
        return group_normalize(values_N, cells_N, ddof=self.ddof, eps=self.eps)
