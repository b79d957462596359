"""Folders of runs, written by hand: what a report reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord
from tests.support.records import record, turn

CONFIG: dict[str, Any] = {
    "env": {"id": "desk"},
    "credit": {"scheme": "uniform"},
    "rollout": {"num_groups": 1, "group_size": 2},
    "train": {"steps": 3},
}


def make_run(
    path: Path,
    *,
    seed: int = 0,
    rewards: Sequence[float] = (0.0, 0.5, 1.0),
    rollouts: Sequence[TrajectoryRecord] | None = None,
    **sections: Any,
) -> RunFolder:
    """Write a run of a step for each reward, with a group of rollouts of the last step."""
    folder = RunFolder.create(path, {"seed": seed, **CONFIG, **sections})
    for step, reward in enumerate(rewards, 1):
        folder.add_metrics({"step": float(step), "reward/mean": reward, "time/step_s": 2.0 + step / 8})
    if rollouts is None:
        rollouts = [member(0, reward=1.0), member(1, reward=0.0)]
    folder.add_rollouts(len(rewards), rollouts)
    return folder


def member(
    number: int, *, reward: float, text: str = "the answer", task: str = "1 + 1?", **fields: Any
) -> TrajectoryRecord:
    """Return a rollout of one turn of two tokens."""
    said = turn([{"role": "user", "content": task}], [text, "."], [reward - 0.5, 0.0])
    given = record(said.model_copy(update={"reward": reward}))
    update = {"trajectory_id": f"train/000001/{number}", "reward": reward, "step": 3, **fields}
    return given.model_copy(update=update)
