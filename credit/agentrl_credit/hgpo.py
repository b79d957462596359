"""HGPO: returns that followed a state among visits with the same history, mixed over lengths of history."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, center, group_normalize
from agentrl_credit.turns import Comparison, Turns


class HGPO(Comparison):
    """A_k = sum_c w_c norm(G_k among the group's turns that share their last c + 1 states), w_c ~ (c + 1)^alpha.

    Source: arXiv 2602.22817. c runs from 0 (the state alone, the step term of GiGPO) to `context`, the weights sum to 1,
    norm is x - mean or (x - mean) / (sd + eps), and G_k = r_k + gamma * G_{k+1}. Turns with fewer than c predecessors
    share the whole of their history.

    A cell with one member contributes 0 with its weight. Dropping such zeros and scaling the other weights up would
    credit turns by how rare their history is.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATE_KEYS})
    paper: ClassVar = "HGPO 2602.22817"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    context: int = Field(default=2, ge=0, le=1000)
    """Most states before the present one that a cell's members share."""
    alpha: float = Field(default=1.0, ge=-20, le=20)
    """0 weighs all lengths of history alike; the larger, the more the long ones count."""
    normalize: Literal["none", "std"] = "none"
    """`std` divides each cell's term by its standard deviation, plus eps."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of turns less this. Read by `std`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `std`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        returns_N, keys = turns.returns_to_go(gamma=self.gamma), turns.keys("state_key")
        weights = np.arange(1.0, self.context + 2) ** self.alpha
        advantages_N = np.zeros_like(returns_N)
        cells_N = turns.cells(keys)
        for c, weight in enumerate(weights / weights.sum()):
            if c > 0:  # the cell with one state more: the present state, and the cell of the turn before
                before = np.where(turns.index_N > 0, np.roll(cells_N, 1), -1)
                cells_N = turns.cells(keys, before)
            if self.normalize == "none":
                advantages_N += weight * center(returns_N, cells_N)
            else:
                advantages_N += weight * group_normalize(returns_N, cells_N, ddof=self.ddof, eps=self.eps)
        return advantages_N
