"""A run in which tasks rest, stopped in the middle."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.report.records import read_records
from tests.support.runs import recipe, train
from tests.support.table import Table

pytestmark = pytest.mark.process


class Graded(Table):
    """Whatever is said, solves a third of the tasks always, a third never, and a third in the group's first episode."""

    def start(self, options: dict[str, Any]) -> str:
        self.member = options["rollout_index"]
        return super().start(options)

    def answer(self, text: str) -> None:
        self.finish(success=(True, False, self.member == 0)[self.row % 3])


def settings(tmp_path: Path, *, steps: int, **options: Any) -> Any:
    return recipe(
        tmp_path,
        env={"id": f"{__name__}:Graded", "options": options},
        chat={"renderer": "tests.run.test_history:OftenStopsConfig"},
        rollout={"curriculum": {"visits": 1, "rest": 2}, "max_turn_tokens": 64},
        train={"steps": steps},
    )


@pytest.mark.slow
def test_tasks_that_rest_are_left_out_and_a_resumed_run_takes_the_same(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole, rows = train(settings(tmp_path / "whole", steps=6))
    part, _ = train(settings(tmp_path, steps=2))
    part, _ = train(settings(tmp_path, steps=6), part)
    orders = [
        [(r.trajectory_id, r.task_index, r.seed) for path in folder.rollouts() for r in read_records(path)]
        for folder in (whole, part)
    ]
    assert orders[0] == orders[1]
    tasks = [index for name, index, _ in sorted(orders[0]) if name.endswith("/0")]
    assert sorted(tasks[:7], key=str) == list(range(7))
    # Two more epochs have two tasks each, and the first of them perhaps the one that was not yet known when it began.
    assert set(tasks[7:11]) - {tasks[6]} == {2, 5}
    assert rows[-1]["pool/resting_tasks"] >= 4


def test_tasks_without_end_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.curriculum: the environment's tasks have no end"):
        train(settings(tmp_path, steps=2, num_train=None))
    assert not (tmp_path / "run").exists()
