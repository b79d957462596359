"""A run's log.txt."""

import errno
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from agentrl.api.training import details, progress
from agentrl.errors import TrainingError
from agentrl.report import log as run_log
from agentrl.report.log import RunLog, logged
from agentrl.report.terminal import Console, heard_by, note
from tests.support.each import each

TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").touch()
    return tmp_path


def lines(run: Path) -> list[str]:
    return [TIME.sub("", line) for line in (run / "log.txt").read_text(encoding="utf-8").splitlines()]


def test_what_is_printed_is_kept_without_colours_and_commands_of_terminals(run: Path) -> None:
    console, table = Console(file=io.StringIO(), force_terminal=True), Table("name", show_header=False, box=None)
    table.add_row("seed 1")
    with logged(run):
        console.print("warning: \x1b[2Jlook [b]here[/b]", style="yellow")
        console.print(Text("two\nlines", "red"), table)
        note("noted")
    assert [line.rstrip() for line in lines(run)] == [
        "warning: [2Jlook [b]here[/b]",
        "two",
        "    lines",
        "     seed 1",  # a column of the table has a space around it
        "noted",
    ]
    assert all(TIME.match(line) for line in (run / "log.txt").read_text().splitlines() if not line.startswith(" "))
    console.print("after")
    assert "after" not in lines(run)


def test_nothing_is_written_before_the_run_has_begun_and_nothing_is_lost(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    log.write("plan")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    log.write("built")
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "config.yaml").touch()
    log.write("step 1")
    assert lines(tmp_path / "run") == ["plan", "built", "step 1"]


@each(
    ("error", "words"),
    [
        (TrainingError("step 3 broke"), "ended: step 3 broke"),
        (KeyboardInterrupt(), "ended: interrupted"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_what_ends_a_run_is_kept(error: BaseException, words: str, run: Path) -> None:
    with pytest.raises(type(error)), logged(run):
        raise error
    assert lines(run)[-1].strip() == words


def test_it_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MAX_BYTES", 100)
    log = RunLog(run)
    for number in range(20):
        log.write(f"line {number}")
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "log.1.txt", "log.txt"]
    assert lines(run)[-1] == "line 19"
    assert all((run / name).stat().st_size < 200 for name in ("log.1.txt", "log.txt"))


def test_a_full_disk_ends_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with logged(run):
        Console(file=io.StringIO()).print("before")
        monkeypatch.setattr(Path, "open", full)
        Console(file=io.StringIO()).print("lost")
        monkeypatch.undo()
        Console(file=io.StringIO()).print("after")
    assert lines(run) == ["before", "after"]


def test_every_step_is_heard_of_and_verbose_prints_what_it_shows() -> None:
    heard: list[str] = []
    console = Console(file=io.StringIO(), record=True, width=200)
    metrics = {"step": 1.0, "reward/mean": 0.5, "reward/call": 0.2, "stop/terminated": 1.0, "stop/max_turns": 0.0}
    with heard_by(heard.append), progress(console, verbose=True) as on_progress:
        for step in (1, 2, 3):
            on_progress("training", step, 100, metrics)
    assert [line.partition("  ETA ")[0] for line in heard if line.startswith("training")] == [
        f"training {i}/100  reward 0.500" for i in (1, 2, 3)
    ]
    printed = console.export_text()
    assert "training 1/100" not in printed
    assert printed.count("  reward: mean 0.5, call 0.2\n  ended by: terminated 1\n") == 3


def test_a_narrow_terminal_shows_the_step_and_the_time_that_is_left() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    metrics = {
        "reward/mean": 0.5,
        "episode/score": 0.5,
        "clip/tokens": 0.1,
        "time/step_s": 12.5,
        "time/tokens_per_s": 12345.6,
    }
    with progress(console) as on_progress:
        on_progress("training", 3, 240, metrics)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert "3/240" in plain
    for words in ("reward 0.500", "score 0.500", "clipped 0.100", "12.50 s/step", "12,346", "-:--:--"):
        assert words in plain


def test_details_group_what_is_not_zero() -> None:
    row = {"loss": 0.5, "ratio/mean": 1.0, "eval/reward": 0.25, "process/threads": 3.0, "clip/tokens": 0.0}
    assert list(details(row)) == ["update: loss 0.5, ratio/mean 1", "evaluation: reward 0.25"]
