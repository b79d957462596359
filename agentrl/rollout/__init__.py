"""Episodes, and the pool that plays many of them at once."""

from agentrl.rollout.config import BranchConfig, RolloutConfig
from agentrl.rollout.conversation import Conversation, End, LiveEpisode, Outcome, Task
from agentrl.rollout.episode import EnvPlayer, Episode
from agentrl.rollout.journal import Journal
from agentrl.rollout.limits import check_limits
from agentrl.rollout.player import Player
from agentrl.rollout.pool import RolloutPool
from agentrl.rollout.sample_action import EpisodeContext
from agentrl.rollout.tasks import EnvTask, Tasks, derive_seed, held_out_seed, task_seed
from agentrl.rollout.trial import describe_env, try_environment

__all__ = [
    "BranchConfig",
    "Conversation",
    "End",
    "EnvPlayer",
    "EnvTask",
    "Episode",
    "EpisodeContext",
    "Journal",
    "LiveEpisode",
    "Outcome",
    "Player",
    "RolloutConfig",
    "RolloutPool",
    "Task",
    "Tasks",
    "check_limits",
    "derive_seed",
    "describe_env",
    "held_out_seed",
    "task_seed",
    "try_environment",
]
