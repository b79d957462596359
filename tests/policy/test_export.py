import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.chat import train_tokenizer
from agentrl.errors import ConfigError
from agentrl.policy.config import LoraSettings
from agentrl.policy.export import export_adapter, export_model, stop_at
from agentrl.policy.lora import adapter_state, add_lora
from tests.support.each import each

SIZES = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
IDS_1L = torch.arange(3, 40)[None]
TOKENIZER = train_tokenizer([], vocab_size=261)
TOKENIZER.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tiny(family: str = "Qwen3", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    return AutoModelForCausalLM.from_config(config).eval()


def adapted(model: Any) -> Any:
    add_lora(model, LoraSettings(rank=3))
    for tensor in adapter_state(model).values():
        torch.nn.init.normal_(tensor, std=0.1)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_loads_with_the_same_logits_and_tokenizer(tied: bool, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=tied)
    export_model(model, TOKENIZER, tmp_path / "out" / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert type(loaded) is type(model)
    assert torch.equal(loaded(IDS_1L).logits, model(IDS_1L).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template


def test_adapters_are_merged(tmp_path: Path) -> None:
    model = adapted(tiny())
    export_model(model, TOKENIZER, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert list(loaded.state_dict()) == list(tiny().state_dict())
    assert torch.allclose(loaded(IDS_1L).logits, model(IDS_1L).logits, rtol=1e-4, atol=1e-4)  # two products for one
    assert not torch.allclose(loaded(IDS_1L).logits, tiny()(IDS_1L).logits, rtol=0.1, atol=0.1)


def test_peft_loads_adapters_that_are_written_alone(tmp_path: Path) -> None:
    model = adapted(tiny())
    export_adapter(model, tmp_path / "out" / "adapter")
    loaded = peft.PeftModel.from_pretrained(tiny(), tmp_path / "out" / "adapter").eval()
    assert torch.equal(loaded(IDS_1L).logits, model(IDS_1L).logits)


def test_experts_are_written_one_by_one_as_the_hub_has_them(tmp_path: Path) -> None:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = adapted(tiny("Qwen3Moe", **changes))
    export_model(model, TOKENIZER, tmp_path / "model")
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in load_file(tmp_path / "model" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(loaded(IDS_1L).logits, model(IDS_1L).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_the_dtype_that_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    export_model(model, TOKENIZER, tmp_path / "model", dtype=dtype)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # one tensor with the embeddings, written once
            assert torch.equal(stored.pop(name), tensor.to(dtype)), name
    assert stored == {}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == dtype


def test_the_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = adapted(tiny())
    before, logits, config = list(model.state_dict().items()), model(IDS_1L).logits, model.config.to_dict()
    export_model(model, TOKENIZER, tmp_path / "model", dtype=torch.bfloat16)
    assert model.config.to_dict() == config
    assert [name for name, _ in before] == list(model.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model(IDS_1L).logits, logits)


def test_how_text_is_generated_goes_along(tmp_path: Path) -> None:
    model = tiny()
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    export_model(model, TOKENIZER, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config.temperature == 0.7


def test_a_temperature_of_a_model_that_does_not_sample_is_no_hindrance(tmp_path: Path) -> None:
    model = tiny()
    model.generation_config.temperature, model.generation_config.top_p = 0.6, 0.9  # transformers reads such a file
    export_model(model, TOKENIZER, tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config
    assert (found.temperature, found.top_p, found.do_sample) == (0.6, 0.9, True)
    assert not model.generation_config.do_sample


def test_a_generation_config_that_no_one_can_write_keeps_its_special_tokens(tmp_path: Path) -> None:
    model = tiny()
    model.generation_config.length_penalty, model.generation_config.eos_token_id = 0.5, 3
    export_model(model, TOKENIZER, tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config
    assert found.length_penalty != 0.5
    assert found.eos_token_id == 3


@each("own", [None, 3, [9, 7]])
@each(("stops", "ends"), [((7, 3), [7, 3]), ((7,), 7)])
def test_generation_ends_where_sampling_did_in_training(own: Any, stops: tuple[int, ...], ends: Any) -> None:
    model = tiny()
    model.generation_config.eos_token_id = own
    stop_at(model, stops)
    assert model.generation_config.eos_token_id == ends


def test_a_folder_that_holds_something_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists already; name another folder"):
        export_model(tiny(), TOKENIZER, tmp_path)
    with pytest.raises(ConfigError, match="exists already; name another folder"):
        export_model(tiny(), TOKENIZER, tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="exists already; name another folder"):
        export_adapter(adapted(tiny()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_export_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, path: Path) -> None:
            raise RuntimeError("no vocabulary")

    with pytest.raises(RuntimeError, match="no vocabulary"):
        export_model(tiny(), Broken(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
