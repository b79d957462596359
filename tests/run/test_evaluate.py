"""Evaluation in a run, and as a library's user calls it: of parts that no run has begun with."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.report.terminal import read_panels
from agentrl.run.build import build
from agentrl.run.evaluate import evaluate
from agentrl_envs.key_door import KeyDoor
from tests.support.runs import recipe, train

pytestmark = pytest.mark.process


class Breakable(KeyDoor):
    is_broken = False

    def start(self, options: dict[str, Any]) -> Any:
        if self.is_broken:
            raise KeyError("answer")
        return super().start(options)


def test_a_fault_is_told_and_nothing_is_written_where_no_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(tmp_path, env={"id": f"{__name__}:Breakable"}, rollout={"max_retries": 0})
    told: list[str] = []
    with build(settings, on_warning=told.append) as parts:
        parts.weight_sync.verify_and_push(0)
        monkeypatch.setattr(Breakable, "is_broken", True)  # not when it was tried before
        assert evaluate(parts)["eval/"].metrics == {"episodes": 0.0, "failed": 2.0, "unscored": 0.0}
    (words,) = told
    assert words.startswith("environment Breakable: reset() raised KeyError: 'answer' (test_evaluate.py:")
    assert not (tmp_path / "run").exists()


def test_a_run_notes_how_it_was_evaluated(tmp_path: Path) -> None:
    settings = recipe(tmp_path, train={"steps": 1}, evaluation={"temperature": 0.0, "samples": 2})
    folder, _ = train(settings)
    panel = read_panels(folder)["eval/"]
    assert (len(panel.tasks), panel.since, panel.temperature, panel.samples) == (2, 0, 0.0, 2)
