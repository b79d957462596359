"""What is done with the newest weights of a run, which may go on meanwhile."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agentrl
from agentrl import TrainedRun
from agentrl.api import evaluation
from agentrl.report.card import measure
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.run import export
from agentrl.types import Message
from tests.support.runs import recipe, train


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
    train_on(run, evaluation, monkeypatch)
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


def test_an_export_has_the_step_of_its_weights(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on(run, export, monkeypatch)
    model = TrainedRun(run).export(tmp_path / "model")
    assert "| steps | 2 of 2 |" in (model / "README.md").read_text(encoding="utf-8")
