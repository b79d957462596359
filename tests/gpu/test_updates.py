"""Updates on a GPU against those on the CPU: layouts, precisions, families, optimizers."""

from typing import Any, Literal, get_args
from unittest.mock import Mock

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from agentrl.errors import ConfigError
from agentrl.learn.config import LossConfig
from agentrl.learn.learner import Learner
from agentrl.policy.config import Layout, LoraSettings
from agentrl.policy.layout import choose_layout, packed, probe_layout, probe_noise
from tests.learn.test_learner import CREDITS, GROUPS
from tests.learn.test_optimizer import NAMES, fit, make, net, weights
from tests.support.architectures import ARCHITECTURES, tiny_model
from tests.support.gpu import NEEDS_GPU
from tests.support.learners import make_learner
from tests.support.models import MODELS, tiny

pytestmark = NEEDS_GPU
HEADS: dict[str, dict[str, int]] = {name: {"head_dim": 16} for name in MODELS} | {"gpt2": {"n_head": 2}}
"""FlexAttention takes no smaller ones."""


def learner_on(device: Literal["cpu", "cuda"], name: str, **options: Any) -> Learner:
    AcceleratorState._reset_state(reset_partial_state=True)  # which keeps device and precision
    # Moderate weights: rounding grows with them, layer by layer.
    model = tiny(name, vocab_size=261, init=0.05, **HEADS[name])
    options |= {"num_minibatches": 1, "max_grad_norm": 1e9, "autocast": options.get("precision") == "bfloat16"}
    return make_learner(model=model, device=device, **options)


def gradient(learner: Learner) -> Tensor:
    """The gradient of a step of one minibatch."""
    (minibatch,) = learner.draw(GROUPS, CREDITS, version=1)
    plan = learner.plan(minibatch)
    (anchors,) = learner._anchor_states([minibatch], [plan], version=1)
    learner.state.wrapped.train()
    learner.add_gradients(plan, anchors, version=1)
    gradients = [p.grad.flatten() for p in learner.state.policy.parameters() if p.grad is not None]
    return torch.cat(gradients).double().cpu()


def error(got: Tensor, expected: Tensor) -> float:
    assert float(expected.norm()) > 0
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_the_cpu(name: str, layout: Layout, checkpointing: bool) -> None:
    expected = gradient(learner_on("cpu", name, layout=layout))
    learner = learner_on("cuda", name, layout=layout, max_tokens_per_micro_batch=300)
    if checkpointing:
        learner.state.policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert error(gradient(learner), expected) < 1e-4


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_they_are_no_further_from_float32_than_those_of_the_cpu(name: str, layout: Layout) -> None:
    exact = gradient(learner_on("cpu", name, layout=layout))
    on_cpu = gradient(learner_on("cpu", name, layout=layout, precision="bfloat16"))
    on_gpu = gradient(learner_on("cuda", name, layout=layout, precision="bfloat16"))
    assert 0 < error(on_gpu, exact) < 1.5 * error(on_cpu, exact) < 0.3


@pytest.mark.parametrize(
    "loss",
    [LossConfig(), LossConfig(trust="calibrated"), LossConfig(anchor="sampled"), LossConfig(kl_coefficient=0.1)],
)
def test_steps_move_as_on_the_cpu(loss: LossConfig) -> None:
    """Two steps, in the second of which all tokens are of earlier versions."""
    found = []
    devices: tuple[Literal["cpu", "cuda"], ...] = get_args(Literal["cpu", "cuda"])
    for device in devices:
        learner = learner_on(device, "qwen3", loss=loss, has_reference=True, target_kl=0.01, learning_rate=1e-4)
        rows = [learner.update(GROUPS, CREDITS, version=version) for version in (1, 2)]
        found.append((rows, torch.cat([tensor.flatten().cpu() for _, tensor in learner.state.weights()])))
    (expected, on_cpu), (got, on_gpu) = found
    for row, expected_row in zip(got, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-3, abs=1e-5)
    moved = (on_gpu - on_cpu).abs()
    assert float((moved < 2e-5).double().mean()) > 0.99  # Adam turns a gradient of rounding into a whole step


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_adapters_are_trained_as_on_the_cpu(precision: str) -> None:
    expected = gradient(learner_on("cpu", "qwen3", lora=LoraSettings(rank=2)))
    got = gradient(learner_on("cuda", "qwen3", lora=LoraSettings(rank=2), precision=precision))
    assert error(got, expected) < (1e-4 if precision == "float32" else 5e-2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_of_each_architecture_the_layout_that_is_chosen_is_exact(name: str) -> None:
    model = tiny_model(name, vocab_size=97).cuda()
    layout, message = choose_layout(model, "auto", half=True)
    print(f"{name}: {layout}", message or "")
    gap, _ = probe_layout(model, layout)
    noise, _ = probe_noise(model, layout)
    assert gap < 1e-4
    assert noise < 2


@pytest.mark.parametrize("attention", ["flex_attention", "eager"])
def test_other_attention_of_transformers_packs_rows(attention: str) -> None:
    model = tiny("qwen3", head_dim=16)
    model.set_attn_implementation(attention)
    assert choose_layout(model.cuda(), "packed") == ("packed", None)


def test_packed_rows_in_bfloat16_are_one_call_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = Mock(side_effect=varlen_attn)
    monkeypatch.setattr(packed, "varlen_attn", varlen)
    model = tiny("qwen3", head_dim=64).cuda()
    assert choose_layout(model, "packed", half=True) == ("packed", None)  # exact in float32, as near in bfloat16
    assert varlen.call_count == 2  # layers, in bfloat16 alone


def test_heads_too_small_for_flex_attention_are_told() -> None:
    layout, message = choose_layout(tiny("qwen3").cuda(), "auto")
    assert layout == "packed"
    assert message is not None
    assert message.startswith("train.layout: rows are packed, since not tree: Qwen3ForCausalLM does not run so: ")
    with pytest.raises(ConfigError, match=r"^train\.layout: tree: "):
        choose_layout(tiny("qwen3").cuda(), "tree")


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_takes_the_steps_of_adamw(name: str) -> None:
    exact, found, first = net(), net().cuda(), weights(net())
    fit(exact, torch.optim.AdamW(exact.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01), steps=30)
    fit(found, make(name, found), steps=30)
    moved = weights(exact) - first
    assert float((weights(found).cpu() - weights(exact)).norm() / moved.norm()) < (0.08 if "8bit" in name else 1e-4)
