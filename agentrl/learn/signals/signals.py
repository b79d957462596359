"""The signals that a run's credit scheme and its loss read, and no others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from agentrl.distributed.processes import from_rank_zero, is_main
from agentrl.errors import ConfigError
from agentrl.learn.signals import signal_classes
from agentrl.learn.signals.base import SignalContext
from agentrl.types import TrajectoryGroup, valid_trajectories


class Signals:
    """Measures trajectories before they are credited, and fits the signals that learn."""

    def __init__(self, context: SignalContext) -> None:
        """Make the signals that the scheme and the loss ask for.

        Raises:
            ConfigError: if a signal cannot be measured: no such judge, a sharded policy.
        """
        needs = context.scheme.requirements() | context.loss_needs
        self._signals = {need: make(context) for need, make in signal_classes().items() if need in needs}

    def begin(self) -> None:
        """Start from the policy as it is: called once it is warmed up, and not if a run is resumed."""
        for signal in self._signals.values():
            signal.begin()

    def measure(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Return the groups with the signals in the turns of every trajectory that did not fail.

        Rank 0 has the groups, and the others help it.
        """
        trajectories = valid_trajectories(groups)
        if from_rank_zero(lambda: bool(trajectories)):
            for signal in self._signals.values():
                trajectories = signal.measure(trajectories)
        found = iter(trajectories)
        return [
            replace(group, trajectories=tuple(t if t.failed else next(found) for t in group.trajectories))
            for group in groups
        ]

    def fit(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Fit the signals that learn to the groups of `measure`; return metrics."""
        metrics: dict[str, float] = {}
        trajectories = valid_trajectories(groups)
        if from_rank_zero(lambda: bool(trajectories)):
            for signal in self._signals.values():
                metrics |= signal.fit(trajectories)
        return metrics

    def save(self, folder: Path) -> None:
        """Write a file for each signal that learns; called on every rank, and rank 0 writes."""
        for need, signal in self._signals.items():
            if is_main() and (state := signal.state_dict()):
                torch.save(state, folder / f"{need}.pt")

    def load(self, folder: Path, *, device: torch.device) -> None:
        """Load the files of `save`.

        Raises:
            ConfigError: if the run has trained no such signal.
        """
        for need, signal in self._signals.items():
            if not signal.state_dict():
                continue
            if not (file := folder / f"{need}.pt").is_file():
                raise ConfigError(
                    f"the credit scheme reads {need}, and this run trained nothing for them; begin a new run with it"
                )
            signal.load_state_dict(torch.load(file, map_location=device, weights_only=True))
