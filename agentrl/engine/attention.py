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
    module: torch.nn.Module,  # noqa: ARG001 - the signature of transformers' attention functions
    query_BHQD: torch.Tensor,
    key_BYLD: torch.Tensor,
    value_BYLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with one copy of the keys for the A query heads that share it, and one of the mask for all heads.

    A lone position per row (decoding): the heads of a group become positions, one pass over the keys for all of them.
    Else one pass for each head of a group, so that the mask is never repeated.

    Returns:
        the output [B, Q, H, D] and None.

    Raises:
        EngineError: for a model whose attention does more than a masked softmax.
    """
    if extra := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise EngineError(
            f"the transformers engine cannot compute attention with {', '.join(extra)}: choose another model"
        )
    rows, heads, queries, size = query_BHQD.shape
    shared = key_BYLD.shape[1]
    group = heads // shared
    mask = attention_mask
    if mask is None and queries > 1:
        mask = torch.ones(queries, key_BYLD.shape[2], dtype=torch.bool, device=query_BHQD.device)
        mask = mask.tril(key_BYLD.shape[2] - queries)[None, None]
    attend = partial(scaled_dot_product_attention, key=key_BYLD, value=value_BYLD, scale=scaling)
    if queries == 1:
        mask = None if mask is None else mask.expand(-1, -1, group, -1)
        output_BYAQD = attend(query_BHQD.reshape(rows, shared, group, size), attn_mask=mask)
    else:
        query_BYAQD = query_BHQD.reshape(rows, shared, group, queries, size)
        output_BYAQD = torch.stack([attend(query_BYAQD[:, :, head], attn_mask=mask) for head in range(group)], dim=2)
    return output_BYAQD.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous(), None


def use_grouped_attention(model: Any) -> None:
    """Let a transformers model compute attention by `grouped_attention`."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
