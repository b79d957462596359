"""An environment whose tasks are a table, in a run."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, EnvironmentFailure, UserError
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.run.build import build
from tests.support.runs import recipe, train
from tests.support.table import Table

pytestmark = pytest.mark.process


def settings(tmp_path: Path, *, steps: int = 4, **options: Any) -> Any:
    return recipe(
        tmp_path,
        env={"id": "tests.support.table:Table", "options": {"log": str(tmp_path / "log"), **options}},
        train={"steps": steps},
        evaluation={"num_tasks": 8, "samples": 2},
    )


def told(tmp_path: Path) -> list[tuple[str, int, int]]:
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    return [(split, int(index), int(member)) for split, index, member in lines]


def test_training_goes_through_the_train_split_and_evaluation_covers_the_eval_split_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    folder, rows = train(settings(tmp_path), on_warning=warnings.append)
    groups = Counter((r.group_id, r.split, r.task_index) for path in folder.rollouts() for r in read_records(path))
    assert set(groups.values()) == {2}  # one task a group
    in_order = [index for _, _, index in sorted(groups) if index is not None]
    assert {split for _, split, _ in groups} == {"train"}
    assert sorted(in_order[:7]) == list(range(7))  # 8 groups: an epoch, and the first of the next
    evaluated = Counter(
        one[1:] for one in told(tmp_path) if one[0] == "eval" and one[1] > 0
    )  # the first was tried before
    assert evaluated == {(index, member): 2 for index in (1, 2) for member in (0, 1)}  # before and after
    assert (rows[0]["eval/episodes"] + rows[0]["eval/failed"]) == 6


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_through_the_same_epochs(tmp_path: Path) -> None:
    def order(folder: RunFolder) -> list[tuple[str, int | None, int]]:
        return [(r.trajectory_id, r.task_index, r.seed) for path in folder.rollouts() for r in read_records(path)]

    (tmp_path / "whole").mkdir()
    whole, _ = train(settings(tmp_path / "whole"))
    part, _ = train(settings(tmp_path, steps=2))
    part, _ = train(settings(tmp_path), part)
    assert order(part) == order(whole)


def test_a_table_of_another_length_is_refused_on_resume(tmp_path: Path) -> None:
    folder, _ = train(settings(tmp_path, steps=1))
    with pytest.raises(ConfigError, match="began with 7 tasks in the train split, and the environment has 8 tasks now"):
        train(settings(tmp_path, steps=2, num_train=8), folder)
    with pytest.raises(ConfigError, match="with 3 tasks in the eval split, and the environment has tasks without end"):
        train(settings(tmp_path, steps=2, num_eval=None), folder)


def test_splits_without_tasks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for split in ("train", "eval"):
        with pytest.raises(ConfigError, match=rf"num_tasks\('{split}'\) returned 0"):
            train(settings(tmp_path, **{f"num_{split}": 0}))
    for number in (-1, True, 2.0, "many"):
        with pytest.raises(EnvironmentFailure, match=r"num_tasks\('train'\) returned .*; return the number of tasks"):
            train(settings(tmp_path, num_train=number))
    assert not (tmp_path / "run").exists()


def test_what_num_tasks_raises_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"num_tasks\(\) or close\(\) raised FileNotFoundError: rows.jsonl \(test_spl"):
        train(recipe(tmp_path, env={"id": f"{__name__}:Lost"}))


class Lost(Table):
    def num_tasks(self, split: str) -> int | None:
        raise FileNotFoundError("rows.jsonl")


def test_fewer_tasks_than_were_asked_for_are_told_once(tmp_path: Path) -> None:
    with build(settings(tmp_path)) as parts:
        (words,) = [words for words in parts.warnings if "evaluation.num_tasks" in words]
    assert words == (
        "evaluation.num_tasks: 8 were asked for, and the environment has 3 evaluation tasks, which are evaluated once each"
    )


def test_demonstrations_are_of_the_train_split(tmp_path: Path) -> None:
    with build(settings(tmp_path).model_copy(update={"warmup": recipe(tmp_path, warmup={"steps": 1}).warmup})):
        assert {split for split, _, _ in told(tmp_path)} == {"train"}


class Drawn(Table):
    """Draws its row by the seed, whatever the split."""

    def num_tasks(self, split: str) -> int | None:
        return None

    def start(self, options: dict[str, Any]) -> str:
        return super().start({**options, "split": "train", "task_index": int(self.np_random.integers(7))})


def test_evaluation_tasks_that_are_training_tasks_are_told_once_and_kept_in_the_folder(tmp_path: Path) -> None:
    told: list[str] = []
    folder, rows = train(recipe(tmp_path, env={"id": f"{__name__}:Drawn"}), on_warning=told.append)
    (words,) = [words for words in told if words.startswith("64 of 64 evaluation tasks also occur")]
    assert [(w.step, w.words) for w in folder.warnings() if w.name == "shared_tasks"] == [(0, words)]
    assert rows[0]["health/shared_tasks"] == 1.0
