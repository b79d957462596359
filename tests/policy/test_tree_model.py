"""Attention along a tree is set and taken back; models of several families for other tests."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from agentrl.policy import tree_model
from agentrl.policy.layout import hidden_states, lay_out
from agentrl.policy.tree import IntArray, plan_tree
from agentrl.policy.tree_attention import TreeLayout, tree_attention
from agentrl.policy.tree_model import TreeError, tree_attention_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 20}),
    "gemma3": (
        "Gemma3Text",
        {**SIZES, "head_dim": 8, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2": (
        "GPT2",
        {**GPT2_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 1, "bos_token_id": 1},
    ),
}
"""Family and sizes; the rows below are up to 90 tokens long, so that windows of 20 cut them."""


def tiny(name: str, *, init: float = 0.2, **changes: Any) -> Any:
    family, sizes = MODELS[name]
    return made(family, initializer_range=init, **sizes | changes)


def made(family: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))


def in_float64(model: Any) -> Any:
    """The model with nothing left that computes in float32 between float64 layers."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model.double()


def branching_rows() -> list[IntArray]:
    """Forks at several depths, of forks, a row that another continues, a row twice, and one that shares nothing."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(97, size=length) for length in (90, 80, 70, 60, 30, 30, 25)]
    for row, (source, fork) in zip(rows[1:], [(0, 40), (1, 60), (0, 10), (0, 30), (4, 30), (0, 0)], strict=True):
        row[:fork] = rows[source][:fork]
    return rows


def on_tree(model: Any, rows: list[IntArray]) -> Tensor:
    return hidden_states(model, lay_out(rows, "tree")[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_attends_as_before_afterwards(attention: str) -> None:
    model = tiny("qwen3", attn_implementation=attention)
    ids = torch.arange(20)[None]
    before = model(ids).logits
    on_tree(model, branching_rows())
    assert model.config._attn_implementation == attention
    with pytest.raises(IndexError), tree_attention_of(model):
        on_tree(model, [np.array([97])])
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, before)


def test_without_a_tree_nothing_is_computed() -> None:
    model = tiny("qwen3")
    with tree_attention_of(model), pytest.raises(TreeError, match="was called without a tree"):
        model(torch.arange(20)[None])


@pytest.mark.parametrize(
    ("mask", "extra", "words"),
    [
        (torch.zeros(1, 1, 3, 3), {}, "needs attention_mask"),
        (None, {"is_causal": False}, "needs is_causal=False"),
        (None, {"s_aux": torch.zeros(2)}, "needs s_aux"),
    ],
)
def test_attention_that_does_more_than_look_up_the_tree_is_refused(
    mask: Tensor | None, extra: dict[str, Any], words: str
) -> None:
    states = torch.zeros(1, 2, 3, 4)
    layout = TreeLayout(plan_tree([np.arange(3)]))
    with pytest.raises(TreeError, match=f"Identity {words}, which attention along a tree lacks"):
        tree_model._attend(nn.Identity(), states, states, states, mask, agentrl_tree=layout, **extra)


def test_a_window_of_the_module_counts_where_none_is_passed() -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    layout = TreeLayout(plan_tree([np.arange(9)]))
    module = nn.Identity()
    module.sliding_window = 2  # type: ignore[assignment]
    got, _ = tree_model._attend(module, query, key, value, None, scaling=0.5, agentrl_tree=layout)
    narrow = tree_attention(query[0], key[0], value[0], layout, scale=0.5, window=2)
    assert torch.equal(got[0].transpose(0, 1), narrow)


def test_dropout_is_refused() -> None:
    model = tiny("gpt2", attn_pdrop=0.1).train()
    with pytest.raises(TreeError, match="GPT2Attention needs dropout"):
        on_tree(model, branching_rows())
