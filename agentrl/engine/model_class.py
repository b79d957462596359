"""What a configuration of transformers says of a model: for the trainer, and for whoever reads what a server runs."""

from typing import Any


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes a language model of a configuration; some are known with images only."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WITHOUT_IMAGES

    return AutoModelForCausalLM if config.model_type in WITHOUT_IMAGES else AutoModelForImageTextToText


def layer_configs(text: Any) -> list[Any]:
    """Return the configuration of each layer of a language model: those of Gemma 4 differ in their heads."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers


def head_size(layer: Any) -> int:
    """Return the size of an attention's head, by the configuration of its layer."""
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
