"""What is done with the newest weights of a run, which may go on meanwhile."""

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agentrl
from agentrl import TrainedRun
from agentrl.cli import main
from agentrl.report.card import measure
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.run import checkpoint, export
from agentrl.types import Message, TrajectoryGroup
from tests.support.runs import recipe, train

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder, _ = train(recipe(tmp_path_factory.mktemp("trained")))
    return folder.path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def train_on(run: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run write another checkpoint as soon as a module has loaded its weights."""
    load = module.load_weights

    def loaded(*given: Any) -> Any:
        found = load(*given)
        shutil.copytree(run / "checkpoints" / "step-000002", run / "checkpoints" / "step-000003")
        return found

    monkeypatch.setattr(module, "load_weights", loaded)


def test_an_evaluation_has_the_step_of_the_weights_that_played(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on(run, checkpoint, monkeypatch)
    agentrl.evaluate(run)
    (file,) = (run / "evaluations").glob("*.jsonl")
    assert {record.step for record in read_records(file)} == {2}


def test_one_played_episode_is_no_evaluation_of_the_run(run: Path) -> None:
    agentrl.evaluate(run)
    agentrl.evaluate(run, evaluation={"num_tasks": 1})
    agentrl.play(model=run, max_turns=2)
    assert len(list((run / "evaluations").glob("*.jsonl"))) == 2
    (measured,) = measure(RunFolder.open(run), TrainedRun(run).recipe.model_dump(mode="json"), step=2)
    assert measured.num_tasks == 2
    assert "reward" in measured.intervals  # of its rollouts: metrics tell none


def test_the_seed_says_which_task_is_played_whatever_the_run_is_evaluated_with(run: Path) -> None:
    def shown(seed: int) -> Message:
        return agentrl.play({"options": {"num_boxes": 1000}}, run, seed=seed, max_turns=1).messages[0]

    before = [shown(1), shown(2)]
    assert before[0] != before[1]
    folder = RunFolder.open(run)
    config = folder.config()
    config["evaluation"] |= {"seed": 7, "samples": 4, "pass_at": [1, 4]}
    folder.write_config(config)
    assert [shown(1), shown(2)] == before


@pytest.mark.slow
def test_the_environment_that_is_asked_for_is_played_in_and_not_the_one_that_the_run_is_evaluated_in(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.open(run)
    config = folder.config()
    config["evaluation"] |= {"env": {"other": {"id": "calculator"}}}
    folder.write_config(config)

    def asked(*groups: TrajectoryGroup) -> set[str]:
        return {t.env_id for group in groups for t in group.trajectories}

    assert asked(*agentrl.evaluate(run).groups) == {"Calculator"}
    assert asked(*agentrl.evaluate(run, env="frozen_lake").groups) == {"FrozenLake"}
    assert asked(*agentrl.evaluate(run, overrides=["--env.id", "frozen_lake"]).groups) == {"FrozenLake"}
    both = agentrl.evaluate(run, env="frozen_lake", evaluation={"env": {"third": {"id": "key_door"}}})
    assert asked(*both.groups) == {"Calculator", "KeyDoor"}
    lake = agentrl.play("frozen_lake", run, max_turns=1).messages[0]["content"]
    assert "box" not in lake
    assert lake != agentrl.play(model=run, max_turns=1).messages[0]["content"]
    main(["eval", str(run), "--env.id=frozen_lake", "--json"])
    (evaluation,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert evaluation["env"] == "frozen_lake"


def test_a_run_is_played_where_its_tracker_is_not_installed(run: Path) -> None:
    folder = RunFolder.open(run)
    config = folder.config()
    config["report"] |= {"trackers": ["comet_ml"]}
    folder.write_config(config)
    assert agentrl.play(model=run, max_turns=1).messages


def test_an_export_has_the_step_of_its_weights(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on(run, export, monkeypatch)
    model = TrainedRun(run).export(tmp_path / "model")
    assert "| steps | 2 of 2 |" in (model / "README.md").read_text(encoding="utf-8")
