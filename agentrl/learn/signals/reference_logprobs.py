"""Log-probability of each action token under the policy with which the run began."""

from typing import ClassVar

from agentrl.learn.signals.base import Sample, Signal
from agentrl.learn.tokens import TokenBatch
from agentrl.types import Trajectory


class ReferenceLogprobs(Signal):
    """One forward pass of the reference."""

    sample: ClassVar = Sample(start=-0.3, step=-0.2, by_trajectory=1, by_turn=2, period=4)

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the reference's log-probabilities."""
        from agentrl.learn.signals.scoring import logprobs, with_tokens

        assert self.context.reference is not None, "kept where a scheme reads it"
        column = logprobs(self.context, TokenBatch.from_trajectories(trajectories), policy=self.context.reference)
        return with_tokens(trajectories, "reference_logprobs", column)
