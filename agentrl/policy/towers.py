"""What a multimodal model has beside what text goes through."""

from typing import Any

from torch import nn


def text_modules(model: Any) -> list[nn.Module]:
    """Return the parts of a model that text goes through: its layers and its head, and no towers for images or sound."""
    return [model.get_decoder(), model.get_output_embeddings()] if _is_multimodal(model) else [model]


def freeze_towers(model: Any) -> None:
    """Freeze what text never reaches: without gradients it would stop several processes, and an optimizer would hold it."""
    read = {id(parameter) for module in text_modules(model) for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


def _is_multimodal(model: Any) -> bool:
    return model.config.get_text_config() is not model.config
