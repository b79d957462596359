"""Attention over cached keys and values without copying them for each query head.

`B` rows, `H` query heads, `Y` key-value heads, `A = H / Y` query heads that share one, `Q` query positions, `L` cached
positions, `D` head size.
"""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from agentrl.errors import EngineError

NAME = "agentrl_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query_BHQD: torch.Tensor,
    key_BYLD: torch.Tensor,
    value_BYLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with one copy of the keys for the A query heads that share it, and one of the mask for all heads.

        out_i = sum_j exp(scale query_i . key_j) value_j / (exp(s_aux) + sum_j exp(scale query_i . key_j))

    over the keys j that the mask shows and, in a layer with a sliding window, that lie in it; exp(s_aux) where heads have a
    sink (gpt-oss). A lone position per row (decoding): the heads of a group become positions, one pass over the keys for
    all of them. Else one pass for each head of a group, so that the mask is never repeated.

    Returns:
        the output [B, Q, H, D] and None.

    Raises:
        EngineError: for a model whose attention does more.
    """
    if extra := [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]:
        raise EngineError(
            f"the transformers engine cannot compute attention with {', '.join(extra)}: choose another model"
        )
    rows, heads, queries, size = query_BHQD.shape
    shared = key_BYLD.shape[1]
    group = heads // shared
    mask = attention_mask
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    if mask is None and (queries > 1 or window is not None):
        mask = torch.ones(queries, key_BYLD.shape[2], dtype=torch.bool, device=query_BHQD.device)
        mask = mask.tril(key_BYLD.shape[2] - queries)[None, None]
    if window is not None and mask is not None and key_BYLD.shape[2] > window:
        mask = _within(mask, window)
    attend = partial(_attend, key_BYLD, value_BYLD, scale=size**-0.5 if scaling is None else scaling)
    sinks_YA = None if s_aux is None else s_aux.float().reshape(shared, group)
    if queries == 1:
        mask = None if mask is None else mask.expand(-1, -1, group, -1)
        output_BYAQD = attend(query_BHQD.reshape(rows, shared, group, size), mask, sinks_YA)
    else:
        query_BYAQD = query_BHQD.reshape(rows, shared, group, queries, size)
        sinks = [None if sinks_YA is None else sinks_YA[:, head, None] for head in range(group)]
        parts = [attend(query_BYAQD[:, :, head], mask, sink) for head, sink in enumerate(sinks)]
        output_BYAQD = torch.stack(parts, dim=2)
    return output_BYAQD.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous(), None


def _within(mask_B1QL: torch.Tensor, window: int) -> torch.Tensor:
    """Hide the keys that lie before a query's window; the last one that a causal mask shows is the query's own."""
    is_visible = mask_B1QL if mask_B1QL.dtype == torch.bool else mask_B1QL == 0
    own_B1Q1 = is_visible.sum(-1, keepdim=True) - 1
    is_near = torch.arange(mask_B1QL.shape[-1], device=mask_B1QL.device) > own_B1Q1 - window
    return is_visible & is_near


def _attend(
    key_BYLD: torch.Tensor,
    value_BYLD: torch.Tensor,
    query_BYQD: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend with as many heads of queries as of keys; `sinks`, to be broadcast to (Y, Q), take their share of the softmax."""
    out_BYQD = scaled_dot_product_attention(query_BYQD, key_BYLD, value_BYLD, attn_mask=mask, scale=scale)
    if sinks is None:
        return out_BYQD
    scores_BYQL = (query_BYQD @ key_BYLD.transpose(2, 3)).float() * scale
    if mask is not None:
        scores_BYQL = scores_BYQL.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BYQL + mask
    return out_BYQD * torch.sigmoid(scores_BYQL.logsumexp(-1) - sinks)[..., None].to(out_BYQD.dtype)


def use_grouped_attention(model: Any) -> None:
    """Let a transformers model compute attention by `grouped_attention`."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
