"""Train with a credit scheme of your own: python examples/custom_scheme.py"""

import sys
from collections.abc import Sequence

import numpy as np

import agentrl
from agentrl import Credit, CreditScheme, TrajectoryGroup


class LateReward(CreditScheme):
    """Each turn's advantage is the reward from there on, discounted, less the group's mean at that turn."""

    gamma: float = 0.9

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [self._group(group) for group in groups]

    def _group(self, group: TrajectoryGroup) -> list[Credit]:
        returns = [self._returns([turn.reward for turn in t.turns]) for t in group.trajectories]
        longest = max(map(len, returns))
        means = [np.mean([r[k] for r in returns if k < len(r)]) for k in range(longest)]
        return [
            Credit.from_turns(t, [value - mean for value, mean in zip(r, means, strict=False)])
            for t, r in zip(group.trajectories, returns, strict=True)
        ]

    def _returns(self, rewards: list[float]) -> list[float]:
        returns, later = [], 0.0
        for reward in reversed(rewards):
            later = reward + self.gamma * later
            returns.append(later)
        return returns[::-1]


def main() -> None:
    agentrl.train(
        "corridor",
        credit=LateReward(gamma=0.8),
        overrides=sys.argv[1:],
    )


if __name__ == "__main__":
    main()
