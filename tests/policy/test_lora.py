"""Adapters against the model without them, against W + alpha / rank * B A by hand, and against peft itself."""

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.policy.config import Layout, LoraSettings
from agentrl.policy.layout import attending, hidden_states, lay_out
from agentrl.policy.lora import (
    adapted_layers,
    adapter_state,
    add_lora,
    base_weights,
    load_adapter,
    lost_change,
    merged_weights,
    round_frozen,
    save_adapter,
    weight_changes,
)
from agentrl.policy.model import Policy
from tests.support.each import each
from tests.support.models import SIZES

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {**SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "biases": ("Qwen2", {**SIZES, "tie_word_embeddings": False}),
    "transposed": ("GPT2", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "experts": ("Qwen3Moe", {**SIZES, "head_dim": 8, **EXPERTS}),
    "experts and a dense layer": ("Qwen3Moe", {**SIZES, "head_dim": 8, **EXPERTS, "mlp_only_layers": [1]}),
    "shared expert": ("Qwen2Moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 16}),
}
DENSE = ["tied", "biases", "transposed"]
ROW = np.arange(3, 40)


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    family, sizes = MODELS[name]
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "GPT2" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **off, initializer_range=0.2)
    return transformers.AutoModelForCausalLM.from_config(config)


def trained(name: str, settings: LoraSettings | None = None, *, dtype: torch.dtype = torch.float32) -> Any:
    """A model with adapters that are no longer what they began as."""
    model = tiny(name).to(dtype)
    add_lora(model, settings or LoraSettings(rank=3, alpha=5))
    for tensor in adapter_state(model).values():
        torch.nn.init.normal_(tensor, std=0.1)
    return model


def hidden(model: Any, layout: Layout = "padded", rows: tuple[Any, ...] = (ROW,)) -> Tensor:
    """Hidden states of all tokens of all rows."""
    inputs, index = lay_out(rows, layout)
    slots = [index(np.full(len(row), number), np.arange(len(row))) for number, row in enumerate(rows)]
    return hidden_states(model, inputs)[np.concatenate(slots)]


def copies(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@each("name", [*DENSE, "experts"])
def test_adapters_change_nothing_at_first(name: str) -> None:
    model = tiny(name)
    before, weights = hidden(model), copies(model)
    add_lora(model, LoraSettings())
    assert torch.equal(hidden(model), before)
    assert same(dict(merged_weights(model)), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exactly_the_adapters_of_the_linear_layers_are_trained_in_float32(dtype: torch.dtype) -> None:
    model = tiny("tied").to(dtype)
    add_lora(model, LoraSettings(rank=3))
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layers += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    expected = {
        f"model.layers.{n}.{layer}.lora_{matrix}.default.weight" for n in (0, 1) for layer in layers for matrix in "AB"
    }
    parameters = dict(model.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == expected
    assert {parameters[name].dtype for name in expected} == {torch.float32}
    assert {parameters[name].dtype for name in parameters.keys() - expected} == {dtype}
    assert parameters["model.layers.0.mlp.up_proj.lora_A.default.weight"].shape == (3, 32)


def test_the_model_stays_of_its_class_and_the_head_what_it_was() -> None:
    for name in DENSE:
        model = tiny(name)
        head, body, kind = model.get_output_embeddings(), model.base_model, type(model)
        add_lora(model, LoraSettings())
        assert (model.get_output_embeddings(), model.base_model, type(model)) == (head, body, kind)
        assert type(head) is torch.nn.Linear


def test_only_the_layers_that_are_named_are_adapted() -> None:
    model = trained("tied", LoraSettings(target_modules=("q_proj", "layers.1.mlp.up_proj")))
    assert {name.rpartition(".lora_")[0].removeprefix("base_model.model.model.") for name in adapter_state(model)} == {
        "layers.0.self_attn.q_proj",
        "layers.1.self_attn.q_proj",
        "layers.1.mlp.up_proj",
    }


@each(
    ("target", "words"),
    [
        (
            "q_prj",
            "no linear layer 'q_prj' that can be adapted (its head and its embeddings cannot). Did you mean 'q_proj'?",
        ),
        ("proj", "no linear layer 'proj' that can be adapted"),
        ("lm_head", "no linear layer 'lm_head' that can be adapted (its head and its embeddings cannot)."),
        ("embed_tokens", "no linear layer 'embed_tokens' that can be adapted (its head and its embeddings cannot)."),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_the_model_is_touched(target: str, words: str) -> None:
    model = tiny("biases")
    before = copies(model)
    with pytest.raises(ConfigError) as caught:
        add_lora(model, LoraSettings(target_modules=("k_proj", target)))
    assert str(caught.value).startswith(f"model.lora.target_modules: Qwen2ForCausalLM has {words}")
    assert same(copies(model), before)


@each("name", DENSE)
@each("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_the_models_own_plus_the_scaled_product(name: str, dtype: torch.dtype) -> None:
    plain, model = tiny(name).to(dtype).state_dict(), trained(name, dtype=dtype)
    adapters = adapter_state(model)
    merged = dict(merged_weights(model))
    assert list(merged) == list(plain)
    assert {tensor.dtype for tensor in merged.values()} == {dtype}
    num_adapted = 0
    for key, weight in plain.items():
        layer = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" not in adapters:
            assert torch.equal(merged[key], weight)
            continue
        num_adapted += 1
        product = adapters[f"{layer}.lora_B.weight"].double() @ adapters[f"{layer}.lora_A.weight"].double() * 5 / 3
        expected = weight.double() + (
            product.T if name == "transposed" else product
        )  # GPT-2 keeps weights as (in, out)
        if dtype == torch.float32:
            assert torch.allclose(merged[key].double(), expected, rtol=1e-5, atol=1e-7)
        else:  # rounded once: at most one place of bfloat16's eight bits apart where float32 and float64 round otherwise
            assert (merged[key] == expected.to(dtype)).float().mean() > 0.999
            assert torch.allclose(merged[key].double(), expected, rtol=2**-8)
    assert num_adapted == len(adapters) / 2 > 0


@each("name", [*DENSE, "experts"])
def test_weights_without_adapters_and_what_these_add_are_the_merged_weights(name: str) -> None:
    model = trained(name)
    weights, changes = dict(base_weights(model)), dict(weight_changes(model))
    assert same(weights, tiny(name).state_dict())
    assert len(changes) == len(adapter_state(model)) / 2 > 0
    for key, (left, right) in changes.items():
        weights[key] = weights[key] + left @ right
    assert same(weights, dict(merged_weights(model)))


@each("name", [*DENSE, "experts", "shared expert"])
def test_a_plain_model_with_the_merged_weights_computes_the_same(name: str) -> None:
    model, plain = trained(name), tiny(name)
    far = hidden(plain)
    plain.load_state_dict(dict(merged_weights(model)))
    assert torch.allclose(hidden(plain), hidden(model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(hidden(plain), far, rtol=1e-1, atol=1e-1)


@pytest.mark.parametrize("name", ["tied", "transposed"])
def test_a_young_adapter_is_not_rounded_away_in_half_precision(name: str) -> None:
    model = trained(name, LoraSettings(rank=2, alpha=4))
    exact = {layer: copy.deepcopy(module) for layer, module in adapted_layers(model).items()}
    round_frozen(model)
    for layer, module in adapted_layers(model).items():
        for matrix in (module.lora_B, exact[layer].lora_B):  # A as it was drawn, B of a first step
            matrix["default"].weight.data.normal_(std=2e-4, generator=torch.Generator().manual_seed(1))
        before, inputs_RI = module.base_layer, torch.randn(4000, module.in_features).bfloat16()
        change_RO = exact[layer](inputs_RI.float()) - exact[layer].base_layer(inputs_RI.float())
        weights = torch.randn(4000, module.out_features)
        with torch.autocast("cpu", torch.bfloat16):
            found_RO, before_RO = module(inputs_RI), before(inputs_RI)
        arrived = ((found_RO.float() - before_RO.float()) * change_RO).sum() / (change_RO**2).sum()
        assert float(arrived.detach()) == pytest.approx(1, abs=0.1)
        for half, single in ((found_RO.float(), module), (exact[layer](inputs_RI.float()), exact[layer])):
            (half * weights).sum().backward()
            assert single.lora_B["default"].weight.grad is not None
        for matrix in ("lora_A", "lora_B"):
            got, expected = (getattr(one, matrix)["default"].weight.grad for one in (module, exact[layer]))
            assert (got - expected).norm() < 0.02 * expected.norm()


def test_merged_weights_are_not_rounded_if_the_engine_may_have_room() -> None:
    model = trained("tied", dtype=torch.bfloat16)
    weights, changes = dict(base_weights(model)), dict(weight_changes(model))
    for name, weight in merged_weights(model, is_rounded=False):
        left, right = changes.get(name, (torch.zeros(1, 1), torch.zeros(1, 1)))
        assert torch.equal(weight, weights[name] + left @ right if name in changes else weights[name])


def test_the_share_of_a_change_that_rounding_removes() -> None:
    model = tiny("tied").bfloat16()
    add_lora(model, LoraSettings(rank=1, alpha=1, target_modules=("layers.0.self_attn.q_proj",)))
    (layer,) = (module for name, module in model.named_modules() if name.endswith("layers.0.self_attn.q_proj"))
    assert lost_change(model, torch.bfloat16) == 0  # B is 0 at first
    # Numbers of bfloat16 from 1 to 2 lie 2**-7 apart: of a change of 2**-9 nothing is left, one of 2**-7 arrives whole.
    layer.base_layer.weight.data.fill_(1.0)
    layer.lora_A["default"].weight.data.fill_(1.0)
    layer.lora_B["default"].weight.data.fill_(2.0**-9)
    assert lost_change(model, torch.bfloat16) == 1
    assert lost_change(model, torch.float32) == 0
    layer.lora_B["default"].weight.data.fill_(2.0**-7)
    assert lost_change(model, torch.bfloat16) == 0
    # 2**-7 in half of the rows, 2**-9 in the others: 1 - 2**-14 / (2**-14 + 2**-18) = 1/17 is lost.
    layer.lora_B["default"].weight.data[::2] = 2.0**-9
    assert lost_change(model, torch.bfloat16) == pytest.approx(1 / 17, rel=1e-6)


def test_merged_weights_of_a_model_without_adapters_are_its_state_dict() -> None:
    model = tiny("tied")
    assert same(dict(merged_weights(model)), model.state_dict())


def test_merging_leaves_the_model_as_it_is() -> None:
    model = trained("tied")
    before, computed = copies(model), hidden(model)
    next(iterator := merged_weights(model))
    assert torch.is_grad_enabled()
    list(iterator)
    assert same(copies(model), before)
    assert torch.equal(hidden(model), computed)


def test_weights_are_merged_one_at_a_time() -> None:
    model = trained("tied")
    early = dict(merged_weights(model))
    iterator = merged_weights(model)
    key = "model.layers.0.self_attn.q_proj.weight"
    while next(iterator)[0] != key:
        pass
    for tensor in adapter_state(model).values():
        tensor.zero_()
    late = dict(iterator)  # merged after the change
    assert key not in late
    assert not torch.equal(late["model.layers.1.mlp.down_proj.weight"], early["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_tree_of_rows_gives_adapters_the_gradients_of_separate_rows(checkpointing: bool) -> None:
    branch = ROW.copy()
    branch[20] += 1
    gradients = []
    for layout in ("padded", "tree"):
        model = trained("tied").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with attending(model, layout):
            out = hidden(model, layout, (ROW, branch))
            (out * torch.linspace(-1, 1, len(out))[:, None]).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    padded, tree = gradients
    assert len(padded) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
    assert padded.keys() == tree.keys()
    for name, gradient in padded.items():
        assert torch.allclose(tree[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())), name


def test_an_update_moves_the_log_probabilities_and_no_frozen_weight() -> None:
    model = tiny("tied")
    add_lora(model, LoraSettings())
    policy, before = Policy(model), copies(model)
    inputs, _ = lay_out([ROW], "padded")
    slot_T, target_T = torch.arange(len(ROW) - 1), torch.from_numpy(ROW[1:])
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(2):
        logprobs_T, _ = policy(inputs, slot_T, target_T, 1.0)
        found.append(logprobs_T.mean().item())
        (-logprobs_T.mean()).backward()
        optimizer.step()
    assert found[1] > found[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if ".lora_" not in name)


@each("name", [*DENSE, "experts", "shared expert"])
def test_peft_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    model, ids_1L = trained(name).eval(), torch.from_numpy(ROW)[None]
    save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny(name), tmp_path).eval()
    assert torch.equal(loaded(ids_1L).logits, model(ids_1L).logits)


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    model = trained("tied")
    save_adapter(model, tmp_path)
    other = tiny("tied")
    add_lora(other, LoraSettings(rank=3, alpha=5))
    load_adapter(other, tmp_path)
    assert same(copies(other), copies(model))


@each(
    ("settings", "words"),
    [
        (LoraSettings(rank=3, alpha=6), "lora_alpha is 5, expected 6"),
        (LoraSettings(rank=4, alpha=5), "lora_A.weight is (3, 48), expected (4, 48)"),
        (LoraSettings(rank=3, alpha=5, target_modules=("q_proj",)), "lora_A.weight is (3, 48), expected None"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(settings: LoraSettings, words: str, tmp_path: Path) -> None:
    save_adapter(trained("tied"), tmp_path)
    model = trained("tied", settings)
    before = copies(model)
    with pytest.raises(ConfigError, match=r"does not fit model\.lora") as caught:
        load_adapter(model, tmp_path)
    assert words in str(caught.value)
    assert same(copies(model), before)


@pytest.mark.parametrize("name", ["tied", "transposed"])
def test_an_adapter_of_a_model_with_other_weights_is_refused(name: str, tmp_path: Path) -> None:
    model = trained(name)
    save_adapter(model, tmp_path)
    *_, last = (parameter for key, parameter in model.named_parameters() if "base_layer.weight" in key)
    last.data[:1] *= 1.01
    before = copies(model)
    with pytest.raises(ConfigError, match="was trained with other weights than those of this model"):
        load_adapter(model, tmp_path)
    assert same(copies(model), before)


def test_an_adapter_fits_the_same_weights_in_another_dtype(tmp_path: Path) -> None:
    save_adapter(trained("tied"), tmp_path)
    load_adapter(trained("tied", dtype=torch.bfloat16), tmp_path)


def test_an_adapter_that_does_not_say_what_it_was_trained_with_is_loaded(tmp_path: Path) -> None:
    model = trained("tied")
    save_adapter(model, tmp_path)
    save_file(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.safetensors")
    torch.manual_seed(1)
    other = transformers.AutoModelForCausalLM.from_config(model.config)
    add_lora(other, LoraSettings(rank=3, alpha=5))
    load_adapter(other, tmp_path)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no adapter in"):
        load_adapter(trained("tied"), tmp_path)


def test_experts_and_routers_stay_as_they_are() -> None:
    model = trained("experts")
    assert {name.split(".")[-3] for name in adapter_state(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_routers_that_are_linear_layers_stay_as_they_are() -> None:
    sizes: dict[str, Any] = {"intermediate_size_mlp": 32, "num_local_experts": 2, "head_dim": 8}
    config = transformers.Llama4TextConfig(**SIZES | sizes)
    model = transformers.Llama4ForCausalLM(config)
    add_lora(model, LoraSettings(rank=2))
    assert not any("router" in name for name in adapter_state(model))
    assert model(torch.arange(3, 13)[None]).logits.isfinite().all()


def test_layers_that_peft_takes_for_experts_are_refused() -> None:
    name = "experts and a dense layer"
    with pytest.raises(ConfigError, match=r"set it to those of its attention: \[q_proj, k_proj, v_proj, o_proj\]"):
        add_lora(tiny(name), LoraSettings())
    model = trained(name, LoraSettings(rank=3, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")))
    assert list(dict(merged_weights(model))) == list(tiny(name).state_dict())


def test_a_copy_can_share_the_frozen_weights() -> None:
    model = trained("tied")
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})
    assert same(copies(twin), copies(model))
    for first, second in zip(model.parameters(), twin.parameters(), strict=True):
        assert (first is second) == (not first.requires_grad)


def test_dropout_is_no_field() -> None:
    with pytest.raises(ValidationError, match="dropout"):
        LoraSettings.model_validate({"rank": 8, "dropout": 0.1})


def test_without_peft_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[lora\]'"):
        add_lora(tiny("tied"), LoraSettings())
    model = tiny("tied")
    assert same(dict(merged_weights(model)), model.state_dict())
