import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from agentrl.data.files import write_whole
from agentrl.errors import ConfigError
from agentrl.report.folder import EvaluationNote, RunFolder, Told
from agentrl.report.records import TrajectoryRecord, read_records
from agentrl.types import StopReason
from tests.support.each import each


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
        f"run_dir: {tmp_path} is not empty; choose another, or resume that run: agentrl train {tmp_path}"
    )
    assert names(tmp_path) == ["thesis.txt"]
    file = tmp_path / "thesis.txt"
    assert message(lambda: RunFolder.create(file, {})) == f"run_dir: {file} is a file; name a folder"


def test_only_the_folder_of_a_run_can_be_resumed(tmp_path: Path) -> None:
    assert message(lambda: RunFolder.open(tmp_path)) == f"{tmp_path} is not the folder of a run: it has no config.yaml"


def test_metrics_are_in_the_file_as_soon_as_they_are_added(folder: RunFolder) -> None:
    assert folder.metrics() == []
    folder.add_metrics({"step": 0, "reward": 0.1 + 0.2})
    folder.add_metrics({"step": 1, "reward": 1e-30})
    assert RunFolder.open(folder.path).metrics() == [{"step": 0, "reward": 0.1 + 0.2}, {"step": 1, "reward": 1e-30}]


@each(
    ("line", "words"),
    [
        (b"[1, 2]", "Input should be a valid dictionary"),
        (b'{"step": 1, "loss": "low"}', "loss: Input should be a valid number"),
        (b'{"loss": 1}', "it has no step"),
        (b"\xff\xfe{", "it is not UTF-8"),
        (b"[" * 3000 + b"]" * 3000, "it nests deeper than 200"),
        (b'{"step": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_a_line_of_metrics_that_is_no_row_is_named_and_nothing_is_dropped(
    folder: RunFolder, line: bytes, words: str
) -> None:
    path = folder.path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b"\n")
    for reading in (folder.metrics, lambda: folder.rewind(-1)):
        told = message(reading)
        assert told.startswith(f"{path}, line 2: {words}")
        assert told.endswith("; mend that line, or delete it")
    assert path.read_bytes().count(b"\n") == 2


def test_a_last_line_without_its_end_is_kept_where_it_is_whole(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    folder.rewind(1)
    assert [row["step"] for row in folder.metrics()] == [0, 1]


def test_a_stray_file_among_rollouts_and_checkpoints_is_left_alone(folder: RunFolder) -> None:
    folder.add_rollouts(1, [record(1)])
    stray = [folder.path / "rollouts" / name for name in ("step-last.jsonl", "step-000001.jsonl.bak", "step-1.jsonl")]
    for path in stray:
        path.write_text("notes")
    assert [path.name for path in folder.rollouts()] == ["step-000001.jsonl"]
    folder.rewind(-1)
    assert all(path.is_file() for path in stray)


def test_what_is_written_whole_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_whole(tmp_path / "config.yaml", "whole")
    assert calls == [".config.yaml.partial", "rename", tmp_path.name]


@each("cut", ['{"step": 2, "rew', '{"step": 2', "{", ""])
def test_a_last_line_cut_short_is_left_out_and_written_again(tmp_path: Path, cut: str) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
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


def test_going_back_drops_the_evaluations_of_later_steps(folder: RunFolder) -> None:
    paths = [folder.add_evaluation([record(s)], EvaluationNote(step=s, settings={"samples": s})) for s in (2, 4, 2)]
    folder.rewind(3)
    kept = EvaluationNote(step=2, settings={"samples": 2})
    assert folder.played_evaluations() == [(paths[0], kept), (paths[2], kept)]
    assert names(folder.evaluations) == [f"evaluation-00000{n}.{ext}" for n in (1, 3) for ext in ("json", "jsonl")]
    paths[0].with_suffix(".json").write_text("[")
    assert message(folder.check).endswith("; delete it, and no card has that evaluation")


def test_two_evaluations_at_once_have_files_of_their_own(folder: RunFolder) -> None:
    notes = [EvaluationNote(step=step, settings={}) for step in (1, 2)]

    def while_another_is_written() -> Iterator[TrajectoryRecord]:
        yield record(1)
        folder.add_evaluation([record(2)], notes[1])
        yield record(1)

    folder.add_evaluation(while_another_is_written(), notes[0])
    (first, note), (second, other) = folder.played_evaluations()
    assert [note, other] == notes
    assert [[r.step for r in read_records(path)] for path in (first, second)] == [[1, 1], [2]]


def test_an_evaluation_that_the_disk_does_not_take_leaves_nothing(folder: RunFolder) -> None:
    def failing() -> Iterator[TrajectoryRecord]:
        yield record(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    note = EvaluationNote(step=1, settings={})
    with pytest.raises(OSError, match="No space left"):
        folder.add_evaluation(failing(), note)
    assert names(folder.evaluations) == []
    (folder.evaluations / "evaluation-000001.json").touch()  # of one that was killed as it wrote
    assert folder.add_evaluation([record(1)], note).name == "evaluation-000002.jsonl"


def test_rollout_files_are_listed_by_step(folder: RunFolder) -> None:
    for step in (10, 9, 100):
        folder.add_rollouts(step, [record(step), record(step)])
    assert [path.name for path in folder.rollouts()] == [f"step-{step:06d}.jsonl" for step in (9, 10, 100)]
    assert [len(path.read_bytes().splitlines()) for path in folder.rollouts()] == [2, 2, 2]


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800")
    assert path.read_text() == "whole"


def test_of_rollouts_the_first_and_the_newest_are_kept(folder: RunFolder) -> None:
    for step in range(1, 9):
        folder.add_rollouts(step, [record(step)], keep=3)
        kept = [int(path.stem.removeprefix("step-")) for path in folder.rollouts()]
        assert kept == [s for s in range(1, step + 1) if s == 1 or s > step - 3]


def test_a_warning_that_a_kill_cut_short_is_left_out(folder: RunFolder) -> None:
    told = Told(step=1, name="zero_spread", words="nothing was learned")
    folder.add_warning(told)
    with (folder.path / "warnings.jsonl").open("a") as file:
        file.write('{"step": 2, "na')
    assert folder.warnings() == [told]
    folder.rewind(2)
    folder.add_warning(told)
    assert folder.warnings() == [told, told]


def test_a_folder_whose_name_is_no_text_in_this_locale_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = r"names of files are utf-8 in this locale, and this is none; set PYTHONUTF8=1, or choose another name$"
    with pytest.raises(ConfigError, match=rf"^run_dir: '.*l\\udce4ufe': {words}"):
        RunFolder.create(tmp_path / os.fsdecode(b"l\xe4ufe"), {})
    RunFolder.create(tmp_path / "läufe", {})

    def fail(path: Path) -> bytes:
        return str(path).encode("ascii")

    monkeypatch.setattr(os, "fsencode", fail)
    with pytest.raises(ConfigError, match=rf"^'.*l\\xe4ufe': {words}"):
        RunFolder.open(tmp_path / "läufe")


@each("name", ["metrics.jsonl", "warnings.jsonl"])
def test_a_file_that_links_to_itself_is_refused_and_not_taken_for_none(name: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    (folder.path / name).symlink_to(name)
    with pytest.raises(ConfigError, match=name):
        folder.check()
