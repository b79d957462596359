"""A run whose contexts show less and less of what was said."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Renderer, RendererConfig
from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord, read_records
from tests.support.renderers import OftenStops
from tests.support.run_files import repeatable
from tests.support.runs import Noise, recipe, train
from tests.support.talk import Talk

pytestmark = pytest.mark.process


class Reads(Talk):
    """Answers each action with the result of a tool."""

    def step(self, action: Any) -> Any:
        self.turn += 1
        return ({"role": "tool", "content": f"page {self.turn}"},), 1.0, self.turn >= 4, False, {}


class OftenStopsConfig(RendererConfig):
    """Lets random weights end their turns."""

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        return OftenStops(tokenizer)


def settings(folder: Path, *, steps: int) -> Any:
    return recipe(
        folder,
        env={"id": f"{__name__}:Reads"},
        chat={"renderer": f"{__name__}:OftenStopsConfig"},
        rollout={"history": {"tool_results": 1}},
        train={"steps": steps},
        credit={"scheme": f"{Noise.__module__}:Noise"},
    )


def records(folder: RunFolder) -> list[TrajectoryRecord]:
    return [record for path in folder.rollouts() for record in read_records(path)]


def timeless(folder: RunFolder) -> list[dict[str, Any]]:
    return [r.model_copy(update={"metrics": {}}).model_dump() for r in records(folder)]


@pytest.mark.slow
def test_old_results_of_tools_begin_segments_and_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole, rows = train(settings(tmp_path / "whole", steps=3))
    kinds = {tuple(turn.extends for turn in record.turns) for record in records(whole)}
    assert kinds >= {(True, True, False, False)}  # the first result is left out once there is a second
    part, _ = train(settings(tmp_path, steps=1))
    part, after = train(settings(tmp_path, steps=3), part)
    assert timeless(part) == timeless(whole)
    assert repeatable(after[-1]) == repeatable(rows[-1])
