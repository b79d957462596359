import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, save_file
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PhimoeConfig,
)

from agentrl.chat import train_tokenizer
from agentrl.errors import ConfigError
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.layout import choose_layout, hidden_states, lay_out
from agentrl.policy.logprobs import fused_logprobs
from agentrl.policy.model import Policy, check_attention, check_dropout, load_pretrained, make_local_model
from agentrl.recipe.config import load_recipe
from agentrl.run.memory import count_kept
from tests.support.each import each


@each(
    ("sizes", "words"),
    [
        (
            "{hidden_size: 130}",
            "num_heads: 4 does not divide hidden_size: 130; set hidden_size to a multiple of 8",
        ),
        (
            "{hidden_size: 12}",
            "hidden_size: 12 over num_heads: 4 gives heads of odd size 3, which rotary positions cannot turn; "
            "set hidden_size to a multiple of 8",
        ),
        (
            "{num_kv_heads: 3}",
            "num_kv_heads: 3 does not divide num_heads: 4; set num_kv_heads to 1, num_heads, or another divisor of it",
        ),
        (
            "{num_kv_heads: 8}",
            "num_kv_heads: 8 does not divide num_heads: 4; set num_kv_heads to 1, num_heads, or another divisor of it",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_when_the_recipe_is_read(sizes: str, words: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{local: {sizes}}}")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe)
    assert str(caught.value) == f"model.local.{words}"


@pytest.mark.parametrize("name", ["attention_dropout", "router_jitter_noise"])
def test_a_model_whose_passes_have_chance_in_them_is_refused(name: str) -> None:
    check_dropout(PhimoeConfig(router_jitter_noise=0.0))
    with pytest.raises(ConfigError, match=rf"chance within a pass makes importance ratios random; set {name} to 0"):
        check_dropout(PhimoeConfig.from_dict({"router_jitter_noise": 0.0, name: 0.01}))


def test_chance_in_heads_that_are_not_there_is_none() -> None:
    check_dropout(GPTNeoXConfig())
    check_dropout(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def test_adapters_need_a_model_to_adapt(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {lora: {rank: 2}}")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe)
    words = "a model with random weights has nothing to adapt; set model.name_or_path, or leave lora out"
    assert str(caught.value) == f"model.lora: {words}"


def test_what_is_accepted_runs() -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    accepted = []
    for hidden in range(1, 17):
        for heads in (1, 2, 3, 4):
            for kv_heads in (1, 2, 3):
                try:
                    config = LocalModelConfig(
                        hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, num_layers=1, intermediate_size=4
                    )
                except ValidationError:
                    continue
                accepted.append((hidden, heads, kv_heads))
                model = make_local_model(config, tokenizer)
                assert torch.isfinite(model(torch.zeros(1, 3, dtype=torch.long)).logits).all()
    # Derived by hand: multiples of 2 * heads up to 16, times the divisors of heads among 1, 2, 3.
    # heads 1: 8 * 1; heads 2: 4 * 2; heads 3: 2 * 2; heads 4: 2 * 2.
    assert len(accepted) == 8 + 8 + 4 + 4


def test_under_autocast_the_head_reads_hidden_states_in_bfloat16_and_its_logits_are_not_rounded() -> None:
    torch.manual_seed(0)
    model = make_local_model(LocalModelConfig(), train_tokenizer([], vocab_size=261))
    inputs, _ = lay_out([np.arange(40)], "padded")
    slot_T, target_T = torch.arange(39), torch.arange(1, 40)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got_T, _ = Policy(model)(inputs, slot_T, target_T, 1.0)
        hidden_TD = hidden_states(model, inputs)[slot_T]
    assert hidden_TD.dtype == torch.float32  # the last norm's weights are
    expected_T, _ = fused_logprobs(hidden_TD.bfloat16().float(), model.lm_head.weight, target_T)
    torch.testing.assert_close(got_T, expected_T.detach(), rtol=1e-6, atol=1e-6)


def write_gpt_oss(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a tiny gpt-oss whose experts are in 4 bits, as the published ones; return codes and scales of one weight."""
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = GptOssConfig(**sizes, **heads, layer_types=["sliding_attention"])
    draw, state = torch.Generator().manual_seed(0), {}
    for name, weight in GptOssForCausalLM(config).state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = weight.shape
            shape = (experts, rows, width // 32)
            state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
            state[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=draw)
        else:
            state[name] = weight.to(torch.bfloat16)
    train_tokenizer([], vocab_size=261).save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantized}
    (folder / "config.json").write_text(json.dumps(settings))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    return state[f"{name}_blocks"], state[f"{name}_scales"]


def test_experts_in_four_bits_are_expanded_and_trained_in_single_precision(tmp_path: Path) -> None:
    codes, scales = write_gpt_oss(tmp_path)
    model, _ = load_pretrained(str(tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    pairs = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(-2)
    expected = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
    found = model.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(found.detach(), expected)
    assert getattr(model.config, "quantization_config", None) is None  # nor is what is exported
    model(torch.arange(8)[None]).logits.sum().backward()
    assert found.grad is not None


def test_llama_4_is_trained_though_it_misnames_what_is_below_its_head(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
    config = Llama4TextConfig(**sizes, **heads, num_hidden_layers=2, max_position_embeddings=512)
    Llama4ForCausalLM(config).save_pretrained(tmp_path)
    train_tokenizer([], vocab_size=261).save_pretrained(tmp_path)
    model, _ = load_pretrained(str(tmp_path))
    layout, why = choose_layout(model.eval(), "auto", max_tokens=256)
    assert layout == "packed"
    assert "layers of type chunked_attention" in str(why)
    assert count_kept(config, None, num_tokens=64, weights=torch.float32, autocast=False, checkpointing=False).layer > 0


def test_files_that_are_broken_are_told_in_a_line(tmp_path: Path) -> None:
    sizes = LocalModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
    make_local_model(sizes, train_tokenizer([], vocab_size=261)).save_pretrained(tmp_path)
    train_tokenizer([], vocab_size=261).save_pretrained(tmp_path)
    load_pretrained(str(tmp_path))
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, settings = weights.read_bytes(), json.loads(config.read_text())

    def refused() -> str:
        with pytest.raises(ConfigError, match=r"^model\.name_or_path: ") as caught:
            load_pretrained(str(tmp_path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for content in (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", whole[: len(whole) // 2]):
        weights.write_bytes(content)
        assert "cannot load" in refused()
    tensors = load(whole)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({key: value for key, value in tensors.items() if key != name}, weights, metadata={"format": "pt"})
    assert f"lacks weights of its model: {name}; get it again" in refused()
    weights.write_bytes(whole)
    config.write_text(json.dumps(settings | {"hidden_size": 32}))
    assert "cannot load" in refused()
    config.write_text(json.dumps(settings | {"attention_dropout": "0.0"}))
    assert "cannot load" in refused()


def test_weights_that_are_quantized_in_another_way_are_refused(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ConfigError, match=r"are quantized \(gptq\), and cannot be trained; name the model that they were made"
    ):
        load_pretrained(str(tmp_path))


@each(
    ("name", "device", "is_half", "words"),
    [
        ("flex_attention", "cpu", True, "trains on GPUs alone; set it to sdpa"),
        ("flash_attention_2", "cpu", True, "trains on GPUs alone; set it to sdpa"),
        ("flash_attention_3", "cuda", False, "computes in half precision alone; set train.precision: bfloat16"),
        ("flash_attention_2", "cuda", True, "is not installed here: `pip install flash-attn`, or set it to sdpa"),
    ],
)
def test_attention_that_cannot_train_here_is_refused(
    name: str, device: str, is_half: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"^model\.attention: {name} {re.escape(words)}"):
        check_attention(name, torch.device(device), is_half=is_half)


@each(("name", "device"), [(None, "cpu"), ("sdpa", "cpu"), ("eager", "cpu"), ("flex_attention", "cuda")])
def test_attention_that_can_train_is_taken(name: str | None, device: str) -> None:
    check_attention(name, torch.device(device), is_half=False)
