"""Transformers models attend along a tree of tokens.

`P` tokens of the tree, `H` query heads, `Y` key-value heads, `D` head size.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from agentrl.errors import TrainingError
from agentrl.policy.recurrent import RECURRENT, mixers_of
from agentrl.policy.tree_attention import TreeLayout, tree_attention

__all__ = ["NAME", "TreeError", "attention_set", "tree_attention_of", "why_not"]

NAME = "agentrl_tree"


class TreeError(TrainingError):
    """A model whose attention is more than a masked softmax over all ancestors, or those in a window."""


def tree_attention_of(model: Any) -> AbstractContextManager[None]:
    """Let a transformers model attend along trees, and as before afterwards. May be nested.

    Raises:
        TreeError: for a model with attention of its own (see `why_not`).
    """
    if reason := why_not(model):
        raise TreeError(reason)
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, no_mask)
    return attention_set(model, NAME)


@contextmanager
def attention_set(model: Any, name: str) -> Iterator[None]:
    """Let all of a model attend by a registered attention function, and as before afterwards."""
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    before = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    before[""] = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def why_not(model: Any) -> str | None:
    """Return why a model cannot run on a tree, as far as can be told without running it, or None."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        return f"{name} has an attention of its own, not one of transformers' attention functions"
    follows = {"full_attention", "sliding_attention", "mlp", "moe"}
    if mixers_of(model):  # which see rows, see `hidden_states`
        follows |= RECURRENT
    elif getattr(model, "_is_stateful", False):
        return f"{name} is recurrent: a branch would continue the state that its sibling left"
    if others := set(getattr(config, "layer_types", None) or ()) - follows:
        return f"{name} has layers of type {', '.join(sorted(others))}, which do not look along the branches of a tree"
    if "position_ids" not in signature(model.base_model.forward).parameters:
        return f"{name} takes no position_ids, without which siblings would stand behind one another"
    return None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the tree says which token sees which."""


def _attend(
    module: nn.Module,
    query_1HPD: Tensor,
    key_1YPD: Tensor,
    value_1YPD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    agentrl_tree: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend along a tree, as transformers calls it; the output is (1, P, H, D)."""
    extra = [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]
    extra += ["attention_mask"] if attention_mask is not None else []
    extra += ["dropout"] if dropout else []
    extra += ["is_causal=False"] if not kwargs.get("is_causal", getattr(module, "is_causal", True)) else []
    if extra:
        raise TreeError(f"{type(module).__name__} needs {', '.join(extra)}, which attention along a tree lacks")
    if agentrl_tree is None:
        raise TreeError(f"{type(module).__name__} was called without a tree; run the model through hidden_states")
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    out_HPD = tree_attention(
        query_1HPD[0].to(value_1YPD.dtype),  # norms of queries and keys leave autocast in float32
        key_1YPD[0].to(value_1YPD.dtype),
        value_1YPD[0],
        agentrl_tree,
        scale=query_1HPD.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        sinks_H=s_aux,
    )
    return out_HPD.transpose(0, 1)[None].contiguous(), None
