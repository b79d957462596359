"""`train.offload`: what waits in the host's memory is away from the device, and changes no result."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import HostMemory
from agentrl.policy.config import LoraSettings
from agentrl.policy.lora import add_lora, round_frozen
from agentrl.policy.model import make_local_model
from agentrl.recipe.config import load_recipe
from tests.distributed.test_processes import credited, together
from tests.support.learners import TINY, TOKENIZER, make_learner
from tests.support.processes import Command
from tests.support.run_files import rollouts, rows
from tests.test_run_processes import RECIPE


def num_bytes(tensors: Any) -> int:
    return sum((t.to_local() if hasattr(t, "to_local") else t).untyped_storage().nbytes() for t in tensors)


def moments(learner: Learner) -> list[Tensor]:
    states = learner.state.optimizer.state.values()
    return [value for value in chain(*(state.values() for state in states)) if value.ndim]


def test_a_tensor_that_is_away_has_no_bytes_and_comes_back_the_same() -> None:
    weight = torch.arange(12.0).view(3, 4)
    tied, part, kept = weight.T, weight[1:], weight.clone()
    memory = HostMemory()
    for factor in (1, 2):
        memory.move_out([weight, tied])
        assert num_bytes([weight, tied]) == 0
        assert torch.equal(memory.view(part), factor * kept[1:])
        memory.move_in([tied])
        assert torch.equal(weight, factor * kept)
        assert tied.data_ptr() == weight.data_ptr()
        weight *= 2


def test_moments_are_away_but_for_the_weight_that_is_updated_and_weights_while_episodes_are_sampled() -> None:
    learner = make_learner(offload=("optimizer", "weights"), has_reference=True)
    most = []

    def look(*_: object) -> None:
        most.append(num_bytes(moments(learner)))

    learner.state.optimizer.optimizer.register_step_pre_hook(look)
    groups, credits = credited([4, 3])
    learner.update(groups, credits, version=0)
    learner.update(groups, credits, version=1)
    assert num_bytes(moments(learner)) == 0
    largest = max(p.numel() for p in learner.state.policy.parameters())
    assert max(most) == 2 * 4 * largest
    assert learner.state.reference is not None
    weights = [*learner.state.policy.parameters(), *learner.state.reference.parameters()]
    before = [weight.clone() for weight in weights]
    with learner.state.sampling():
        assert num_bytes(weights) == 0
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))
    with (
        pytest.raises(RuntimeError, match="it"),
        learner.state.sampling(),
    ):  # an engine that fails takes nothing with it
        raise RuntimeError("it")
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def test_an_optimizer_that_keeps_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="adamw_8bit keeps its own; set it to adamw"):
        load_recipe(None, ["--train.offload", "[optimizer]", "--train.optimizer", "adamw_8bit"])


@pytest.mark.slow
@pytest.mark.process
def test_a_run_with_offload_is_the_run_without_it_and_each_resumes_the_other(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    short = {"steps": 6, "checkpoint_every": 2, "num_minibatches": 2, "schedule": "constant"}
    recipe.write_text(yaml.safe_dump(RECIPE | {"train": RECIPE["train"] | short}))
    plain, away = tmp_path / "plain", tmp_path / "away"
    offload = ("--train.offload", "[optimizer, weights]")
    Command("train", recipe, "--run_dir", plain).finish()
    Command("train", recipe, "--run_dir", away, "--train.steps", 2, *offload).finish()
    Command("train", away, "--train.steps", 4, "--train.offload", "[]").finish()
    Command("train", away, "--train.steps", 6, *offload).finish()
    assert sum(row.get("grad_norm", 0) > 0 for row in rows(away)) > 3
    assert [without_evaluation(row) for row in rows(away)] == [without_evaluation(row) for row in rows(plain)]
    assert rollouts(away) == rollouts(plain)


def without_evaluation(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("eval/")}


def whole(weight: Any) -> Tensor:
    tensor: Tensor = weight.detach().full_tensor()
    return tensor


def adapted(folder: Path, is_rounded: bool, offload: tuple[str, ...], is_resumed: bool) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = make_local_model(TINY, TOKENIZER)
    add_lora(model, LoraSettings(rank=2))
    if is_rounded:
        round_frozen(model)
    learner = make_learner(model=model, sharding="full", precision="bfloat16", autocast=True, offload=offload)
    frozen = [p for p in learner.state.policy.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16 if is_rounded else torch.float32}
    if is_resumed:
        learner.state.load(folder)
    metrics = []
    for version in (2, 3) if is_resumed else (0, 1):
        with learner.state.sampling():
            is_away = num_bytes(learner.state.policy.parameters()) == 0
        assert is_away == ("weights" in offload)
        metrics.append(learner.update(*credited([4, 3]), version=version))
        assert (num_bytes(moments(learner)) == 0) == ("optimizer" in offload)
    if not is_resumed:
        folder.mkdir(exist_ok=True)
        learner.state.save(folder)
    trained = [whole(p) for p in learner.state.policy.parameters() if p.requires_grad]
    return metrics, trained


@pytest.mark.slow
@pytest.mark.process
def test_shards_of_rounded_frozen_weights_and_offload_change_nothing(tmp_path: Path) -> None:
    plain, resumed = [], []
    for number, (is_rounded, offload) in enumerate(((False, ()), (True, ()), (True, ("optimizer", "weights")))):
        folder = tmp_path / str(number)
        plain.append(together(2, tmp_path, adapted, folder, is_rounded, offload, False))
        resumed.append(together(2, tmp_path, adapted, folder, is_rounded, offload, True))
    for found in (plain, resumed):
        (expected, weights), _ = found[0]
        assert np.isfinite(expected[-1]["grad_norm"])
        assert expected[-1]["grad_norm"] > 0
        for metrics, others in chain(*found):
            assert metrics == expected
            assert all(torch.equal(*pair) for pair in zip(others, weights, strict=True))
