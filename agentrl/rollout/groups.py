"""Groups of episodes and their names."""

from collections.abc import Iterable
from dataclasses import replace

from agentrl.rollout.live_episode import Task
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.tasks import EnvTask
from agentrl.types import Trajectory, TrajectoryGroup


def group_name(index: int) -> str:
    """Return the name of the group with a number in the stream."""
    return f"train/{index:06d}"


def group_index(name: str) -> int:
    """Return a group's number in the stream."""
    return int(name.rpartition("/")[2])


def members(name: str, task: EnvTask, *, size: int, run_seed: int) -> list[Task]:
    """Return the tasks of a group's episodes."""
    first = Task(
        group_id=name,
        rollout_index=0,
        seed=task.seed,
        sampling_seed=derive_seed(run_seed, "sampling"),
        split=task.split,
        task_index=task.index,
        stage=task.stage,
    )
    return [replace(first, rollout_index=index) for index in range(size)]


def group_of(name: str, trajectories: Iterable[Trajectory]) -> TrajectoryGroup:
    """Return a group of trajectories in their order, in whatever order they ended."""
    ordered = sorted(trajectories, key=lambda t: int(t.trajectory_id.rpartition("/")[2]))
    return TrajectoryGroup(group_id=name, trajectories=tuple(ordered))
