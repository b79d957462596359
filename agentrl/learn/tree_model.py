"""Transformers models run on a tree of tokens.

`N` tokens of the tree, `H` query heads, `G` key-value heads, `D` hidden or head size, `L` positions of a row.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from math import inf, isnan
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from agentrl.errors import TrainingError
from agentrl.learn.logprobs import fused_logprobs
from agentrl.learn.tree import IntArray, TokenTree, plan_tree
from agentrl.learn.tree_attention import TreeLayout, tree_attention

__all__ = ["NAME", "TreeError", "probe_tree", "tree_attention_of", "tree_hidden", "why_not"]

NAME = "agentrl_tree"

log = logging.getLogger(__name__)


class TreeError(TrainingError):
    """A model whose attention is more than a masked softmax over all ancestors, or those in a window."""


def tree_hidden(model: Any, tree: TokenTree, *, device: torch.device | str = "cpu") -> Tensor:
    """Return the hidden states (N, D) of a causal language model at each token of a tree.

    Positions are depths, so that each row of the tree gets what it would get by itself. Under gradient checkpointing
    layers run again in the backward pass, which must then lie within `tree_attention_of(model)` as well.

    Raises:
        TreeError: for a model that cannot run on a tree (see `why_not`, `probe_tree`), or for gradient checkpointing
            outside of `tree_attention_of`.
    """
    runs_again = model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False)
    if runs_again and model.config._attn_implementation != NAME:
        raise TreeError(
            "gradient checkpointing runs layers again in the backward pass, with the attention that is set then; "
            "put forward and backward into `with tree_attention_of(model):`"
        )
    layout = TreeLayout(tree, device=device)
    with tree_attention_of(model):
        outputs = model.base_model(
            input_ids=torch.from_numpy(tree.ids_N).to(device)[None],
            position_ids=layout.depth_N[None],
            use_cache=False,
            agentrl_tree=layout,
        )
    return cast("Tensor", outputs.last_hidden_state)[0]


@contextmanager
def tree_attention_of(model: Any) -> Iterator[None]:
    """Let a transformers model attend along trees, and as before afterwards. May be nested.

    Raises:
        TreeError: for a model with attention of its own (see `why_not`).
    """
    if reason := why_not(model):
        raise TreeError(reason)
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    before = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    before[""] = model.config._attn_implementation
    model.set_attn_implementation(NAME)
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
    if getattr(model, "_is_stateful", False):
        return f"{name} is recurrent: a branch would continue the state that its sibling left"
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of type {', '.join(sorted(others))}, which do not look along the branches of a tree"
    if "position_ids" not in signature(model.base_model.forward).parameters:
        return f"{name} takes no position_ids, without which siblings would stand behind one another"
    return None


@torch.no_grad()
def probe_tree(model: Any, *, max_tokens: int = 8192, seed: int = 0) -> float:
    """Return the largest difference of log-probabilities between a tree and the same rows run one by one.

    Three random rows that branch at two depths, without dropout and autocast. They are longer than the sliding window
    of the configuration where that cuts rows of at most `max_tokens` tokens. In float32 up to 1e-4 is rounding; weights
    of half precision add their own. Infinite for models that cannot run on a tree (why goes to the log) or give NaN.
    """
    device = model.get_input_embeddings().weight.device
    was_training = model.training
    model.eval()
    try:
        rows = _probe_rows(model.config.get_text_config(), max_tokens, seed)
        tree = plan_tree(rows)
        with torch.autocast(device.type, enabled=False):
            hidden_ND = tree_hidden(model, tree, device=device)
            gaps = []
            for number, ids_L in enumerate(rows):
                inputs_L = torch.from_numpy(ids_L).to(device)
                alone_LD = model.base_model(input_ids=inputs_L[None], use_cache=False).last_hidden_state[0]
                index_L = tree.index(np.full(len(ids_L), number), np.arange(len(ids_L)))
                both = [_next_logprobs(model, states, inputs_L) for states in (hidden_ND[index_L], alone_LD)]
                gaps.append((both[0] - both[1]).abs().max())
    except TreeError as reason:
        log.info("no token tree: %s", reason)
        return inf
    finally:
        model.train(was_training)
    worst = float(torch.stack(gaps).max())
    return inf if isnan(worst) else worst


def _probe_rows(config: Any, max_tokens: int, seed: int) -> list[IntArray]:
    """Return three rows: one leaves the others after a third of its length, these part after two thirds."""
    window = getattr(config, "sliding_window", None) or 0
    length = 48 if window >= max_tokens else max(48, window + 24)
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    rng = np.random.default_rng(seed)
    ids_L = rng.integers(config.vocab_size, size=length)
    rows = [ids_L]
    for fork in (length // 3, 2 * length // 3):
        branch_L = rng.integers(config.vocab_size, size=length - 5)
        branch_L[:fork] = ids_L[:fork]
        branch_L[fork] = (ids_L[fork] + 1) % config.vocab_size
        rows.append(branch_L)
    return rows


def _next_logprobs(model: Any, hidden_LD: Tensor, inputs_L: Tensor) -> Tensor:
    head = model.get_output_embeddings()
    return fused_logprobs(hidden_LD[:-1], head.weight, inputs_L[1:], bias_V=head.bias)[0]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the tree says who sees whom."""


def _attend(
    module: nn.Module,
    query_1HND: Tensor,
    key_1GND: Tensor,
    value_1GND: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    agentrl_tree: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend along a tree, as transformers calls it; the output is (1, N, H, D)."""
    extra = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    extra += ["attention_mask"] if attention_mask is not None else []
    extra += ["dropout"] if dropout else []
    extra += ["is_causal=False"] if not kwargs.get("is_causal", getattr(module, "is_causal", True)) else []
    if extra:
        raise TreeError(f"{type(module).__name__} needs {', '.join(extra)}, which attention along a tree lacks")
    if agentrl_tree is None:
        raise TreeError(f"{type(module).__name__} was called without a tree; run the model through tree_hidden")
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    out_HND = tree_attention(
        query_1HND[0].to(value_1GND.dtype),  # norms of queries and keys leave autocast in float32
        key_1GND[0].to(value_1GND.dtype),
        value_1GND[0],
        agentrl_tree,
        scale=query_1HND.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
    )
    return out_HND.transpose(0, 1)[None].contiguous(), None
