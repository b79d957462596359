"""Packed rows attend one by one: what reaches the kernel, and what is refused."""

from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.errors import TrainingError
from agentrl.models.auto_classes import name_body
from agentrl.policy.layout import hidden_states, lay_out, packed, probe_layout
from agentrl.policy.layout.packed import PackedRows, _by_length, packed_attention_of
from tests.support.each import each
from tests.support.models import made, tiny

LENGTHS = (50, 40, 6, 5, 4, 9)
"""On the lines 50, and 40 + 9, and 6 + 5 + 4; by length (50, 40), (9, 6, 5) and (4)."""


def calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, ...], Any, bool]]:
    """Shapes of queries and keys, mask, and whether causal, of each attention of a pass over rows of `LENGTHS`."""
    found: list[Any] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def seen(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        found.append((tuple(query.shape), tuple(key.shape), kwargs["attn_mask"], kwargs["is_causal"]))
        return plain(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    hidden_states(model, lay_out([np.arange(length) for length in LENGTHS], "packed")[0])
    return found


@each("name", ["qwen3", "llama", "qwen3_moe"])
def test_causal_rows_reach_the_kernel_by_length_without_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [
        ((rows, 4, width, 8), (rows, 2, width, 8), None, True) for rows, width in ((2, 50), (3, 9), (1, 4))
    ]  # four query heads on two of keys, which are not repeated
    assert calls(tiny(name), monkeypatch) == 2 * expected  # of two layers


def test_a_window_shorter_than_a_row_masks_pairs_of_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [mask_11WW for _, _, mask_11WW, _ in calls(tiny("mistral"), monkeypatch)]
    assert [tuple(mask_11WW.shape) for mask_11WW in masks] == 2 * [(1, 1, width, width) for width in (50, 9, 4)]
    back_WW = torch.arange(50)[:, None] - torch.arange(50)
    assert torch.equal(masks[0][0, 0], (back_WW >= 0) & (back_WW < 20))


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
def test_rows_of_a_group_are_at_most_twice_as_long_as_one_another(lengths: list[int]) -> None:
    rows = [np.full(length, number) for number, length in enumerate(lengths)]
    groups = _by_length(rows)
    assert sorted(int(row[0]) for group in groups for row in group) == np.flatnonzero(lengths).tolist()
    assert all(len(group[0]) == max(map(len, group)) <= 2 * min(map(len, group)) for group in groups)
    assert all(len(group[0]) > 2 * len(after[0]) for group, after in pairwise(groups))  # so that there are few


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_slot_of_a_row_is_read_from_where_it_was_computed(lengths: list[int]) -> None:
    inputs, _ = lay_out([np.arange(length) for length in lengths], "packed")
    rows = PackedRows.from_paths(inputs.paths, inputs.ids_BL)
    computed_P = torch.cat([slot_RW.flatten() for slot_RW in rows.slots])[rows.read_BL.flatten()]
    bounds = rows.bounds_N.tolist()
    assert rows.longest == max(np.diff(bounds))
    for path in inputs.paths:
        assert computed_P[path].tolist() == path.tolist()
        assert bounds[bounds.index(path[0]) + 1] == path[-1] + 1  # a run of its own


def run_by_run(query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, **kwargs: Any) -> Tensor:
    """Attention as torch documents `varlen_attn`, which runs on GPUs alone."""
    bounds_N, scale = kwargs["cu_seq_q"], kwargs["scale"]
    longest = int(bounds_N.diff().max())
    runs = {"cu_seq_q": bounds_N, "cu_seq_k": bounds_N, "max_q": longest, "max_k": longest}
    assert kwargs == {**runs, "scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    assert bounds_N.dtype == torch.int32
    found = []
    for start, stop in pairwise(bounds_N.tolist()):
        query_HLD, key_HLD, value_HLD = (part[start:stop].transpose(0, 1) for part in (query_PHD, key_PHD, value_PHD))
        out_HLD = torch.nn.functional.scaled_dot_product_attention(
            query_HLD, key_HLD, value_HLD, is_causal=True, scale=scale, enable_gqa=True
        )
        found.append(out_HLD.transpose(0, 1))
    return torch.cat(found)


def test_runs_of_any_length_are_one_call_without_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    on_cpu = Mock(side_effect=run_by_run)
    monkeypatch.setattr(packed, "varlen_attn", on_cpu)
    monkeypatch.setattr(packed, "_fits_varlen", lambda *_, **__: True)
    assert probe_layout(model, "packed")[0] < 1e-5
    assert on_cpu.call_count == 2  # layers
    assert probe_layout(tiny("mistral"), "packed")[0] < 1e-5
    assert on_cpu.call_count == 2  # not under the mask of a window


@each("change", [{"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}])
def test_what_flash_attention_lacks_is_left_to_other_kernels(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    module, query_BHLD, value_BHLD = (
        torch.nn.Module(),
        *torch.zeros(2, 1, 4, 3, 64, dtype=torch.bfloat16, device="meta"),
    )
    assert packed._fits_varlen(module, query_BHLD, value_BHLD, dropout=0.0, is_causal=None, softcap=None)
    assert not packed._fits_varlen(module, query_BHLD, value_BHLD, **change)
    assert not packed._fits_varlen(module, query_BHLD.float(), value_BHLD.float())
    assert not packed._fits_varlen(module, query_BHLD, value_BHLD[..., :32])
    assert not packed._fits_varlen(module, query_BHLD[..., :20], value_BHLD[..., :20])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert not packed._fits_varlen(module, query_BHLD, value_BHLD)


def test_chunks_are_counted_from_the_beginning_of_a_row() -> None:
    """Not from that of the line, as by the mask that transformers makes of packed positions."""
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
    further: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
    model = name_body(made("Llama4Text", **sizes, **heads, **further, attention_chunk_size=20))
    assert set(model.config.layer_types) == {"chunked_attention"}
    assert probe_layout(model, "packed")[0] < 1e-5


def test_without_rows_nothing_is_computed() -> None:
    model = tiny("qwen3")
    with packed_attention_of(model), pytest.raises(TrainingError, match="was called without rows"):
        model(torch.arange(20)[None])
