"""A critic's value of the context before each action token, in units of reward."""

from typing import ClassVar

from agentrl.learn.signals.base import Sample, Signal, SignalContext
from agentrl.types import Trajectory


class Values(Signal):
    """Predicted by a critic (`critic.py`), which is trained beside the policy; `Trajectory.final_value` goes with them."""

    sample: ClassVar = Sample(
        start=0.25, step=0.125, by_trajectory=2, by_turn=1, period=5, by_token=0.0625, in_rewards=True
    )

    def __init__(self, context: SignalContext) -> None:
        """Make the critic, with the discount of the scheme that reads it."""
        from agentrl.learn.signals.critic import Critic

        super().__init__(context)
        self.critic = Critic(
            context.policy,
            context.config.critic,
            gamma=next((layer.gamma for layer in context.scheme.chain() if hasattr(layer, "gamma")), 1.0),
            max_tokens=context.max_tokens,
            seed=context.seed,
            autocast=context.autocast,
        )

    def begin(self) -> None:
        """Take over the warmed-up policy's weights where the critic is a model of its own."""
        self.critic.begin()

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the critic's values."""
        return self.critic.measure(trajectories)

    def fit(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Fit the critic to what followed; return its metrics."""
        return self.critic.fit(trajectories)
