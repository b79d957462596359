"""What an export asks a checkpoint for."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import train_tokenizer
from agentrl.engine.vllm.servers import VLLMServerConfig
from agentrl.errors import ConfigError
from agentrl.policy.model import Policy
from agentrl.recipe.config import load_recipe
from agentrl.report.folder import RunFolder
from agentrl.run import export as module
from agentrl.run.export import export, load_to_serve, serve
from tests.support.architectures import tiny_model

pytestmark = pytest.mark.process


def test_what_is_exported_ends_where_training_did_and_needs_no_package_for_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    model = tiny_model("Qwen3", vocab_size=300)
    model.generation_config.eos_token_id = 5
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(module, "load_weights", lambda *_: None)
    monkeypatch.setattr(module, "checkpoint_errors", lambda _: nullcontext())
    names = ("--model.name_or_path", str(tmp_path / "model"), "--model.attention", "flash_attention_2")
    recipe = load_recipe(None, [*names, "--train.precision", "bfloat16"])
    run = RunFolder.create(tmp_path / "run", recipe.model_dump(mode="json"))
    (run.checkpoints / "step-000001").mkdir(parents=True)
    export(recipe, run, tmp_path / "exported")
    found = json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"]
    assert found == [*recipe.chat.build(tokenizer, name="any").stop_token_ids, 5]


def test_a_multimodal_model_is_frozen_as_in_training_where_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("Mistral 3", vocab_size=300).save_pretrained(tmp_path / "model")
    train_tokenizer([], vocab_size=261).save_pretrained(tmp_path / "model")
    asked: list[str] = []

    def load_weights(policy: Policy, _: Any) -> None:
        asked.extend(name for name, weight in policy.model.named_parameters() if weight.requires_grad)
        raise ConfigError("enough")

    monkeypatch.setattr(module, "load_weights", load_weights)
    monkeypatch.setattr(module, "checkpoint_errors", lambda _: nullcontext())
    recipe = load_recipe(None, ["--model.name_or_path", str(tmp_path / "model")])
    run = RunFolder.create(tmp_path / "run", recipe.model_dump(mode="json"))
    (run.checkpoints / "step-000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="enough"):
        export(recipe, run, tmp_path / "exported")
    assert any("language_model" in name for name in asked)
    assert not any("vision" in name for name in asked)


def test_a_server_for_a_trainer_begins_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("Qwen3", vocab_size=300).save_pretrained(tmp_path / "model")
    train_tokenizer([], vocab_size=261).save_pretrained(tmp_path / "model")
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "start_server", lambda _folder, **given: started.append(given["options"]))
    options = ("--engine.name", "vllm_server", "--train.precision", "bfloat16", "--model.lora", "{rank: 2}")
    recipe = load_recipe(None, ["--model.name_or_path", str(tmp_path / "model"), *options])
    sizes = {}
    for with_weights in (False, True):
        model, tokenizer = load_to_serve(recipe, None, with_weights=with_weights)
        assert model.device.type == ("cpu" if with_weights else "meta")
        folder = tmp_path / str(with_weights)
        assert isinstance(recipe.engine, VLLMServerConfig)
        serve(recipe, recipe.engine, folder, model=model, tokenizer=tokenizer, with_weights=with_weights, timeout_s=1.0)
        config = json.loads((folder / "model" / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        sizes[with_weights] = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    weights = sum(weight.numel() for weight in tiny_model("Qwen3", vocab_size=300).parameters())
    assert sizes[False] == 0
    assert sizes[True] == pytest.approx(2 * weights, rel=0.1)  # bfloat16
    assert [(one["load_format"], one["dtype"], one["max_lora_rank"]) for one in started] == [
        ("dummy", "bfloat16", 8),
        ("auto", "bfloat16", 8),
    ]
