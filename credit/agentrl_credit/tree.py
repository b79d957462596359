"""The step from the value of one moment to the value of the next, both from forked rollouts: VinePPO, SPO."""

from itertools import pairwise
from typing import ClassVar

import numpy as np
from pydantic import Field

from agentrl import Need, Trajectory
from agentrl_credit.stages import Array, cell_means, discounted_sum
from agentrl_credit.turns import Comparison, Turns, needed


class Tree(Comparison):
    """A_k = r_k + gamma * V(s_{k+1}) - V(s_k), V(s_k) the mean return of the rollouts that were forked before turn k.

    Source: VinePPO, arXiv 2410.01679; SPO, 2505.23564. The trajectory's siblings began where it began, so they
    count among the rollouts from its first turn; its own return enters none of its values. After the last turn V is 0,
    also where a limit ended the episode: the forks had the same limits.

    Turns between two forks share what was gained from one to the next, as the segments of SPO do. With gamma 1 the sum
    over the forked turns is R - V(start). The forked rollouts are measurements: they are not trained on, so that the
    turns they share with the trajectory count once.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.BRANCHES})
    paper: ClassVar = "VinePPO 2410.01679, SPO 2505.23564"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        is_start_N = turns.index_N == 0
        returns_M = turns.returns_to_go(gamma=self.gamma)[is_start_N]
        siblings = cell_means(returns_M, turns.group_M, owners_N=np.arange(len(returns_M)))
        found = [
            self._advantages(trajectory, sibling_mean=float(mean), num_siblings=int(count))
            for trajectory, mean, count in zip(turns.trajectories, *siblings, strict=True)
        ]
        return np.concatenate(found)

    def _advantages(self, trajectory: Trajectory, *, sibling_mean: float, num_siblings: int) -> Array:
        forked = needed(trajectory, "branch_rewards")
        returns = [[discounted_sum(rewards, gamma=self.gamma) for rewards in rollouts] for rollouts in forked]
        start = (sibling_mean * num_siblings + sum(returns[0])) / (num_siblings + len(returns[0]))
        places = [0, *(k for k in range(1, len(returns)) if returns[k]), len(returns)]
        values = [start, *(sum(returns[k]) / len(returns[k]) for k in places[1:-1]), 0.0]
        advantages_K = np.empty(len(forked))
        for i, (first, end) in enumerate(pairwise(places)):
            rewards = [turn.reward for turn in trajectory.turns[first:end]]
            advantages_K[first:end] = discounted_sum([*rewards, values[i + 1]], gamma=self.gamma) - values[i]
        return advantages_K
