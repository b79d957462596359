"""Tiny models that vLLM runs on a CPU, whose attention wants heads of 32 and more, and plain passes through them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


def make_model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | changes)).eval()


def make_experts(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | experts)).eval()


def plain_logprobs(model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> list[float]:
    """One plain pass over prompt and completion."""
    with torch.inference_mode():
        logits_LV = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    logprobs_LV = (logits_LV / temperature).log_softmax(-1)
    picked: list[float] = logprobs_LV.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    return picked
