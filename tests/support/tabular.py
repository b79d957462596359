"""Rows of decisions and a policy that is a table, on which credit schemes are compared (`benchmarks/credit_tabular.py`).

Legend: `K` decisions, `A` actions, `N` episodes of a step, `D` features.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agentrl import StopReason, Trajectory, TrajectoryGroup, Turn
from agentrl.report.advise import COMPARED

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_ACTIONS, NUM_GROUPS, SKILL = 4, 4, 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One task."""

    horizon: int = 12
    locks: int = 4
    noise: float = 1.0
    group_size: int = 8
    aliased: bool = False
    """State keys do not tell whether all locks so far are open."""
    paid: str = "end"


BASE = Cell()
SHUFFLED = "shuffled action_values"
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: dict(section) for name, section in COMPARED.items()},
    SHUFFLED: {"scheme": "shuffled", "of": dict(COMPARED["action_values"])},
}


@cache
def turn(
    decision: int, opened: bool, action: int, opened_after: bool, reward: float, is_last: bool, aliased: bool
) -> Turn:
    """Return a decision as a turn of one token."""

    def key(k: int, is_open: bool) -> str:
        return f"{k}" if aliased else f"{k}/{is_open}"

    return Turn(
        observation_ids=(decision,),
        action_ids=(action,),
        behavior_logprobs=(0.0,),  # the schemes here do not read it
        versions=(0,),
        reward=reward,
        state_key=key(decision, opened),
        next_state_key=None if is_last else key(decision + 1, opened_after),
        action_key=f"{action}",
    )


class Row:
    """A row of decisions and the policy that makes them, for one seed."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        rng = np.random.default_rng([seed, 0])
        features_KD = rng.normal(size=(cell.horizon, cell.horizon)) / math.sqrt(cell.horizon)
        self.locks = np.unique(np.linspace(0, cell.horizon - 1, cell.locks).round().astype(int))
        self.right = rng.integers(NUM_ACTIONS, size=cell.horizon)
        logits_KA = np.zeros((cell.horizon, NUM_ACTIONS))
        logits_KA[self.locks, self.right[self.locks]] = math.log(SKILL / ((1 - SKILL) / (NUM_ACTIONS - 1)))
        self.features_KD = torch.from_numpy(features_KD)
        self.weights_DA = torch.from_numpy(np.linalg.solve(features_KD, logits_KA)).requires_grad_()
        self._rng = np.random.default_rng([seed, 1])
        self._seed, self._num_steps = seed, 0

    def logprobs(self) -> torch.Tensor:
        return (self.features_KD @ self.weights_DA).log_softmax(-1)

    def success(self) -> float:
        with torch.no_grad():
            return float(self.logprobs()[self.locks, self.right[self.locks]].sum().exp())

    def play(self) -> tuple[list[TrajectoryGroup], Ints]:
        """Play a step's episodes; return them, and their actions (N, K)."""
        cell, num = self.cell, NUM_GROUPS * self.cell.group_size
        self._num_steps += 1
        with torch.no_grad():
            shares_KA = self.logprobs().exp().numpy().cumsum(axis=1)
        draws_NK = self._rng.random((num, cell.horizon))
        actions_NK = (draws_NK[:, :, None] > shares_KA[None, :, :-1]).sum(axis=2)
        chance_NK = self._rng.choice([-1.0, 1.0], size=(num, cell.horizon)) * cell.noise / math.sqrt(cell.horizon)
        is_lock_K = np.isin(np.arange(cell.horizon), self.locks)
        right_NK = (actions_NK == self.right) | ~is_lock_K
        opened_NK = np.logical_and.accumulate(right_NK, axis=1)
        rewards_NK = chance_NK
        if cell.paid == "turn":
            rewards_NK = rewards_NK + (right_NK & is_lock_K) / len(self.locks)
        else:
            rewards_NK = np.zeros_like(chance_NK)
            rewards_NK[:, -1] = opened_NK[:, -1] + chance_NK.sum(axis=1)
        groups = []
        for g in range(NUM_GROUPS):
            members = range(g * cell.group_size, (g + 1) * cell.group_size)
            trajectories = [self._trajectory(g, n, actions_NK[n], opened_NK[n], rewards_NK[n]) for n in members]
            groups.append(TrajectoryGroup(group_id=self._name(g), trajectories=tuple(trajectories)))
        return groups, actions_NK

    def _name(self, group: int) -> str:
        """Name a group as no other of any step or seed: `shuffled` draws its permutations from names."""
        return f"{self._seed}/{self._num_steps}/{group}"

    def _trajectory(self, group: int, number: int, action_K: Ints, opened_K: Any, reward_K: Array) -> Trajectory:
        before_K = [True, *opened_K[:-1].tolist()]
        rows = zip(before_K, action_K.tolist(), opened_K.tolist(), reward_K.tolist(), strict=True)
        last = self.cell.horizon - 1
        return Trajectory(
            group_id=self._name(group),
            trajectory_id=f"{self._name(group)}/{number}",
            env_id="row",
            seed=group,
            turns=tuple(turn(k, *row, k == last, self.cell.aliased) for k, row in enumerate(rows)),
            stop_reason=StopReason.TERMINATED,
        )
