"""Rotary positions that are the same in every pass, whatever else is in it."""

from typing import Any


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
