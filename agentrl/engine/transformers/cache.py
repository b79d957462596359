"""A key-value cache whose rows have lengths of their own, and attention that does not copy it for each query head.

`R` rows of the cache, `B` rows of a forward pass, `H` query heads, `Y` key-value heads, `A = H / Y` query heads that share one,
`Q` query positions, `L` cached positions, `D` head size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from agentrl.errors import EngineError
from agentrl.models.recurrent_state import RecurrentLayer

RECURRENT = frozenset({"linear_attention", "conv"})
"""Kinds of layers that keep a state instead of keys and values."""
_BLOCK = 64


class RaggedCache(Cache):
    """Key-value cache: each forward pass writes `Q` positions into the rows given to `select`, and attends to their first `L`.

    Positions beyond a row's own length are garbage: the attention mask returned by `select` hides them.
    """

    def __init__(self, num_rows: int, layer_types: Sequence[str] = (), *, max_length: int | None = None) -> None:
        """Create an empty cache.

        Args:
            num_rows: number of rows.
            layer_types: kinds of layers, as transformers names them. Empty: all keep keys and values.
            max_length: longest row, which bounds the memory.
        """
        super().__init__(layers=[RecurrentLayer(num_rows) if t in RECURRENT else DynamicLayer() for t in layer_types])
        self._num_rows = num_rows
        self._capacity = 0
        self._max_length = max_length
        self._keys_RYLD: dict[int, torch.Tensor] = {}
        self._values_RYLD: dict[int, torch.Tensor] = {}
        self._rows_B = torch.empty(0, dtype=torch.long)
        self._positions_BQ = torch.empty(0, 0, dtype=torch.long)
        self._length = 0
        self._is_leading = False

    def select(
        self, rows: list[int], starts: list[int], num_queries: int, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Prepare the next forward pass: row `rows[b]` gets positions `starts[b]` to `starts[b] + num_queries - 1`.

        Returns:
            `position_ids` [B, Q] (those of padding are none beyond the longest row's last) and the `attention_mask`
            [B, 1, Q, L] for the model. The mask is added to the scores (0, or the lowest number of `dtype`): eager attention
            would add a boolean one as 0 and 1.
        """
        self._is_leading = rows == list(range(len(rows)))
        self._rows_B = torch.tensor(rows, device=device)
        starts_B = torch.tensor(starts, device=device)
        self._positions_BQ = starts_B[:, None] + torch.arange(num_queries, device=device)
        self._length = max(starts) + num_queries
        self.reserve(self._length)
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.select(self._rows_B, starts_B)
        is_hidden_BQL = torch.arange(self._length, device=device) > self._positions_BQ[:, :, None]
        mask_BQL = torch.zeros(is_hidden_BQL.shape, device=device, dtype=dtype)
        mask_BQL.masked_fill_(is_hidden_BQL, torch.finfo(dtype).min)
        ids_BQ = self._positions_BQ.clamp(max=self._max_length - 1) if self._max_length else self._positions_BQ
        return {"position_ids": ids_BQ, "attention_mask": mask_BQL[:, None]}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [B, H, Q, D]; return those of the selected rows [B, H, L, D]."""
        if layer_idx not in self._keys_RYLD:
            self._keys_RYLD[layer_idx] = self._empty(key_states)
            self._values_RYLD[layer_idx] = self._empty(value_states)
        kept = []
        for cached_RYLD, states_BYQD in (
            (self._keys_RYLD[layer_idx], key_states),
            (self._values_RYLD[layer_idx], value_states),
        ):
            cached_RYLD[self._rows_B[:, None], :, self._positions_BQ] = states_BYQD.transpose(1, 2)
            window = cached_RYLD[:, :, : self._length]
            kept.append(window[: len(self._rows_B)] if self._is_leading else window[self._rows_B])
        return kept[0], kept[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature of Cache
        """Return the number of positions attended to."""
        return self._length

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a row's keys and values to another row."""
        for layers in (self._keys_RYLD, self._values_RYLD):
            for cached_RYLD in layers.values():
                cached_RYLD[target, :, :length] = cached_RYLD[source, :, :length]

    def reserve(self, length: int) -> None:
        """Make room for rows of this length, in one step."""
        if length <= self._capacity:
            return
        grown = self._capacity * 3 // 2
        if self._max_length is not None:
            grown = min(grown, self._max_length)
        self._capacity = -(-max(length, grown) // _BLOCK) * _BLOCK
        for layers in (self._keys_RYLD, self._values_RYLD):
            for index, old_RYLD in layers.items():
                layers[index] = old_RYLD.new_zeros(*old_RYLD.shape[:2], self._capacity, old_RYLD.shape[3])
                layers[index][:, :, : old_RYLD.shape[2]] = old_RYLD

    def _empty(self, like_BYQD: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = like_BYQD.shape
        return like_BYQD.new_zeros(self._num_rows, heads, self._capacity, size)


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

    over the keys j that the mask shows and, in a layer with a sliding window, that lie in it; exp(s_aux) if heads have a
    sink (gpt-oss). A lone position per row (decoding): the heads of a group become positions, one pass over the keys for
    all of them. Else one pass for each head of a group, so that the mask is never repeated.

    Returns:
        the output [B, Q, H, D] and None.

    Raises:
        EngineError: if the model's attention has further terms.
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
    """Attend with as many query heads as key heads; `sinks`, broadcast to (Y, Q), enter the softmax's denominator."""
    out_BYQD = scaled_dot_product_attention(query_BYQD, key_BYLD, value_BYLD, attn_mask=mask, scale=scale)
    if sinks is None:
        return out_BYQD
    scores_BYQL = (query_BYQD @ key_BYLD.transpose(2, 3)).float() * scale
    if mask is not None:
        scores_BYQL = scores_BYQL.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BYQL + mask
    return out_BYQD * torch.sigmoid(scores_BYQL.logsumexp(-1) - sinks)[..., None].to(out_BYQD.dtype)


def use_grouped_attention(model: Any) -> None:
    """Make a transformers model use `grouped_attention`."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
