"""Multimodal models, of which only the part for text is trained."""

import pytest

from agentrl.models.auto_classes import freeze_towers
from agentrl.policy.config import LoraSettings
from agentrl.policy.layout import hidden_states, lay_out
from agentrl.policy.lora import add_lora
from tests.support.architectures import tiny_model
from tests.support.models import branching_rows, tiny

MULTIMODAL = ["Gemma 3 with images", "Mistral 3"]


@pytest.mark.parametrize("name", MULTIMODAL)
def test_what_is_trained_is_what_a_pass_over_text_reaches(name: str) -> None:
    model = tiny_model(name, vocab_size=97)
    assert any("vision" in name for name, _ in model.named_parameters())
    freeze_towers(model)
    inputs, _ = lay_out(branching_rows(), "padded")
    model.get_output_embeddings()(hidden_states(model, inputs)).sum().backward()
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert any("embed_tokens" in name for name in trained)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_adapters_are_added_to_layers_of_text_alone(name: str) -> None:
    model = tiny_model(name, vocab_size=97)
    add_lora(model, LoraSettings(rank=2))
    adapted = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(adapted) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
    assert all("language_model.layers" in name for name in adapted)


def test_of_a_model_for_text_nothing_is_frozen() -> None:
    model = tiny("qwen3")
    freeze_towers(model)
    assert all(weight.requires_grad for weight in model.parameters())
