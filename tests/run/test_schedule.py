"""Options of the environment that change with the step."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.recipe.config import Recipe
from agentrl.report.records import read_records
from agentrl.run.build import build
from tests.support.each import each
from tests.support.runs import recipe, train
from tests.support.table import Table

pytestmark = pytest.mark.process

SCHEDULE = [
    {"from_step": 2, "options": {"digits": 3, "num_train": 2}},
    {"from_step": 4, "options": {"digits": 5, "num_train": 4}},
]


class Digits(Table):
    """`What follows 0007?`, and a second tool where it is asked for."""

    def __init__(self, *, digits: int = 1, is_odd: bool = False, is_broken: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.digits, self.is_broken = digits, is_broken
        if is_odd:
            self.tools = [{"type": "function", "function": {"name": "odd", "parameters": {"type": "object"}}}]

    def start(self, options: dict[str, Any]) -> str:
        if self.is_broken:
            raise RuntimeError("out of numbers")
        super().start(options)
        return f"What follows {self.row:0{self.digits}}?"


def settings(tmp_path: Path, *, steps: int = 5, schedule: Any = SCHEDULE, **sections: Any) -> Recipe:
    env = {"id": f"{__name__}:Digits", "schedule": schedule}
    return recipe(tmp_path, env=env, train={"steps": steps}, evaluation={"every": 1, "num_tasks": 2}, **sections)


def played(folder: Any) -> list[tuple[int, int, int | None, str]]:
    return [
        (record.step, record.stage, record.task_index, str(record.turns[0].observation[-1]["content"]))
        for path in folder.rollouts()
        for record in read_records(path)
    ]


@pytest.mark.slow
def test_each_step_has_its_options_and_evaluation_the_recipes_own(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole, rows = train(settings(tmp_path / "whole"))
    for step, stage, task, asked in played(whole):
        assert stage == (step >= 2) + (step >= 4)
        assert task is not None
        assert task < (7, 2, 4)[stage]
        assert asked == f"What follows {task:0{(1, 3, 5)[stage]}}?"
    assert [row.get("episode/stage") for row in rows] == [None, None, 1.0, 1.0, 2.0, 2.0]
    assert {row["eval/episodes"] + row["eval/failed"] for row in rows} == {2.0}
    part, _ = train(settings(tmp_path, steps=2))
    part, _ = train(settings(tmp_path), part)
    assert played(part) == played(whole)


def test_environments_are_kept_for_episodes_with_the_same_options_alone(tmp_path: Path) -> None:
    with build(settings(tmp_path)) as parts:
        ((environments, _),) = parts.env_players
        environments.is_reused = True
        for version in (0, 1, 1, 3):
            parts.weight_sync.verify_and_push(version)
            groups = parts.runner.run(parts.pool.collect())
            stage = (version >= 1) + (version >= 3)
            assert {t.stage for group in groups for t in group.trajectories} == {stage}
            kept = [thread.env for thread in environments._idle if thread.env is not None]
            assert kept
            # Those that played nothing since are closed when their turn comes.
            assert (1, 3, 5)[stage] in {env.unwrapped.digits for env in kept}  # type: ignore[attr-defined]
        for group in groups:
            for trajectory in group.trajectories:
                assert trajectory.turns[0].observation[-1]["content"] == f"What follows {trajectory.task_index:05}?"


@each(
    ("options", "words"),
    [
        ({"digit": 3}, r"^env\.schedule\.1: env\.options: .* unexpected keyword argument 'digit'"),
        ({"num_train": 0}, r"^env\.schedule\.1: the environment has no training tasks"),
        ({"is_odd": True}, r"^env\.schedule\.1: the environment has other tools"),
        ({"is_broken": True}, r"^env\.schedule\.1: .*out of numbers"),
    ],
)
def test_an_entry_that_cannot_be_played_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train(settings(tmp_path, schedule=[SCHEDULE[0], {"from_step": 3, "options": options}]))
    assert not (tmp_path / "run").exists()


def test_what_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule\.1\.from_step: 2 does not come after 4"):
        settings(tmp_path, schedule=SCHEDULE[::-1])
    with pytest.raises(ValueError, match=r"rollout\.curriculum: judges tasks by their numbers"):
        settings(tmp_path, rollout={"curriculum": {}})
    with pytest.raises(ValueError, match=r"env\.hard\.schedule: every evaluation is in the same environment"):
        recipe(tmp_path, evaluation={"env": {"hard": {"id": "key_door", "schedule": SCHEDULE}}})
