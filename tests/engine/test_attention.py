"""Grouped attention against keys and values repeated for each query head."""

import pytest
import torch

from agentrl.engine.attention import grouped_attention
from agentrl.errors import EngineError


def repeated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention written out, head by head."""
    heads = query.shape[1]
    group = heads // key.shape[1]
    outputs = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // group].transpose(1, 2) * scale
        weights = scores.masked_fill(~mask[:, 0], -torch.inf).softmax(-1)
        outputs.append(weights @ value[:, head // group])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 4), (4, 1)])
def test_shared_keys_need_no_copies(queries: int, heads: int, shared: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, heads, queries, 8, dtype=torch.float64)
    key, value = torch.randn(2, 3, shared, 11, 8, dtype=torch.float64)
    mask = torch.rand(3, 1, queries, 11) < 0.6
    mask[..., 0] = True
    output, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, repeated(query, key, value, mask, 0.3), rtol=1e-12, atol=1e-14)


def test_without_a_mask_attention_is_causal() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 5, 8, dtype=torch.float64)
    causal = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    output, _ = grouped_attention(torch.nn.Identity(), query, key, value, None, scaling=0.5)
    torch.testing.assert_close(output, repeated(query, key, value, causal, 0.5), rtol=1e-12, atol=1e-14)


def test_attention_that_does_more_than_a_masked_softmax_is_refused() -> None:
    states = torch.randn(1, 2, 1, 4)
    with pytest.raises(EngineError, match="softcap"):
        grouped_attention(torch.nn.Identity(), states, states, states, None, softcap=30.0)
