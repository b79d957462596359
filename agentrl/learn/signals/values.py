"""A critic's value of the context before each action token, in units of reward.

`Trajectory.signals` holds the value of the context after the last one: the expected rest of a truncated trajectory.
"""

from typing import Any, ClassVar

from agentrl.errors import ConfigError
from agentrl.learn.signals.base import Sample, Signal, SignalContext
from agentrl.types import Trajectory


class Values(Signal):
    """Predicted by a critic (`critic.py`), which is trained beside the policy."""

    sample: ClassVar = Sample(
        start=0.25, step=0.125, by_trajectory=2, by_turn=1, period=5, by_token=0.0625, in_rewards=True
    )
    trajectory_sample: ClassVar = 0.3

    def __init__(self, context: SignalContext) -> None:
        """Make the critic, with the discount of the scheme that reads it.

        Raises:
            ConfigError: if no rank will hold the whole policy.
        """
        from agentrl.learn.signals.critic import Critic

        super().__init__(context)
        if context.is_sharded:
            raise ConfigError("train.sharding: full leaves the critic no whole policy to read; set it to none")
        discounts = (scheme.critic_discount() for scheme in context.scheme.chain())
        self.critic = Critic(
            context.policy,
            context.config.critic,
            gamma=next((gamma for gamma in discounts if gamma is not None), 1.0),
            max_tokens=context.max_tokens,
            seed=context.seed,
            autocast=context.autocast,
        )

    def begin(self) -> None:
        """Copy the warmed-up policy's weights if the critic is a model of its own."""
        self.critic.begin()

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the critic's values."""
        return self.critic.measure(trajectories)

    def fit(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Fit the critic to the returns; return its metrics."""
        return self.critic.fit(trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Return the critic's weights, optimizer and count of updates."""
        return self.critic.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the learning rate is that of the recipe."""
        self.critic.load_state_dict(state)
