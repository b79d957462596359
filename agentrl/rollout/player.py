"""The seam between a pool and whoever plays its episodes: an environment, or a program that calls the policy.

Pool and stream know tasks, states and trajectories; a `Player` knows how an episode comes about.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl.engine import Sampler
from agentrl.rollout.conversation import LiveEpisode
from agentrl.rollout.sample_action import EpisodeContext
from agentrl.types import Trajectory


class Play(Protocol):
    """An episode that is played once."""

    async def play(self) -> Trajectory:
        """Play to the end. A failure of the player or of the engine is returned as data.

        Raises:
            EnvironmentFailure: if no further episode can be played.
        """

    def live(self) -> LiveEpisode:
        """Return the state of the episode, from which another `Play` continues it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Functions of a pool that an episode calls."""

    on_change: Callable[[LiveEpisode], object] | None = None
    """Called with the state after each turn that was not recorded before. None: nobody records it."""
    on_fault: Callable[[Trajectory], object] = lambda _: None
    """Called with the episode, and each rollout forked from it, if its player fails."""
    on_count: Callable[[str], object] = lambda _: None
    """Called with the name of a count of the pool, each time that it grows."""


class Player(Protocol):
    """Plays the episodes of a pool, many at once."""

    def new(
        self, start: LiveEpisode, *, context: EpisodeContext[Sampler], listeners: Listeners, fork: bool = False
    ) -> Play:
        """Return an episode that continues from a state.

        Args:
            start: a task, and what was recorded of it.
            context: parts that all episodes of the pool share.
            listeners: functions of the pool.
            fork: fork rollouts from its turns according to `config.branches`, and record their rewards with the turns.
        """

    def close(self) -> None:
        """Release what is kept from one episode to the next."""
