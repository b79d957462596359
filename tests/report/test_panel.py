from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.report.folder import RunFolder
from agentrl.report.panel import Panel, note_panels, read_panels


def test_what_an_evaluation_missed_is_filled_in_by_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_panels(folder) == {}
    note_panels(folder, {"eval/": ("a", None, "c")}, step=0)
    note_panels(folder, {"eval/": (None, "b", "c")}, step=5)
    assert read_panels(folder) == {"eval/": Panel(tasks=("a", "b", "c"), since=0)}


@pytest.mark.parametrize("tasks", [("a", "x"), ("a",), ("a", "b", "c")])
def test_other_tasks_begin_anew(tmp_path: Path, tasks: tuple[str, ...]) -> None:
    folder = RunFolder(tmp_path)
    note_panels(folder, {"eval/": ("a", "b"), "eval/hard/": ("h",)}, step=0)
    note_panels(folder, {"eval/": tasks}, step=5)
    assert read_panels(folder) == {"eval/": Panel(tasks=tasks, since=5), "eval/hard/": Panel(tasks=("h",))}


def test_panels_agree_as_far_as_both_are_known() -> None:
    panel = Panel(tasks=("a", None))
    assert panel.agrees(Panel(tasks=(None, "b"), since=3))
    assert not panel.agrees(Panel(tasks=("x", "b")))
    assert panel.name != Panel(tasks=("a", "b")).name


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "panel.json").write_text("[")
    with pytest.raises(ConfigError, match=r"panel\.json.*delete it"):
        read_panels(RunFolder(tmp_path))
