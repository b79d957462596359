"""C3: the value that a turn led to, less what other actions in its place led to. Experimental."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Credit, CreditScheme, Need, TrajectoryGroup
from agentrl_credit.stages import discounted_sum, group_normalize, leave_one_out
from agentrl_credit.turns import Turns, credit_each, needed


class Difference(CreditScheme):
    """A_k = G_k - mean of the returns of the rollouts forked before turn k: the mean marginal over counterfactuals.

    Source: contextual counterfactual credit assignment (C3), arXiv 2603.06859, where an action is compared with others
    replayed in its place. Each forked rollout is one counterfactual, and the mean of the differences to them is the
    difference to their mean. With coalitions of the turns up to k, which is what forks record, the Shapley value's
    marginals are the steps of the scheme `tree`. A turn at which nothing was forked has no counterfactual and gets 0.

    Unbiased, and noisier than `tree`: G_k carries the chance of everything after turn k.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.BRANCHES})
    paper: ClassVar = "C3 2603.06859"
    experimental: ClassVar = True

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    normalize: Literal["none", "std"] = "none"
    """`std`: (G_k - mean) / (sd + eps), both over G_k and the forked rollouts' returns."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of returns less this. Read by `std`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std`."""

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a turn whose forks were not recorded.
        """
        turns = Turns.of([group.valid for group in groups])
        forked = [rollouts for trajectory in turns.trajectories for rollouts in needed(trajectory, "branch_rewards")]
        others = [discounted_sum(rewards, gamma=self.gamma) for rollouts in forked for rewards in rollouts]
        num_turns = len(forked)
        # A cell for each turn: its own return, and those of its counterfactuals.
        returns = np.concatenate([turns.returns_to_go(gamma=self.gamma), others])
        cells = np.concatenate([np.arange(num_turns), np.repeat(np.arange(num_turns), [len(row) for row in forked])])
        if self.normalize == "std":
            advantages_N = group_normalize(returns, cells, ddof=self.ddof, eps=self.eps)[:num_turns]
        else:
            advantages_N = leave_one_out(returns, cells)[:num_turns]
        pieces = iter(turns.split(advantages_N))
        return credit_each(groups, lambda trajectory: Credit.from_turns(trajectory, next(pieces)))
