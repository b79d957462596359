"""What is computed in which precision under autocast."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.policy.config import LoraSettings
from agentrl.policy.layout import lay_out
from agentrl.policy.lora import add_lora, round_frozen
from agentrl.policy.model import Policy
from tests.support.architectures import tiny_model
from tests.support.each import each
from tests.support.models import MODELS, branching_rows, tiny


class Products(TorchDispatchMode):
    """Counts matrix products by the dtypes of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function of torch."""
        if func.overloadpacket in (torch.ops.aten._grouped_mm, torch.ops.aten.mm, torch.ops.aten.bmm):
            for factor in args[:2]:
                self.found[func.overloadpacket.__name__, factor.dtype] += 1
        return func(*args, **(kwargs or {}))


@each("name", ["qwen3", "qwen3_moe", "gpt-oss", "GLM-4 MoE"])
def test_under_autocast_every_layer_multiplies_in_bfloat16(name: str) -> None:
    policy = Policy(tiny(name) if name in MODELS else tiny_model(name, vocab_size=97))
    inputs, _ = lay_out(branching_rows(), "padded")
    with torch.autocast("cpu", torch.bfloat16), Products() as layers:
        hidden = policy.model.base_model(input_ids=inputs.ids_BL).last_hidden_state
        hidden.float().sum().backward()
    assert {dtype for (_, dtype) in layers.found} == {torch.bfloat16}
    assert (layers.found["_grouped_mm", torch.bfloat16] > 0) == (name != "qwen3")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_gradients_under_autocast_are_those_of_float32_but_for_rounding(name: str) -> None:
    policy = Policy(tiny(name))
    inputs, _ = lay_out(branching_rows(), "padded")
    slots_T, targets_T = torch.arange(80), torch.arange(80)
    with torch.autocast("cpu", torch.bfloat16):
        policy(inputs, slots_T, targets_T, 1.0)[0].sum().backward()
    rounded = {name: weight.grad for name, weight in policy.named_parameters()}
    policy.zero_grad()
    policy(inputs, slots_T, targets_T, 1.0)[0].sum().backward()
    for name, weight in policy.named_parameters():
        got = rounded[name]
        assert got is not None
        assert weight.grad is not None
        assert got.dtype == torch.float32
        assert (got - weight.grad).norm() < 0.1 * weight.grad.norm(), name


class Casts(TorchDispatchMode):
    """Counts how often weights of layers are rounded."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.num = 0
        names = {name: w for name, w in model.base_model.named_parameters() if "embed" not in name}
        self._weights = {weight.untyped_storage()._cdata for weight in names.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function of torch."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and out.dtype == torch.bfloat16:
            self.num += args[0].untyped_storage()._cdata in self._weights
        return out


def passes(policy: Policy, *, num: int = 1, is_half: bool = True) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return log-probabilities of the last pass, the gradient of all, and how often they cast weights."""
    policy.zero_grad()
    inputs, _ = lay_out(branching_rows(), "padded")
    with policy.rounding() if is_half else nullcontext(), Casts(policy.model) as casts:
        for _ in range(num):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                logprobs_T, _ = policy(inputs, torch.arange(80), torch.arange(80), 1.0)
            logprobs_T.sum().backward()
    gradient = {name: w.grad.clone() for name, w in policy.named_parameters() if w.grad is not None}
    return logprobs_T.detach(), gradient, casts.num


@each("name", ["qwen3", "qwen3_moe", "gpt2", "Qwen3.5", "gpt-oss", "Gemma 4", "Gemma 4 with images"])
def test_a_copy_of_the_weights_computes_what_autocast_does_but_for_rounding(name: str) -> None:
    torch.manual_seed(0)
    policy = Policy((tiny(name) if name in MODELS else tiny_model(name, vocab_size=97)).train())
    exact_T, gradient, _ = passes(policy, is_half=False)
    cast_T, cast_gradient, num_cast = passes(policy)
    policy.has_copy = True
    copied_T, copied_gradient, num_copied = passes(policy)
    # Hidden states are rounded between layers too: up to 1.7 times the noise of autocast, which leaves them in float32.
    assert (copied_T - exact_T).abs().mean() < 2 * (cast_T - exact_T).abs().mean()
    assert num_copied < num_cast
    assert copied_gradient.keys() == cast_gradient.keys()
    assert {each.dtype for each in copied_gradient.values()} == {torch.float32}

    def distance(found: dict[str, Tensor]) -> float:
        return float(torch.cat([(found[name] - gradient[name]).flatten() for name in gradient]).norm())

    assert distance(copied_gradient) < 5 * distance(cast_gradient)  # a token may choose other experts


@each("checkpointing", [False, True])
def test_passes_that_share_a_copy_cast_no_weight_and_add_gradients_in_float32(checkpointing: bool) -> None:
    policy = Policy(tiny("qwen3").train())
    if checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    _, one, num_one = passes(policy)
    _, three, num_three = passes(policy, num=3)
    assert num_three == 3 * num_one > 0  # autocast's, of each weight
    policy.has_copy = True
    alone_T, one, num_one = passes(policy)
    shared_T, three, num_three = passes(policy, num=3)
    assert num_three == num_one == 0  # made before them
    assert torch.equal(shared_T, alone_T)
    for name, gradient in one.items():
        assert torch.equal(three[name], gradient + gradient + gradient), name


def test_adapters_with_a_copy_compute_the_same_to_the_last_bit() -> None:
    model = tiny("qwen3").train()
    add_lora(model, LoraSettings(rank=2))
    round_frozen(model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    policy = Policy(model)
    expected_T, expected, num_cast = passes(policy)
    policy.has_copy = True
    found_T, found, num_copied = passes(policy)
    assert num_copied < num_cast
    assert torch.equal(found_T, expected_T)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
