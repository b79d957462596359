"""Attention along a tree is set and taken back."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agentrl.policy.layout import hidden_states, lay_out
from agentrl.policy.layout import tree_attention as tree_model
from agentrl.policy.layout.tree import IntArray, plan_tree
from agentrl.policy.layout.tree_attention import TreeError, TreeLayout, tree_attention, tree_attention_of
from tests.support.each import each
from tests.support.models import branching_rows, tiny


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


@each(
    ("mask", "extra", "words"),
    [
        (torch.zeros(1, 1, 3, 3), {}, "needs attention_mask"),
        (None, {"is_causal": False}, "needs is_causal=False"),
        (None, {"softcap": 30.0}, "needs softcap"),
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
