"""An episode under way, as data: what a journal and a checkpoint hold of it."""

from dataclasses import dataclass

from agentrl.rollout.tasks import EnvTask
from agentrl.types import Completion, Message, Split, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What fixes an episode before it begins."""

    group_id: str
    rollout_index: int
    """Number of this episode within its group."""
    seed: int
    """Seed of the environment, shared by the group."""
    sampling_seed: int
    """Seed from which each turn's sampling seed follows."""
    attempt: int = 0
    """How often this episode has been started before."""
    split: Split = "train"
    task_index: int | None = None
    """Number of the task within its split, shared by the group. None: not known."""
    stage: int = 0
    """Which entry of `env.schedule` the environment is made with, from 1. 0: none."""

    @property
    def env_task(self) -> EnvTask:
        """What the environment is made and told by, beside `rollout_index`."""
        return EnvTask(seed=self.seed, split=self.split, index=self.task_index, stage=self.stage)

    @property
    def trajectory_id(self) -> str:
        """Name of the episode."""
        return f"{self.group_id}/{self.rollout_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEpisode:
    """An episode under way: all that is needed to continue it elsewhere, but for the environment, which is played again."""

    task: Task
    turns: Turns = ()
    """What was played to the end of a step of the environment."""
    observation: tuple[Message, ...] | None = None
    """What the environment said last. None: not known."""
    snapshot: str | None = None
    """The environment after the last turn, pickled, in base64. None: it is played again."""
    partial: Completion | None = None
    """What was sampled of the next action, whole or in part."""
