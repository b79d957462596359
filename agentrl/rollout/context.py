"""What all episodes of a pool have in common."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl.chat import Renderer
from agentrl.engine import Sampler
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.deadline import EngineClock

S_co = TypeVar("S_co", bound=Sampler, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext(Generic[S_co]):
    """What all episodes of a pool are played with."""

    engine: S_co
    """Samples the actions."""
    renderer: Renderer
    """Of messages and tokens."""
    config: RolloutConfig
    """Limits and deadlines."""
    clock: EngineClock = field(default_factory=EngineClock)
    """Of the engine's deadlines; whoever pauses the engine stops it."""
