from pathlib import Path
from typing import Any

import pytest

from agentrl.compare.curves import RecordedRun, choose_metric, curve_of, identity, name_recipes, read_run
from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.terminal import Panel, note_panels
from tests.support.each import each

ROWS = [
    {"step": 0, "eval/episodes": 4, "eval/reward": 0.1},  # none came to report success
    {"step": 1, "loss": 0.5},
    {"step": 2, "eval/episodes": 4, "eval/reward": 0.5, "eval/success": 0.5},
]


def recorded(folder: Path, rows: list[dict[str, Any]] = ROWS, **sections: Any) -> RecordedRun:
    recipe = Recipe.model_validate({"train": {"steps": 2}, "run_dir": folder, **sections})
    run = RunFolder.create(folder, recipe.model_dump(mode="json"))
    for row in rows:
        run.add_metrics(row)
    return read_run(folder)


def test_an_evaluation_in_which_nothing_reported_success_had_none(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    assert choose_metric([run], None) == "eval/success"
    assert curve_of(run, metric="eval/success", recipe="a").values == {0: 0.0, 2: 0.5}
    assert run.is_finished


def test_nothing_was_passed_where_nothing_reported_success(tmp_path: Path) -> None:
    played = {"eval/episodes": 4, "eval/reward": 0.1}
    rows = [{"step": 0, **played}, {"step": 1, **played, "eval/success": 0.5, "eval/pass@2": 0.8}]
    run = recorded(
        tmp_path / "run", [*rows, {"step": 2, **played, "eval/success": 0.5}]
    )  # of each task, less than two left
    assert curve_of(run, metric="eval/pass@2", recipe="a").values == {0: 0.0, 1: 0.8}


def test_an_evaluation_whose_every_episode_failed_is_none(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", [{"step": 0, "eval/episodes": 0, "eval/failed": 4}, *ROWS[1:]])
    assert curve_of(run, metric="eval/success", recipe="a").values == {2: 0.5}


def test_evaluations_on_other_tasks_than_the_last_ones_are_left_out(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    note_panels(folder, {"eval/": Panel(tasks=("a",), temperature=1.0, samples=1)})
    assert curve_of(read_run(folder.path), metric="eval/success", recipe="a").values.keys() == {0, 2}
    note_panels(folder, {"eval/": Panel(tasks=("b",), since=2, temperature=1.0, samples=1)})
    curve = curve_of(read_run(folder.path), metric="eval/success", recipe="a")
    assert curve.values.keys() == {2}
    assert curve.panel is not None
    assert curve.panel.tasks == ("b",)


def test_the_metric_is_that_of_the_first_environment_unless_another_is_asked_for(tmp_path: Path) -> None:
    rows = [{"step": 2, "eval/hard/episodes": 4, "eval/hard/score": 0.3, "eval/hard/reward": 1.0}]
    run = recorded(tmp_path / "run", rows)
    assert choose_metric([run], None) == "eval/hard/score"
    assert choose_metric([run], "hard/reward") == choose_metric([run], "eval/hard/reward") == "eval/hard/reward"
    with pytest.raises(ConfigError, match=r"--metric: no run has 'eval/speed'; there are .*eval/hard/score"):
        choose_metric([run], "speed")
    with pytest.raises(ConfigError, match="no run has been evaluated"):
        choose_metric([recorded(tmp_path / "other", [{"step": 0}])], None)


def test_seed_folder_and_report_make_no_other_recipe() -> None:
    base = Recipe()
    same = Recipe.model_validate({"seed": 3, "run_dir": "x", "report": {"rollouts_every": 1}})
    assert identity(base) == identity(same)
    assert identity(base) != identity(Recipe.model_validate({"train": {"learning_rate": 1e-5}}))


def test_recipes_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    def names(*sections: dict[str, Any]) -> list[str]:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        return list(name_recipes([recorded(place / str(n), **given) for n, given in enumerate(sections)]).values())

    gigpo = {"credit": {"scheme": "gigpo", "step_weight": 0.5}}
    assert names({}, gigpo) == ["uniform", "gigpo"]
    assert names({}, {"train": {"steps": 2, "learning_rate": 1e-5}}) == ["0.0003", "1e-05"]
    assert names({}, {**gigpo, "loss": {"unit": "turn"}}) == [
        "scheme=uniform, unit=trajectory",
        "scheme=gigpo, unit=turn",
    ]
    assert names({}, {"seed": 5}) == ["recipe"]


@each("line", ['{"step": "x"}', "nonsense}"])
def test_a_damaged_run_is_named(tmp_path: Path, line: str) -> None:
    recorded(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 4"):
        read_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        read_run(tmp_path)
