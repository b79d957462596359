"""Runs whose tasks follow from a curriculum or from a schedule, killed in the middle: they resume on the same tasks."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.distributed.checkpoints import checkpoints
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.rollout import Journal, Tasks
from agentrl.rollout.stream import TaskStream
from agentrl.rollout.tasks import Stage
from agentrl.types import NumTasks
from tests.support.processes import Command
from tests.support.runs import recipe, train

pytestmark = pytest.mark.process
Begun = dict[str, tuple[int | None, int]]
"""By the name of a group: the number of its task, and the entry of the schedule."""
GRADED = "tests.run.test_curriculum:Graded"
KINDS: dict[str, dict[str, Any]] = {
    "curriculum": {"env": {"id": GRADED}, "rollout": {"curriculum": {"visits": 1, "rest": 2}}},
    "schedule": {
        "env": {
            "id": GRADED,
            "schedule": [{"from_step": step, "options": {"num_train": 2 + step}} for step in range(2, 14, 2)],
        }
    },
}
STEPS = 6
"""That a run has finished when it is killed, at least; and that it makes after that."""


def settings(tmp_path: Path, kind: str, *, is_async: bool, steps: int = 10_000) -> Recipe:
    """Return a run that ends long after it is killed, with a checkpoint at every fourth step."""
    sections = KINDS[kind]
    rollout = {"max_turn_tokens": 64, **sections.get("rollout", {}), **({"mode": "async"} if is_async else {})}
    return recipe(
        tmp_path,
        env=sections["env"],
        chat={"renderer": "tests.run.test_history:OftenStopsConfig"},
        engine={"name": "transformers", "lockstep": not is_async},
        rollout=rollout,
        train={"steps": steps, "checkpoint_every": 4},
        report={"keep_rollouts": 10_000},
    )


def killed(tmp_path: Path, given: Recipe) -> RunFolder:
    """Return the folder of a run that was killed by SIGKILL after some steps."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(given.model_dump(mode="json")))
    process = Command("train", path)
    assert given.run_dir is not None
    rows = given.run_dir / "metrics.jsonl"
    while not rows.is_file() or rows.read_bytes().count(b"\n") <= STEPS:
        process.check_runs()
        time.sleep(0.01)
    process.kill()
    return RunFolder(given.run_dir)


def resumed(folder: RunFolder) -> int:
    """Resume a run for some steps more; return its last."""
    steps = int(folder.metrics()[-1]["step"]) + STEPS
    Command("train", folder.path, "--train.steps", steps).finish()
    return steps


def trained_on(folder: RunFolder) -> Begun:
    records = [record for path in folder.rollouts() for record in read_records(path)]
    return {record.group_id: (record.task_index, record.stage) for record in records}


def on_disk(folder: RunFolder, scratch: Path) -> tuple[TaskStream, Begun]:
    """Return what a killed run continues with, and the groups that it has begun and not trained on."""
    given = load_recipe(folder.config_file)
    stages = tuple(Stage(from_step=s.from_step, num_train=s.options["num_train"]) for s in given.env.schedule)
    tasks = Tasks(seed=given.seed, num=NumTasks(train=7, eval=3), stages=stages)
    shutil.copytree(folder.journal, scratch)
    stream = TaskStream(given.rollout, tasks=tasks, journal=Journal(scratch))
    state = json.loads((checkpoints(folder.checkpoints)[-1] / "agentrl.json").read_text())
    stream.load_state_dict(state["pool"])
    stream.recover(ignore=False)
    episodes = [(e.task.group_id, e.task.task_index, e.task.stage) for g in stream._groups.values() for e in g.waiting]
    done = [t for group in stream._groups.values() for t in group.done]
    done += [t for step in stream._handed_out for group in step for t in group.trajectories]
    episodes += [(t.group_id, t.task_index, t.stage) for t in done]
    return stream, {name: (index, stage) for name, index, stage in episodes}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_lockstep_it_takes_the_tasks_of_a_run_that_was_not_killed(tmp_path: Path, kind: str) -> None:
    folder = killed(tmp_path, settings(tmp_path, kind, is_async=False))
    steps = resumed(folder)
    (tmp_path / "whole").mkdir()
    whole, _ = train(settings(tmp_path / "whole", kind, is_async=False, steps=steps))
    assert trained_on(folder) == trained_on(whole)
    assert len(set(trained_on(whole).values())) > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["schedule", "curriculum"])
def test_with_a_journal_it_continues_with_the_tasks_that_were_begun_and_then_with_the_next(
    tmp_path: Path, kind: str
) -> None:
    folder = killed(tmp_path, settings(tmp_path, kind, is_async=True))
    stream, begun = on_disk(folder, tmp_path / "scratch")
    assert begun
    before = trained_on(folder)
    resumed(folder)
    after = trained_on(folder)
    assert {name: after[name] for name in begun} == begun
    finished = {name: entry for name, entry in before.items() if name not in begun}
    assert {name: after[name] for name in finished} == finished
    if stream._curriculum is not None:
        # Groups that end before the next is begun may let its task rest: then another one comes.
        judged = {index for index, _ in begun.values()}
        following = after[f"train/{stream._next_group:06d}"][0]
        expected = stream._tasks.train(0, place=stream._curriculum.next()).index
        assert following == expected or expected in judged
    else:
        assert [after[name][1] for name in sorted(after)] == sorted(stage for _, stage in after.values())
