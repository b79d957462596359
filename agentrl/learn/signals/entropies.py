"""Entropy of the policy's distribution at each action token, in nats."""

from typing import ClassVar

from agentrl.learn.signals.base import Sample, Signal
from agentrl.learn.tokens import TokenBatch
from agentrl.types import Trajectory


class Entropies(Signal):
    """Read off one forward pass of the weights that sampled."""

    sample: ClassVar = Sample(start=0.5, step=0.1, by_trajectory=1, by_turn=2, period=7)

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with entropies."""
        from agentrl.learn.signals.scoring import entropies, with_tokens

        return with_tokens(
            trajectories, "entropies", entropies(self.context, TokenBatch.from_trajectories(trajectories))
        )
