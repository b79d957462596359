"""The token tree against a trie made of dictionaries."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.policy.layout.tree import IntArray, TokenTree, plan_tree
from tests.support.each import each

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=8)


def planned(rows: list[list[int]]) -> TokenTree:
    return plan_tree([np.array(row, dtype=np.int64) for row in rows])


def paths(tree: TokenTree, rows: list[list[int]]) -> list[list[int]]:
    """Tokens of the tree behind each row."""
    return [tree.index(np.full(len(row), r), np.arange(len(row))).tolist() for r, row in enumerate(rows)]


def trie_of(rows: list[list[int]]) -> dict[int, Any]:
    root: dict[int, Any] = {}
    for row in rows:
        node = root
        for token in row:
            node = node.setdefault(token, {})
    return root


def trie_size(node: dict[int, Any]) -> int:
    return sum(1 + trie_size(child) for child in node.values())


def longest_runs(node: dict[int, Any]) -> int:
    """Number of runs of tokens without a fork, each as long as can be."""
    runs = 0
    for child in node.values():
        while len(child) == 1:
            (child,) = child.values()
        runs += 1 + longest_runs(child)
    return runs


def test_a_tree_derived_by_hand() -> None:
    # 1 2 +- 3 +- 4        laid out as  1 2 3 4 6 5 9
    #     |    +- 6
    #     +- 5
    # 9
    tree = planned([[1, 2, 3, 4], [1, 2, 5], [9], [1, 2, 3, 6]])
    assert tree.ids_P.tolist() == [1, 2, 3, 4, 6, 5, 9]
    assert tree.depth_P.tolist() == [0, 1, 2, 3, 3, 2, 0]
    assert tree.start_S.tolist() == [0, 2, 3, 4, 5, 6]
    assert tree.stop_S.tolist() == [2, 3, 4, 5, 6, 7]
    assert tree.subtree_stop_S.tolist() == [6, 5, 4, 5, 6, 7]
    assert tree.parent_S.tolist() == [-1, 0, 1, 1, 0, -1]
    assert tree.attention_cost == 1 + 2 + 3 + 4 + 4 + 3 + 1
    assert tree.index(np.array([3, 0, 1, 2]), np.array([3, 3, 2, 0])).tolist() == [4, 3, 5, 6]


def test_a_row_that_only_continues_another_adds_no_segment() -> None:
    tree = planned([[1, 2], [1, 2, 3, 4], [], [1, 2]])
    assert tree.ids_P.tolist() == [1, 2, 3, 4]
    assert (tree.start_S.tolist(), tree.stop_S.tolist(), tree.subtree_stop_S.tolist()) == ([0], [4], [4])


def test_ids_sort_as_numbers() -> None:
    assert planned([[256], [2**31 - 1], [1], [65536]]).ids_P.tolist() == [1, 256, 65536, 2**31 - 1]


@given(ROWS)
@example([])
@example([[]])
@example([[1, 1], [1, 1], [1]])
def test_tokens_and_positions_reproduce_every_row(rows: list[list[int]]) -> None:
    tree = planned(rows)
    for row, path in zip(rows, paths(tree, rows), strict=True):
        assert tree.ids_P[path].tolist() == row
        assert tree.depth_P[path].tolist() == list(range(len(row)))


@given(ROWS)
def test_a_shared_token_appears_once(rows: list[list[int]]) -> None:
    tree = planned(rows)
    assert tree.num_tokens == trie_size(trie_of(rows))
    assert {token for path in paths(tree, rows) for token in path} == set(range(tree.num_tokens))


@given(ROWS)
def test_a_token_sees_its_own_path_and_nothing_else(rows: list[list[int]]) -> None:
    tree = planned(rows)
    subtree_stop_P = np.repeat(tree.subtree_stop_S, tree.stop_S - tree.start_S)
    visible = 0
    for path in paths(tree, rows):
        for depth, i in enumerate(path):
            assert [j for j in range(tree.num_tokens) if j <= i < subtree_stop_P[j]] == path[: depth + 1]
    for i in range(tree.num_tokens):
        visible += sum(j <= i < subtree_stop_P[j] for j in range(tree.num_tokens))
    assert tree.attention_cost == visible


@given(ROWS)
def test_segments_are_the_longest_runs_without_a_fork(rows: list[list[int]]) -> None:
    tree = planned(rows)
    assert len(tree.start_S) == longest_runs(trie_of(rows))
    assert (tree.start_S < tree.stop_S).all()
    assert [0, *tree.stop_S.tolist()] == [*tree.start_S.tolist(), tree.num_tokens]
    parent_P = {path[d]: path[d - 1] if d else -1 for path in paths(tree, rows) for d in range(len(path))}
    for start, stop, parent in zip(tree.start_S, tree.stop_S, tree.parent_S, strict=True):
        assert [parent_P[i] for i in range(start + 1, stop)] == list(range(start, stop - 1))
        assert parent_P[start] == (-1 if parent < 0 else tree.stop_S[parent] - 1)


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_only_the_index(rows: list[list[int]], random: Any) -> None:
    order = random.sample(range(len(rows)), len(rows))
    tree, other = planned(rows), planned([rows[r] for r in order])
    assert tree.ids_P.tolist() == other.ids_P.tolist()
    assert tree.subtree_stop_S.tolist() == other.subtree_stop_S.tolist()
    assert [paths(tree, rows)[r] for r in order] == paths(other, [rows[r] for r in order])


@each(
    ("row", "position", "words"),
    [
        (1, 2, "row 1 has 2 tokens, and was asked for position 2"),
        (0, -1, "row 0 has 3 tokens, and was asked for position -1"),
        (2, 0, r"expected rows in 0\.\.1, got 2\.\.2"),
        (-1, 0, r"expected rows in 0\.\.1, got -1\.\.-1"),
    ],
)
def test_what_lies_outside_of_a_row_is_refused(row: int, position: int, words: str) -> None:
    with pytest.raises(IndexError, match=words):
        planned([[1, 2, 3], [1, 4]]).index(np.array([row]), np.array([position]))


@each(
    ("row", "words"),
    [
        (np.zeros((2, 2), dtype=np.int64), r"got int64 of \(2, 2\) as row 1"),
        (np.zeros(2), r"got float64 of \(2,\) as row 1"),
        (np.array([3, -1]), r"got -1\.\.3 in row 1"),
        (np.array([2**31]), r"got 2147483648\.\.2147483648 in row 1"),
    ],
)
def test_rows_that_are_no_token_ids_are_refused(row: IntArray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_tree([np.array([1]), row])


@each("rows", [[], [[]], [[3, 4], [3, 5]]])
def test_all_columns_are_integers(rows: list[list[int]]) -> None:
    tree = planned(rows)
    columns = {name: getattr(tree, name).dtype for name in TokenTree.__dataclass_fields__}
    assert set(columns.values()) == {np.dtype(np.int64)}, columns
