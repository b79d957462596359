"""State of recurrent layers (linear attention and short convolutions), row by row.

`S` rows, `B` rows of a forward pass, `Q` query positions, `C` channels of a convolution, `W` its width.
"""

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer


class RecurrentLayer(LinearAttentionLayer):
    """Transformers' cache of a recurrent layer, in which each forward pass sees the rows that `select` named.

    A state stands behind the last token of its row: it goes forward only, and does not handle padding.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.record_past = True  # the model then hands every state to `update_conv_state`, instead of writing into ours
        self._num_rows = num_rows
        self._conv_SCW: torch.Tensor | None = None
        self._recurrent_S: torch.Tensor | None = None
        """States of the rows, in the model's own shape."""
        self._rows_B = torch.empty(0, dtype=torch.long)

    def select(self, rows_B: torch.Tensor, starts_B: torch.Tensor) -> None:
        """Prepare the next forward pass: rows that start at position 0 have seen nothing."""
        self._rows_B = rows_B
        for states in (self._conv_SCW, self._recurrent_S):
            if states is not None:
                states[rows_B[starts_B == 0]] = 0
        self.has_previous_state[0] = self._recurrent_S is not None
        self.recurrent_states[0] = None if self._recurrent_S is None else self._recurrent_S[rows_B]

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,  # noqa: ARG002 - the signature of transformers
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the inputs of a convolution with what lies before them, (B, C, W + Q), and keep the last W."""
        assert conv_kernel_size is not None
        if self._conv_SCW is None:
            self._conv_SCW = conv_states.new_zeros(self._num_rows, conv_states.shape[1], conv_kernel_size)
        inputs_BCQ = torch.cat([self._conv_SCW[self._rows_B], conv_states], dim=-1)
        self._conv_SCW[self._rows_B] = inputs_BCQ[..., -conv_kernel_size:]
        return inputs_BCQ

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,
        state_idx: int = 0,  # noqa: ARG002 - the signature of transformers
        **_: Any,
    ) -> torch.Tensor:
        """Keep the states of the pass's rows."""
        if self._recurrent_S is None:
            self._recurrent_S = recurrent_states.new_zeros(self._num_rows, *recurrent_states.shape[1:])
        self._recurrent_S[self._rows_B] = recurrent_states
        return recurrent_states
