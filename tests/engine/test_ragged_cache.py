"""`S` rows, `B` rows of a pass, `Q` queries, `H` heads, `L` cached positions, `D` head size."""

from typing import Any

import torch

from agentrl.engine.transformers.cache import RaggedCache

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


def states(*rows: list[float]) -> torch.Tensor:
    """Return [B, 1, Q, 1] states."""
    return torch.tensor(rows)[:, None, :, None]


def write(cache: RaggedCache, rows: list[int], starts: list[int], *values: list[float], layer: int = 0) -> Any:
    """Write keys, and values that are their negatives; return what the pass attends to, [B, L] each."""
    cache.select(rows, starts, len(values[0]), **CPU)
    keys_BHLD, values_BHLD = cache.update(states(*values), -states(*values), layer)
    assert torch.equal(values_BHLD, -keys_BHLD)
    return keys_BHLD[:, 0, :, 0].tolist()


def test_rows_of_different_lengths_grow_independently() -> None:
    cache = RaggedCache(4)
    write(cache, [2, 0], [0, 0], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    # Row 0 keeps two of its three positions, row 2 all of them; each gets one more behind what it keeps.
    assert write(cache, [0, 2], [2, 3], [7.0], [8.0]) == [[4.0, 5.0, 7.0, 0.0], [1.0, 2.0, 3.0, 8.0]]
    # The leading rows alone are a view without a copy: the same numbers.
    assert write(cache, [0], [3], [9.0]) == [[4.0, 5.0, 7.0, 9.0]]
    assert write(cache, [2], [4], [9.5]) == [[1.0, 2.0, 3.0, 8.0, 9.5]]


def test_the_mask_shows_each_query_its_own_past_alone() -> None:
    selection = RaggedCache(2).select([1, 0], [2, 0], 2, **CPU)
    assert selection["position_ids"].tolist() == [[2, 3], [0, 1]]
    visible = (selection["attention_mask"] == 0).int().tolist()
    assert visible == [[[[1, 1, 1, 0], [1, 1, 1, 1]]], [[[1, 0, 0, 0], [1, 1, 0, 0]]]]
    assert set(selection["attention_mask"].unique().tolist()) == {0.0, torch.finfo(torch.float32).min}


def test_what_is_cached_survives_growth() -> None:
    cache = RaggedCache(2)
    expected: list[float] = []
    for position in range(300):
        expected.append(float(position))
        found = write(cache, [1], [position], [float(position)])
    assert found == [expected]
    assert write(cache, [0], [0], [5.0]) == [[5.0]]


def test_no_room_is_made_for_more_than_the_longest_row() -> None:
    cache = RaggedCache(2, max_length=200)
    for position in range(200):
        write(cache, [0], [position], [float(position)])
        (keys_RYLD,) = cache._keys_RYLD.values()
        assert keys_RYLD.shape[2] <= 256  # in blocks of 64; by a half each time it would be 320
    assert keys_RYLD.shape[2] == 256


def test_layers_are_kept_apart() -> None:
    cache = RaggedCache(1)
    cache.select([0], [0], 1, **CPU)
    for layer in range(3):
        cache.update(states([float(layer)]), -states([float(layer)]), layer)
    cache.select([0], [1], 1, **CPU)
    for layer in range(3):
        keys_BHLD, _ = cache.update(states([9.0]), -states([9.0]), layer)
        assert keys_BHLD[0, 0, :, 0].tolist() == [float(layer), 9.0]


def test_the_length_is_that_of_the_longest_row_of_the_pass() -> None:
    cache = RaggedCache(3)
    cache.select([0, 1], [5, 2], 4, **CPU)
    assert cache.get_seq_length() == 9
