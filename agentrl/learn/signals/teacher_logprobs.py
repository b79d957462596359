"""Log-probability of each action token under another model."""

from typing import ClassVar

from agentrl.learn.signals.base import Sample, Signal, SignalContext, SignalsConfig
from agentrl.learn.tokens import TokenBatch
from agentrl.types import Trajectory


class TeacherLogprobs(Signal):
    """One forward pass of the model that `signals.teacher` names."""

    sample: ClassVar = Sample(start=-0.2, step=-0.3, by_trajectory=2, by_turn=3, period=5)
    hint: ClassVar = "signals.teacher to a model"

    def __init__(self, context: SignalContext) -> None:
        """Load the teacher onto the policy's device; it is never trained."""
        super().__init__(context)
        device = next(context.policy.parameters()).device
        self._teacher = context.load_teacher().to(device).eval().requires_grad_(False)

    @classmethod
    def is_provided(cls, config: SignalsConfig) -> bool:
        """Whether the recipe names a teacher."""
        return bool(config.teacher)

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the teacher's log-probabilities."""
        from agentrl.learn.signals.scoring import logprobs, with_tokens

        column = logprobs(self.context, TokenBatch.from_trajectories(trajectories), policy=self._teacher)
        return with_tokens(trajectories, "teacher_logprobs", column)
