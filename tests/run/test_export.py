"""What an export asks a checkpoint for."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import train_tokenizer
from agentrl.config import load_recipe
from agentrl.errors import ConfigError
from agentrl.policy.model import Policy
from agentrl.report.folder import RunFolder
from agentrl.run import export as module
from agentrl.run.export import export
from benchmarks.architectures import tiny_model


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
