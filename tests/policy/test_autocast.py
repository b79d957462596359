"""What is computed in which precision under autocast."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.policy.layout import lay_out
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
