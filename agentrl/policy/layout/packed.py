"""Attention of transformers models within packed rows, row by row: no mask has the pairs of a whole pass.

`B` lines of a pass, `L` slots of a line, `P = B * L` slots of a pass, `R` rows of similar length, `W` tokens of the longest
of them, `H` heads (of queries, or of keys and values), `D` head size, `N` runs of neighbouring slots: rows, and padding.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.errors import TrainingError
from agentrl.policy.layout.tree import IntArray
from agentrl.policy.layout.tree_attention import attention_set

_NAME = "agentrl_packed"
_LARGEST_HEAD = 256
"""Largest head size of torch's flash attention, whose heads are multiples of 8."""
_HAS_VARLEN = {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys()
"""Whether this torch's attention to runs of any length takes causal queries that share heads of keys."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Positions of the rows in a packed pass, as tensors on its device."""

    slots: Sequence[Tensor]
    """Slot of each token of each row, (R, W) for rows of similar length; shorter rows repeat their last."""
    read_BL: Tensor
    """Index of each slot of the pass in the concatenated `slots`; 0 for padding."""
    bounds_N: Tensor
    """First slot of each row and of each line's padding, and P: int32 (N + 1,)."""
    longest: int
    """Slots of the longest row or padding."""

    @classmethod
    def from_paths(cls, paths: Sequence[IntArray], ids_BL: Tensor) -> "PackedRows":
        """Return the rows whose tokens are in the given slots of a pass."""
        slots = []
        read_P = np.zeros(ids_BL.numel(), dtype=np.int64)
        start = 0
        for group in _by_length(paths):
            width = len(group[0])
            for path in group:
                read_P[path] = start + np.arange(len(path))
                start += width
            slot_RW = np.stack([np.pad(path, (0, width - len(path)), mode="edge") for path in group])
            slots.append(torch.from_numpy(slot_RW).to(ids_BL.device))
        ends = {int(end) for path in paths if len(path) for end in (path[0], path[-1] + 1)}
        bounds_N = np.array(sorted(ends | set(range(0, ids_BL.numel() + 1, ids_BL.shape[1]))), dtype=np.int32)
        device = ids_BL.device
        read_BL = torch.from_numpy(read_P).to(device).view(ids_BL.shape)
        return cls(slots, read_BL, torch.from_numpy(bounds_N).to(device), int(np.diff(bounds_N).max()))


def attends_by_rows(model: Any) -> bool:
    """Return whether a model's attention is torch's scaled dot product, through an interface that can pass rows to it."""
    attention = model.config.get_text_config()._attn_implementation
    return attention in ("sdpa", _NAME) and bool(model._can_set_attn_implementation())


def packed_attention_of(model: Any) -> AbstractContextManager[None]:
    """Let a transformers model attend within the rows that a pass brings as `agentrl_packed`, and as before afterwards.

    The pass must say that no slot is padding (`attention_mask` of ones), so that masks are those of one row: none if rows
    are causal, else, as for a sliding window shorter than the line, one of L x L which each row has the corner of.
    """
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask_of_a_row)
    return attention_set(model, _NAME)


def _by_length(paths: Sequence[IntArray]) -> list[list[IntArray]]:
    """Return paths, without empty ones, in groups of which the first is the longest, and at most twice as long as any."""
    groups: list[list[IntArray]] = []
    for path in sorted(filter(len, paths), key=len, reverse=True):
        if not groups or 2 * len(path) < len(groups[-1][0]):
            groups.append([])
        groups[-1].append(path)
    return groups


def _mask_of_a_row(**kwargs: Any) -> Tensor | None:
    """Return transformers' mask of a row as long as a line: None if it is causal only, or (1, 1, L, L)."""
    return sdpa_mask(**kwargs | {"batch_size": 1, "attention_mask": None})


def _fits_varlen(module: nn.Module, query_BHLD: Tensor, value_BHLD: Tensor, **kwargs: Any) -> bool:
    """Return whether torch's attention to runs of any length (flash attention, half precision) computes what is asked for."""
    is_half = value_BHLD.dtype in (torch.bfloat16, torch.float16)
    if not (_HAS_VARLEN and is_half and torch.cuda.is_available()) or value_BHLD.is_cpu:
        return False
    others = [kwargs.get("dropout"), *(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))]
    others.append(not (getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]))
    size = value_BHLD.shape[-1]
    fits = query_BHLD.shape[-1] == size <= _LARGEST_HEAD and size % 8 == 0 and not any(others)
    return fits and torch.cuda.get_device_capability() >= (8, 0)


def _attend(
    module: nn.Module,
    query_BHLD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    mask_11LL: Tensor | None,
    agentrl_packed: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend row by row, as transformers calls it: rows are padded on the right, which causality hides.

    In half precision on a GPU, without a window, all rows are one call of flash attention.
    """
    if agentrl_packed is None:
        raise TrainingError(f"{type(module).__name__} was called without rows; run the model through hidden_states")
    states = [states_BHLD.transpose(1, 2).flatten(0, 1) for states_BHLD in (query_BHLD, key_BHLD, value_BHLD)]
    if mask_11LL is None and _fits_varlen(module, query_BHLD, value_BHLD, **kwargs):
        # Norms of queries and keys leave autocast in float32.
        query_PHD, key_PHD, value_PHD = (states_PHD.to(value_BHLD.dtype) for states_PHD in states)
        out_PHD = cast(
            "Tensor",
            varlen_attn(
                query_PHD,
                key_PHD,
                value_PHD,
                cu_seq_q=agentrl_packed.bounds_N,
                cu_seq_k=agentrl_packed.bounds_N,
                max_q=agentrl_packed.longest,
                max_k=agentrl_packed.longest,
                scale=kwargs.get("scaling"),
                window_size=(-1, 0),
                enable_gqa=True,
            ),
        )
        return out_PHD.unflatten(0, agentrl_packed.read_BL.shape), None
    parts = []
    for slot_RW in agentrl_packed.slots:
        width = slot_RW.shape[1]
        mask_11WW = None if mask_11LL is None else mask_11LL[..., :width, :width]
        query_RHWD, key_RHWD, value_RHWD = (states_PHD[slot_RW].transpose(1, 2) for states_PHD in states)
        out_RWHD, _ = sdpa_attention_forward(module, query_RHWD, key_RHWD, value_RHWD, mask_11WW, **kwargs)
        parts.append(out_RWHD.flatten(0, 1))
    return torch.cat(parts)[agentrl_packed.read_BL], None
