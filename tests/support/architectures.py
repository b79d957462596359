"""Tiny models with random weights of the architectures that people train, as transformers has them."""

from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least that vLLM takes on a CPU
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_WINDOW = 32
"""Tokens that a sliding window sees: fewer than any dialogue has."""
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "Qwen3.5": (
        "Qwen3_5Text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "Gemma 3": (
        "Gemma3Text",
        {
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "query_pre_attn_scalar": 32,
        },
    ),
    "Mistral": ("Mistral", {"sliding_window": _WINDOW}),
    "gpt-oss": (
        "GptOss",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "GLM-4 MoE": (
        "Glm4Moe",
        {
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    "Phi-3": ("Phi3", {"head_dim": None, "hidden_size": 64}),
}
"""What transformers calls each, and what it has beyond a plain decoder: sliding windows, experts, a recurrent layer."""


def tiny_model(name: str, *, vocab_size: int, **changes: Any) -> Any:
    """Return a model of an architecture with random weights, the same each time."""
    family, own = ARCHITECTURES[name]
    sizes = {**_SIZES, **own, "pad_token_id": 0, "vocab_size": vocab_size, **changes}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{k: v for k, v in sizes.items() if v is not None})
    return transformers.AutoModelForCausalLM.from_config(config)
