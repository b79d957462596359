"""What a configuration of transformers says of a model: for the trainer, and for whoever reads what a server runs."""

import copy
from contextlib import suppress
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


def name_body(model: Any) -> Any:
    """Return a model whose `base_model` is what is below its head: by the name that Llama 4's text models have, it is not."""
    if model.base_model is model:
        model.base_model_prefix = "model"
    return model


LAYER_KINDS = ("layer_types", "mlp_layer_types")
"""What transformers calls the lists of a configuration that name a kind for each layer."""


def with_layers(config: Any, num: int) -> Any:
    """Return a configuration with so many layers, of the kinds that it begins with."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    num, shared = min(num, text.num_hidden_layers), getattr(text, "num_kv_shared_layers", None)
    if shared:  # the last ones read keys and values of those before
        text.num_kv_shared_layers = max(0, num - (text.num_hidden_layers - shared))
    text.num_hidden_layers = num
    for name in LAYER_KINDS:
        if kinds := getattr(text, name, None):
            with suppress(AttributeError):  # of a family that derives them
                setattr(text, name, kinds[:num])
    return config
