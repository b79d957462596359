"""Grouped attention against keys and values repeated for each query head."""

import pytest
import torch

from agentrl.engine.transformers.cache import grouped_attention
from agentrl.errors import EngineError
from tests.support.each import each


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


@each("queries", [1, 5])
@each(("heads", "shared"), [(6, 2), (4, 4), (4, 1)])
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


@each("queries", [1, 5])
@each("window", [3, 50])
def test_a_sliding_window_hides_what_lies_before_it(queries: int, window: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, queries, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 11, 8, dtype=torch.float64)
    own = torch.tensor([10 - queries, 5])[:, None] + torch.arange(queries)  # rows of different lengths
    distance = own[:, None, :, None] - torch.arange(11)
    causal = torch.zeros(2, 1, queries, 11, dtype=torch.float64).masked_fill(distance < 0, -1e300)
    seen = (distance >= 0) & (distance < window)
    output, _ = grouped_attention(torch.nn.Identity(), query, key, value, causal, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(output, repeated(query, key, value, seen, 0.3), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("queries", [1, 5])
def test_sinks_take_their_share_of_the_softmax(queries: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 6, queries, 8, dtype=torch.float64)
    key, value = torch.randn(2, 3, 2, 11, 8, dtype=torch.float64)
    sinks = torch.randn(6, dtype=torch.float64)
    mask = torch.rand(3, 1, queries, 11) < 0.6
    mask[..., 0] = True
    # The sink as one more key: of no value, and with this score, since only its last coordinate meets the query's.
    with_one = torch.nn.functional.pad(query, (0, 1), value=1.0)
    keys = torch.nn.functional.pad(key.repeat_interleave(3, 1), (0, 1, 0, 1))
    keys[..., -1, -1] = sinks / 0.3
    values = torch.nn.functional.pad(value.repeat_interleave(3, 1), (0, 0, 0, 1))
    expected = repeated(with_one, keys, values, torch.nn.functional.pad(mask, (0, 1), value=True), 0.3)
    output, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3, s_aux=sinks)
    # The share is taken in float32, as the model's own softmax is.
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_attention_that_does_more_than_a_masked_softmax_is_refused() -> None:
    states = torch.randn(1, 2, 1, 4)
    with pytest.raises(EngineError, match="softcap"):
        grouped_attention(torch.nn.Identity(), states, states, states, None, softcap=30.0)
