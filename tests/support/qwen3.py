"""Sizes of Qwen3s that people train, as the models' own configurations have them."""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "14B": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 17408},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
    "30B-A3B": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}


def config_of(size: str, **changes: Any) -> Qwen3Config | Qwen3MoeConfig:
    """Return the configuration of a model."""
    common: dict[str, Any] = {
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": size in ("0.6B", "1.7B", "4B"),
    }
    sizes = {**common, **QWEN3[size], **changes}
    return (Qwen3MoeConfig if "num_experts" in sizes else Qwen3Config)(**sizes)


def folder_of(size: str, folder: Path, **changes: Any) -> Path:
    """Return a folder with a model's configuration, and nothing else."""
    config_of(size, **changes).save_pretrained(folder)
    return folder
