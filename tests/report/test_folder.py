from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agentrl.errors import ConfigError
from agentrl.report.folder import RunFolder, write_whole
from agentrl.report.records import TrajectoryRecord
from agentrl.types import StopReason


def message(function: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        function()
    return str(caught.value)


def record(step: int) -> TrajectoryRecord:
    return TrajectoryRecord(
        step=step,
        group_id="g",
        trajectory_id="g/0",
        env_id="desk",
        seed=1,
        stop_reason=StopReason.TERMINATED,
        truncated=False,
        reward=0.0,
        metrics={},
        error=None,
        turns=[],
    )


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "one", {"seed": 3})


def test_a_new_folder_holds_the_recipe_in_the_order_given(tmp_path: Path) -> None:
    recipe = {"seed": 3, "env": {"id": "desk"}, "credit": {"scheme": "uniform"}}
    folder = RunFolder.create(tmp_path / "a" / "b", recipe)
    assert names(tmp_path) == ["a/b/config.yaml"]
    assert folder.config_file.read_text() == "seed: 3\nenv:\n  id: desk\ncredit:\n  scheme: uniform\n"
    assert yaml.safe_load(RunFolder.open(tmp_path / "a" / "b").config_file.read_text()) == recipe


def test_an_empty_folder_may_be_there_already(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {})
    assert names(tmp_path) == ["config.yaml"]


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    assert message(lambda: RunFolder.create(tmp_path, {})) == (
        f"run_dir: {tmp_path} is not empty; choose another, or go on with that run: agentrl train {tmp_path}"
    )
    assert names(tmp_path) == ["thesis.txt"]
    file = tmp_path / "thesis.txt"
    assert message(lambda: RunFolder.create(file, {})) == f"run_dir: {file} is a file; name a folder"


def test_only_the_folder_of_a_run_can_be_gone_on_with(tmp_path: Path) -> None:
    assert message(lambda: RunFolder.open(tmp_path)) == f"{tmp_path} is not the folder of a run: it has no config.yaml"


def test_metrics_are_in_the_file_as_soon_as_they_are_added(folder: RunFolder) -> None:
    assert folder.metrics() == []
    folder.add_metrics({"step": 0, "reward": 0.1 + 0.2})
    folder.add_metrics({"step": 1, "reward": 1e-30})
    assert RunFolder.open(folder.path).metrics() == [{"step": 0, "reward": 0.1 + 0.2}, {"step": 1, "reward": 1e-30}]


@pytest.mark.parametrize("cut", ['{"step": 2, "rew', '{"step": 2', "{", ""])
def test_a_last_line_cut_short_is_left_out_and_written_anew(folder: RunFolder, cut: str) -> None:
    for step in range(2):
        folder.add_metrics({"step": step})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    assert folder.metrics() == [{"step": 0}, {"step": 1}]
    folder.rewind(1)
    folder.add_metrics({"step": 2})
    assert folder.metrics() == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_going_back_drops_what_was_written_after_the_step_and_nothing_else(folder: RunFolder) -> None:
    for step in range(5):
        folder.add_metrics({"step": step})
    for step in (1, 2, 3):
        folder.add_rollouts(step, [record(step)])
    for name in ("step-000002", ".step-000004.partial"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "weights").write_text("")
    folder.rewind(2)
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2]
    assert [path.name for path in folder.rollouts()] == ["step-000001.jsonl", "step-000002.jsonl"]
    assert names(folder.checkpoints) == ["step-000002/weights"]
    folder.rewind(-1)
    assert (folder.metrics(), folder.rollouts()) == ([], [])
    assert names(folder.path) == ["checkpoints/step-000002/weights", "config.yaml", "metrics.jsonl"]


def test_rollout_files_are_listed_by_step(folder: RunFolder) -> None:
    for step in (10, 9, 100):
        folder.add_rollouts(step, [record(step), record(step)])
    assert [path.name for path in folder.rollouts()] == [f"step-{step:06d}.jsonl" for step in (9, 10, 100)]
    assert [len(path.read_text().splitlines()) for path in folder.rollouts()] == [2, 2, 2]


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800")
    assert path.read_text() == "whole"
