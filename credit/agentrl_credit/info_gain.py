"""A turn's reward is what it adds to the probability of the right answer: IGPO, A2TGPO, TIPS."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl import Need
from agentrl_credit.stages import Array, Ints, group_normalize
from agentrl_credit.turns import Comparison, Turns, needed


class InfoGain(Comparison):
    """A_k = sum_j gamma^j norm(r_{k+j} + info_weight * gain_{k+j}), gain_k = Phi_{k+1} - Phi_k; 0 at the last turn.

        `normalize: turn`:  A_k = norm(R) + info_weight * sum_j gamma^j norm(gain_{k+j}) / sqrt(n_k)

    Source: IGPO, arXiv 2510.14967; TIPS, 2603.22293; A2TGPO, 2605.06200. Phi_k is read where turn k begins: p = exp(mean
    log-prob of the known answer's tokens), had it been given there (`probability`), or log p (`log`, which is TIPS). The
    last turn is the answer itself, and earns the environment's reward alone. norm is (x - mean) / (sd + eps) over all turns
    of the group (`joint`); with `turn`, which is A2TGPO, of the return over the group's trajectories and of a gain over
    those of the same turn index, n_k the number of gains from turn k on. A2TGPO's third part, a clip range that grows with
    a turn's gain, belongs to the loss and is not built.

    The environment's reward of every turn is kept, where IGPO has none but the last. A policy can raise p by writing
    down its guess: the gain is the policy's belief, not the truth.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.ANSWER_LOGPROBS})
    paper: ClassVar = "IGPO 2510.14967, A2TGPO 2605.06200, TIPS 2603.22293"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount; it ticks once per turn."""
    potential: Literal["probability", "log"] = "probability"
    """Quantity whose difference is the gain."""
    info_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the gain beside the environment's reward, in units of reward."""
    normalize: Literal["joint", "turn", "none"] = "joint"
    """`joint` and `none`: baseline of each turn's sum of reward and gain. `turn`: returns and gains are compared apart."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by the number of turns less this. Read by `joint` and `turn`."""
    eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation, in units of reward. Read by `joint` and `turn`."""

    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        potentials = [np.array(needed(t, "answer_logprobs"), dtype=np.float64) for t in turns.trajectories]
        if self.potential == "probability":
            potentials = [np.exp(potential_K) for potential_K in potentials]
        gains_N = np.concatenate([np.append(np.diff(potential_K), 0.0) for potential_K in potentials])
        if self.normalize == "turn":
            return self._norm(turns.returns_M, turns.group_M)[turns.owner_N] + self._by_turn(turns, gains_N)
        rewards_N = turns.rewards_N + self.info_weight * gains_N
        if self.normalize == "joint":
            rewards_N = self._norm(rewards_N, turns.group_N)
        return turns.returns_to_go(gamma=self.gamma, rewards_N=rewards_N)

    def _by_turn(self, turns: Turns, gains_N: Array) -> Array:
        num_gains_N = turns.lengths_M[turns.owner_N] - 1 - turns.index_N
        gains_N = self._norm(gains_N, turns.cells(turns.index_N, np.minimum(num_gains_N, 1)))  # the last turn has none
        sums_N = turns.returns_to_go(gamma=self.gamma, rewards_N=gains_N)
        scaled_N: Array = self.info_weight * sums_N / np.sqrt(np.maximum(num_gains_N, 1))
        return scaled_N

    def _norm(self, values_N: Array, cells_N: Ints) -> Array:
        return group_normalize(values_N, cells_N, ddof=self.ddof, eps=self.eps)
