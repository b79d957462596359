"""Runs on a GPU: the engine's log-probabilities are the trainer's, and a run that stopped goes on as if it had not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.recipe.config import Recipe
from agentrl.run.build import build
from agentrl.run.doctor import examine
from tests.support.architectures import ARCHITECTURES, write_model
from tests.support.architectures import recipe as architecture_recipe
from tests.support.gpu import NEEDS_GPU
from tests.support.run_files import rollouts, rows
from tests.support.runs import NOISE, recipe, train

pytestmark = NEEDS_GPU
MODEL = {"local": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96}}
CREDIT = NOISE["credit"]


def settings(run: Path, **sections: Any) -> Any:
    given: dict[str, Any] = {"device": "auto", "steps": 4, "checkpoint_every": 2, "schedule": "constant"}
    sections = {"credit": CREDIT, **sections, "train": given | sections.get("train", {})}
    return recipe(run, model=MODEL, **sections)


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_the_engine_samples_with_the_log_probabilities_of_the_trainer(mode: str, tmp_path: Path) -> None:
    _, found = train(settings(tmp_path, rollout={"mode": mode}))
    steps = [row for row in found if row["step"] > 0]
    assert len(steps) == 4
    assert steps[0]["first/engine_difference"] < 1e-5
    assert all(row["grad_norm"] > 0 for row in steps)


def test_in_bfloat16_they_differ_by_rounding(tmp_path: Path) -> None:
    _, found = train(settings(tmp_path, train={"precision": "bfloat16"}))
    assert 0 < found[-1]["first/engine_difference"] < 0.05


@pytest.mark.parametrize(
    ("credit", "critic"),
    [
        ({"scheme": "turn_gae"}, "head"),
        ({"scheme": "turn_gae"}, "separate"),
        ({"scheme": "distill", "teacher": "hindsight"}, "head"),
        ({"scheme": "distill", "teacher": "reference"}, "head"),
    ],
)
def test_what_schemes_ask_of_the_policy_is_measured(credit: dict[str, Any], critic: str, tmp_path: Path) -> None:
    _, found = train(settings(tmp_path, credit=credit, signals={"critic": {"model": critic}}))
    assert [row["step"] for row in found] == list(range(5))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_train_from_the_first_demonstration_to_the_third_step(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "model")
    made = architecture_recipe(tmp_path / "model", tmp_path / "run")
    made["train"]["device"] = "auto"
    words: list[str] = []
    _, found = train(Recipe.model_validate(made), on_warning=words.append)
    steps = [row for row in found if row["step"] > 0]
    print(f"{name}: {max(row['first/engine_difference'] for row in steps):.1e}", *words)
    assert len(steps) == 3
    for row in steps:
        assert row["first/engine_difference"] < 1e-5
        assert row["grad_norm"] > 0


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    train(settings(tmp_path / "whole"))
    folder, _ = train(settings(tmp_path / "parts", train={"steps": 2}))
    train(settings(tmp_path / "parts"), folder)
    whole, parts = (tmp_path / name / "run" for name in ("whole", "parts"))
    assert rows(parts)[3:] == rows(whole)[3:]  # the run that stopped was evaluated when it did
    assert rollouts(parts) == rollouts(whole)


def test_the_doctor_names_the_gpu(tmp_path: Path) -> None:
    with build(settings(tmp_path)) as parts:
        found = dict(examine(parts))
    assert found["device"].startswith(f"{torch.cuda.get_device_name()}, ")


def test_the_model_is_on_the_gpu(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(settings(tmp_path))
    assert torch.cuda.max_memory_allocated() > before + 500_000
