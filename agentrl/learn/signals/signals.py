"""Everything that the credit scheme of a run reads, and nothing else."""

from collections.abc import Sequence
from dataclasses import replace

from agentrl.learn.signals import signal_classes
from agentrl.learn.signals.base import SignalContext
from agentrl.learn.signals.critic import Critic
from agentrl.learn.signals.values import Values
from agentrl.types import TrajectoryGroup, valid_trajectories


class Signals:
    """Measures trajectories before they are credited, and trains the critic where there is one."""

    def __init__(self, context: SignalContext) -> None:
        """Make what the scheme asks for.

        Raises:
            ConfigError: for no such judge.
        """
        needs = context.scheme.requirements()
        self._signals = [make(context) for need, make in signal_classes().items() if need in needs]

    @property
    def critic(self) -> Critic | None:
        """What a checkpoint holds beside the policy, where the scheme reads values."""
        return next((signal.critic for signal in self._signals if isinstance(signal, Values)), None)

    def begin(self) -> None:
        """Start from the policy as it is: called once it is warmed up, and not where a run is resumed."""
        for signal in self._signals:
            signal.begin()

    def measure(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Return the groups with what the scheme reads in the turns of every trajectory that did not fail."""
        trajectories = valid_trajectories(groups)
        if trajectories:
            for signal in self._signals:
                trajectories = signal.measure(trajectories)
        found = iter(trajectories)
        return [
            replace(group, trajectories=tuple(t if t.failed else next(found) for t in group.trajectories))
            for group in groups
        ]

    def fit(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Fit what `measure` returned; return metrics."""
        metrics: dict[str, float] = {}
        if trajectories := valid_trajectories(groups):
            for signal in self._signals:
                metrics |= signal.fit(trajectories)
        return metrics
