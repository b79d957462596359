"""A key-value cache whose rows have lengths of their own.

`S` rows, `B` rows of a forward pass, `Q` query positions, `Y` key-value heads, `L` cached positions, `D` head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from agentrl.engine.recurrent_layer import RecurrentLayer

RECURRENT = frozenset({"linear_attention", "conv"})
"""Kinds of layers that keep a state instead of keys and values."""
_BLOCK = 64


class RaggedCache(Cache):
    """Each forward pass writes `Q` positions into each of the rows that `select` named, and attends to their first `L`.

    What lies behind a row's own length is garbage: the attention mask that `select` returns hides it.
    """

    def __init__(self, num_rows: int, layer_types: Sequence[str] = (), *, max_length: int | None = None) -> None:
        """Begin empty.

        Args:
            num_rows: rows that there is room for.
            layer_types: kinds of layers, as transformers names them; without them all keep keys and values.
            max_length: no row will be longer, and no room is made for more.
        """
        super().__init__(layers=[RecurrentLayer(num_rows) if t in RECURRENT else DynamicLayer() for t in layer_types])
        self._num_rows = num_rows
        self._capacity = 0
        self._max_length = max_length
        self._keys_SYLD: dict[int, torch.Tensor] = {}
        self._values_SYLD: dict[int, torch.Tensor] = {}
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
        if layer_idx not in self._keys_SYLD:
            self._keys_SYLD[layer_idx] = self._empty(key_states)
            self._values_SYLD[layer_idx] = self._empty(value_states)
        kept = []
        for cached_SYLD, states_BYQD in (
            (self._keys_SYLD[layer_idx], key_states),
            (self._values_SYLD[layer_idx], value_states),
        ):
            cached_SYLD[self._rows_B[:, None], :, self._positions_BQ] = states_BYQD.transpose(1, 2)
            window = cached_SYLD[:, :, : self._length]
            kept.append(window[: len(self._rows_B)] if self._is_leading else window[self._rows_B])
        return kept[0], kept[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature of Cache
        """Return the number of positions attended to."""
        return self._length

    def reserve(self, length: int) -> None:
        """Make room for rows of this length: at once, where it is known that one will be as long."""
        if length <= self._capacity:
            return
        grown = self._capacity * 3 // 2
        if self._max_length is not None:
            grown = min(grown, self._max_length)
        self._capacity = -(-max(length, grown) // _BLOCK) * _BLOCK
        for layers in (self._keys_SYLD, self._values_SYLD):
            for index, old_SYLD in layers.items():
                layers[index] = old_SYLD.new_zeros(*old_SYLD.shape[:2], self._capacity, old_SYLD.shape[3])
                layers[index][:, :, : old_SYLD.shape[2]] = old_SYLD

    def _empty(self, like_BYQD: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = like_BYQD.shape
        return like_BYQD.new_zeros(self._num_rows, heads, self._capacity, size)
