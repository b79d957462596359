"""`train.bfloat16_copy`: every pass computes with the present weights, rounded; updates are those of one rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.learner import Learner
from tests.distributed.test_processes import credited, together
from tests.support.each import each
from tests.support.learners import make_learner, weights


@pytest.fixture(autouse=True)
def no_precision_is_set() -> Iterator[None]:
    """Forget the precision of other tests, which accelerate keeps for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def rounding_learner(**options: Any) -> Learner:
    return make_learner(precision="bfloat16", autocast=True, bfloat16_copy=True, **options)


class Seen:
    """Weights that the passes of a learner computed with, each compared with the rounded present ones."""

    def __init__(self, learner: Learner) -> None:
        self.different: list[Tensor] = []
        for name, module in learner.state.policy.model.model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._compare(module.weight, is_first=name.endswith("q_proj")))

    def _compare(self, master: Tensor, *, is_first: bool) -> Any:
        def compare(module: nn.Linear, _: Any) -> None:
            weight = module.weight.detach()
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, master.to(torch.bfloat16))
            if is_first and not (self.different and torch.equal(self.different[-1], weight)):
                self.different.append(weight.clone())

        return compare


def test_every_pass_has_the_present_weights_after_updates_a_line_search_a_sync_and_a_resumption(tmp_path: Path) -> None:
    loss = LossConfig(anchor="sampled", kept_versions=2, trust="fixed")
    learner = rounding_learner(loss=loss, num_minibatches=2, target_kl=1e-6, learning_rate=3e-2, offload=("weights",))
    seen = Seen(learner)
    groups, credits = credited([4, 3])
    learner.update(groups, credits, version=0)
    metrics = learner.update(groups, credits, version=1)  # whose tokens the kept version 0 sampled
    assert metrics["shortened_updates"] == 2
    assert len(seen.different) > 8  # updates, and each half of the way back
    with learner.state.sampling():
        pass
    present = learner.logprobs([1, 2], [3, 4])
    learner.state.save(tmp_path)
    resumed = rounding_learner(loss=loss)
    with torch.no_grad():
        for parameter in resumed.state.policy.parameters():
            parameter.zero_()
    seen = Seen(resumed)
    resumed.logprobs([1, 2], [3, 4])
    resumed.state.load(tmp_path)
    assert torch.equal(resumed.logprobs([1, 2], [3, 4]), present)
    assert len(seen.different) == 2
    assert all(weight.dtype == torch.float32 for weight in resumed.state.policy.parameters())


@each("checkpointing", [False, True])
def test_an_update_is_that_of_autocast_but_for_rounding(checkpointing: bool) -> None:
    def updated(**options: Any) -> tuple[Tensor, dict[str, float]]:
        learner = make_learner(
            precision="bfloat16", autocast=True, num_minibatches=1, max_tokens_per_micro_batch=60, **options
        )
        if checkpointing:
            learner.state.policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        before = weights(learner)
        metrics = learner.update(*credited([4, 3]), version=1)
        return weights(learner) - before, metrics

    (cast, cast_metrics), (copied, metrics) = updated(), updated(bfloat16_copy=True)
    assert (copied - cast).norm() < 0.1 * cast.norm()
    assert metrics["grad_norm"] == pytest.approx(cast_metrics["grad_norm"], rel=0.02)
    assert metrics["loss"] == pytest.approx(cast_metrics["loss"], abs=1e-3)


def test_a_reference_of_the_same_weights_has_the_same_log_probabilities() -> None:
    learner = rounding_learner(
        has_reference=True, loss=LossConfig(kl_coefficient=0.1, trust="fixed"), num_minibatches=1
    )
    assert learner.update(*credited([4, 3]), version=1)["kl/reference"] == 0


def test_the_rounding_error_is_measured_against_float32_weights() -> None:
    learner = rounding_learner()
    assert 1e-5 < learner.rounding_error(range(20), range(20, 60)) < 0.1


def gradients_of_ranks() -> Tensor:
    learner = rounding_learner(num_minibatches=1, max_tokens_per_micro_batch=60, max_grad_norm=1e9)
    found: list[Tensor] = []

    def keep(*_: Any) -> None:
        found.extend(w.grad.flatten().clone() for w in learner.state.policy.parameters() if w.grad is not None)

    learner.state.optimizer.optimizer.register_step_pre_hook(keep)
    learner.update(*credited([4, 3, 1, 2]), version=1)
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.process
def test_ranks_average_the_gradients_that_a_single_one_has(tmp_path: Path) -> None:
    expected = gradients_of_ranks()
    first, second = together(2, tmp_path, gradients_of_ranks)
    assert torch.equal(first, second)
    assert (first - expected).norm() < 0.02 * expected.norm()


def test_a_copy_without_bfloat16_is_refused() -> None:
    with pytest.raises(ValueError, match="set precision: bfloat16"):
        TrainConfig(bfloat16_copy=True)
