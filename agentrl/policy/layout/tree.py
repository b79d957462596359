"""Rows that share prefixes as one tree of tokens, in which each shared token appears once.

`R` rows, `W` tokens of all rows with repetition, `P` tokens of the tree, `S` segments, `Q` queried tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTree:
    """A forest of tokens in depth-first order, cut into segments: the longest runs without a fork.

    Token j is visible to token i, which is to say that j is i or one of its ancestors, exactly if

        j <= i < subtree_stop[segment of j]
    """

    ids_P: IntArray
    """Token ids."""
    depth_P: IntArray
    """Position of each token in the rows that hold it, from 0."""
    start_S: IntArray
    """First token of each segment; segments lie one behind the other and leave no gap."""
    stop_S: IntArray
    """One past the last token of each segment."""
    subtree_stop_S: IntArray
    """One past the last token that descends from the segment; equal to `stop_S` for leaves."""
    parent_S: IntArray
    """Segment that each segment continues; -1 for roots."""
    row_start_R: IntArray
    """Start of each row in `token_W`; one more entry at the end."""
    token_W: IntArray
    """Token of the tree behind each token of the rows, row by row."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, each shared one counted once."""
        return len(self.ids_P)

    @property
    def paths(self) -> list[IntArray]:
        """The tokens of each row."""
        return np.split(self.token_W, self.row_start_R[1:-1])

    @property
    def attention_cost(self) -> int:
        """Number of (query, key) pairs of one head: the sum over tokens of depth + 1."""
        return int(self.depth_P.sum()) + len(self.depth_P)

    def index(self, row_Q: IntArray, position_Q: IntArray) -> IntArray:
        """Return the tokens of the tree at (row, position) pairs.

        Raises:
            IndexError: for a row that does not exist, or a position outside of its row.
        """
        if len(row_Q) and not (row_Q.min() >= 0 and row_Q.max() < len(self.row_start_R) - 1):
            raise IndexError(f"expected rows in 0..{len(self.row_start_R) - 2}, got {row_Q.min()}..{row_Q.max()}")
        token_Q = self.row_start_R[row_Q] + position_Q
        outside_Q = (position_Q < 0) | (token_Q >= self.row_start_R[row_Q + 1])
        if outside_Q.any():
            first = int(outside_Q.argmax())
            length = int(np.diff(self.row_start_R)[row_Q[first]])
            raise IndexError(f"row {row_Q[first]} has {length} tokens, and was asked for position {position_Q[first]}")
        index_Q: IntArray = self.token_W[token_Q]
        return index_Q


def plan_tree(rows: Sequence[IntArray]) -> TokenTree:
    """Lay rows of token ids out as a tree in depth-first order, siblings by token id.

    Rows are sorted, and each adds what lies beyond its common prefix with the row before. Of two rows, the common
    prefix is the least of those of the neighbours between them; so a token at depth d of row r has as descendants what
    is added until the first later row whose common prefix ends at d or before, and a stack of rows finds it. Rows may
    repeat, be prefixes of others, or be empty.

    Raises:
        ValueError: for rows that are no 1-D arrays of signed integers from 0 to 2^31 - 1.
    """
    _check(rows)
    # Big-endian numbers compare as their bytes do, so that Python's sort compares whole rows by memcmp.
    keys = [row.astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    sorted_rows = [rows[r] for r in order]
    shared_R = np.array([0, *(common_prefix(*pair) for pair in pairwise(sorted_rows))][: len(rows)], dtype=np.int64)
    length_R = np.array([len(row) for row in sorted_rows], dtype=np.int64)
    offset_R = _starts(length_R - shared_R)
    start_S, subtree_stop_S = _segments(shared_R.tolist(), length_R.tolist(), offset_R.tolist())
    num_tokens = int(offset_R[-1])
    row_start_R = _starts(np.array([len(row) for row in rows], dtype=np.int64))
    token_W = np.empty(row_start_R[-1], dtype=np.int64)
    path = np.empty(0, dtype=np.int64)
    for r, shared, start, stop in zip(order, shared_R, offset_R, offset_R[1:], strict=False):
        path = np.concatenate([path[:shared], np.arange(start, stop)])
        token_W[row_start_R[r] : row_start_R[r + 1]] = path
    added = [slice(shared, None) for shared in shared_R]
    return TokenTree(
        ids_P=_joined([row[new] for row, new in zip(sorted_rows, added, strict=True)]),
        depth_P=_joined([np.arange(len(row))[new] for row, new in zip(sorted_rows, added, strict=True)]),
        start_S=start_S,
        stop_S=np.append(start_S, num_tokens)[1:],
        subtree_stop_S=subtree_stop_S,
        parent_S=_parents(start_S.tolist(), subtree_stop_S.tolist()),
        row_start_R=row_start_R,
        token_W=token_W,
    )


def _segments(shared: list[int], length: list[int], offset: list[int]) -> tuple[IntArray, IntArray]:
    """Return the starts of segments and the stops of their subtrees, from the last row to the first.

    The stack holds the later rows, nearest on top, that share no more with the row before them than all rows in between:
    (common prefix, first token added). What a row shares with the row before it ends the subtrees of all deeper tokens.
    """
    pieces: list[tuple[int, int]] = []
    stack = [(-1, offset[-1])]
    for r in reversed(range(len(shared))):
        stop = length[r]  # one past the depths of this row that are not yet in a piece
        while stop > shared[r]:
            depth, subtree_stop = stack[-1]
            start = max(depth, shared[r])
            if start < stop:
                pieces.append((offset[r] + start - shared[r], subtree_stop))
            stop = start
            if depth >= shared[r]:
                stack.pop()
        stack.append((shared[r], offset[r]))
    start_S, subtree_stop_S = np.array(pieces[::-1], dtype=np.int64).reshape(-1, 2).T
    # A row that continues where the one before it ended, and is alone in that, continues its segment.
    first_S = np.diff(subtree_stop_S, prepend=-1) != 0
    return start_S[first_S], subtree_stop_S[first_S]


def _parents(start: list[int], subtree_stop: list[int]) -> IntArray:
    parents, path = [], [-1]
    for s, begin in enumerate(start):
        while path[-1] >= 0 and subtree_stop[path[-1]] <= begin:
            path.pop()
        parents.append(path[-1])
        path.append(s)
    return np.array(parents, dtype=np.int64)


def common_prefix(left: IntArray, right: IntArray) -> int:
    """Return the length of the common prefix of two sequences."""
    both = min(len(left), len(right))
    differs = left[:both] != right[:both]
    return int(differs.argmax()) if differs.any() else both


def _starts(lengths: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _check(rows: Sequence[IntArray]) -> None:
    for number, row in enumerate(rows):
        if row.ndim != 1 or row.dtype.kind != "i":
            raise ValueError(
                f"expected rows as 1-D arrays of signed integers, got {row.dtype} of {row.shape} as row {number}"
            )
        if len(row) and not (row.min() >= 0 and row.max() < 2**31):
            raise ValueError(f"expected token ids in 0..2^31 - 1, got {row.min()}..{row.max()} in row {number}")
