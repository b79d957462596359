from functools import partial
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.report.folder import RunFolder
from agentrl.report.terminal import Panel, note_panels, read_panels
from tests.support.each import each

panel = partial(Panel, temperature=1.0, samples=1)


def test_what_an_evaluation_missed_is_filled_in_by_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_panels(folder) == {}
    note_panels(folder, {"eval/": panel(tasks=("a", None, "c"))})
    note_panels(folder, {"eval/": panel(tasks=(None, "b", "c"), since=5)})
    assert read_panels(folder) == {"eval/": panel(tasks=("a", "b", "c"))}


@each("tasks", [("a", "x"), ("a",), ("a", "b", "c")])
def test_other_tasks_begin_anew(tmp_path: Path, tasks: tuple[str, ...]) -> None:
    folder = RunFolder(tmp_path)
    hard = panel(tasks=("h",))
    note_panels(folder, {"eval/": panel(tasks=("a", "b")), "eval/hard/": hard})
    note_panels(folder, {"eval/": panel(tasks=tasks, since=5)})
    assert read_panels(folder) == {"eval/": panel(tasks=tasks, since=5), "eval/hard/": hard}


@each("other", [{"temperature": 0.0}, {"samples": 4}])
def test_tasks_that_are_played_in_another_way_begin_again(tmp_path: Path, other: dict[str, float]) -> None:
    folder = RunFolder(tmp_path)
    before = panel(tasks=("a", "b"))
    changed = before.model_copy(update={"since": 5, **other})
    assert not before.agrees(changed)
    note_panels(folder, {"eval/": before})
    note_panels(folder, {"eval/": changed})
    assert read_panels(folder) == {"eval/": changed}


def test_panels_agree_as_far_as_both_are_known() -> None:
    known = panel(tasks=("a", None))
    assert known.agrees(panel(tasks=(None, "b"), since=3))
    assert not known.agrees(panel(tasks=("x", "b")))
    assert known.name != panel(tasks=("a", "b")).name


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "panel.json").write_text("[")
    with pytest.raises(ConfigError, match=r"panel\.json.*delete it"):
        read_panels(RunFolder(tmp_path))
