"""Facts about a model from its transformers configuration: its class, its layers, and the parts that text goes through.

`fix_frequencies` makes rotary positions the same in every pass, whatever other rows are in it.
"""

import copy
from contextlib import suppress
from typing import Any

from torch import nn


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
    """Return a model whose `base_model` is its body below the head; the name in Llama 4's text models is wrong."""
    if model.base_model is model:
        model.base_model_prefix = "model"
    return model


LAYER_KINDS = ("layer_types", "mlp_layer_types")
"""Lists in a configuration of transformers that name a kind for each layer."""


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


def text_modules(model: Any) -> list[nn.Module]:
    """Return the parts of a model that text goes through: its layers and its head, and no towers for images or sound."""
    return [model.get_decoder(), model.get_output_embeddings()] if _is_multimodal(model) else [model]


def freeze_towers(model: Any) -> None:
    """Freeze weights that text never reaches: they get no gradients, which stops several ranks and costs optimizer memory."""
    read = {id(parameter) for module in text_modules(model) for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


def _is_multimodal(model: Any) -> bool:
    return model.config.get_text_config() is not model.config


def fix_frequencies(model: Any, max_tokens: int) -> None:
    """Turn positions by the frequencies that the model has for rows of `max_tokens` tokens, however long a pass is.

    `longrope` (Phi-3) and `dynamic` choose frequencies for a pass by its longest row, so that the log-probabilities of a
    row would depend on the rows beside it. vLLM chooses once as well, by the longest row that it takes.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)  # of the module, or of each type of its layers
        for layer_type, kind in list(kinds.items()) if isinstance(kinds, dict) else [(None, kinds)]:
            if not (kind == "longrope" or "dynamic" in str(kind)):
                continue
            prefix, options = (f"{layer_type}_", {"layer_type": layer_type}) if layer_type else ("", {})
            old = getattr(module, f"{prefix}inv_freq")
            new, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=max_tokens, **options)
            old.copy_(new)
            setattr(module, f"{prefix}attention_scaling", scaling)
            if layer_type:
                kinds[layer_type] = "default"
            else:
                module.rope_type = "default"
