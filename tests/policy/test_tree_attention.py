"""Tree attention against softmax attention under a dense mask."""

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.policy.layout import tree_attention as module
from agentrl.policy.layout.tree import TokenTree, plan_tree
from agentrl.policy.layout.tree_attention import TreeLayout, tree_attention
from tests.support.each import each

SCALE = 0.3


def planned(rows: list[list[int]]) -> TokenTree:
    return plan_tree([np.array(row, dtype=np.int64) for row in rows])


def branching(lengths: list[int], forks: list[int]) -> TokenTree:
    """Rows of given lengths, each of which leaves the first one at a given depth."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, size=length) for length in lengths]
    for row, fork in zip(rows, forks, strict=True):
        row[:fork] = rows[0][:fork]
    return plan_tree(rows)


def states(tree: TokenTree, *, heads: int, shared: int, size: int = 8, value_size: int = 8) -> list[Tensor]:
    """Query, key and value in float64, laid out as transformers lays them out."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tree.num_tokens, *shape, dtype=torch.float64, generator=generator).transpose(0, 1).requires_grad_()
        for shape in ((heads, size), (shared, size), (shared, value_size))
    ]


def dense(
    tree: TokenTree,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None = None,
    *,
    window: int | None = None,
) -> Tensor:
    """Attention with keys and values copied for each head, masked by walks from each token to its root."""
    parent = {}
    for segment, (start, stop) in enumerate(zip(tree.start_S.tolist(), tree.stop_S.tolist(), strict=True)):
        above = tree.parent_S[segment]
        parent.update({i: i - 1 for i in range(start + 1, stop)})
        parent[start] = -1 if above < 0 else int(tree.stop_S[above]) - 1
    mask = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.bool)
    for i in range(tree.num_tokens):
        j, distance = i, 0
        while j >= 0 and (window is None or distance < window):
            mask[i, j] = True
            j, distance = parent[j], distance + 1
    copies = query.shape[0] // key.shape[0]
    scores = SCALE * query @ key.repeat_interleave(copies, 0).transpose(1, 2)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, tree.num_tokens, 1)], dim=-1)
    return scores.softmax(-1)[..., : tree.num_tokens] @ value.repeat_interleave(copies, 0)


def attend(inputs: list[Tensor], layout: TreeLayout, *, window: int | None = None) -> Tensor:
    query, key, value, *sinks = inputs
    return tree_attention(query, key, value, layout, scale=SCALE, window=window, sinks_H=sinks[0] if sinks else None)


def with_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and gradients of a sum with random weights."""
    weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad(output, inputs, weights.to(output))]


def largest_errors(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Largest difference of each pair of tensors, over the largest entry of the expected one."""
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(got, expected, strict=True)]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    window=st.sampled_from([None, 1, 2, 5, 100]),
    max_masked=st.sampled_from([0, 6, 64]),
    has_sinks=st.booleans(),
)
@example(rows=[[0] * 12, [0] * 6 + [1] * 6], heads=(4, 2), window=4, max_masked=0, has_sinks=True)
def test_output_and_gradients_equal_dense_masked_attention(
    rows: list[list[int]], heads: tuple[int, int], window: int | None, max_masked: int, has_sinks: bool
) -> None:
    tree = planned(rows)
    inputs = states(tree, heads=heads[0], shared=heads[1])
    if has_sinks:
        inputs.append(torch.linspace(-1, 2, heads[0], dtype=torch.float64).requires_grad_())
    layout = TreeLayout(tree, max_masked=max_masked)
    got = with_gradients(attend(inputs, layout, window=window), inputs)
    for a, b in zip(got, with_gradients(dense(tree, *inputs, window=window), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@each("window", [None, 40, 90, 170, 1000])
def test_long_segments_equal_dense_masked_attention(window: int | None) -> None:
    # Segments of 90 to 200 tokens, forks of forks, a small subtree behind a long one, and a second root.
    tree = branching([300, 280, 290, 260, 204, 203, 70, 30], [300, 100, 200, 100, 200, 201, 0, 0])
    inputs = states(tree, heads=4, shared=2)
    got = with_gradients(attend(inputs, TreeLayout(tree), window=window), inputs)
    expected = with_gradients(dense(tree, *inputs, window=window), inputs)
    assert max(largest_errors(got, expected)) < 1e-9
    halves = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]  # a few roundings of 4e-3 and 5e-4
    for dtype, bound in halves:
        cast = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        output = attend(cast, TreeLayout(tree), window=window)
        assert output.dtype == dtype
        assert max(largest_errors(with_gradients(output, cast), expected)) < bound


def test_every_visible_pair_is_in_one_block() -> None:
    tree = branching([300, 280, 290, 260, 204, 203, 70, 30], [300, 100, 200, 100, 200, 201, 0, 0])
    for window in (None, 1, 40, 170, 1000):
        layout = TreeLayout(tree)
        whole = slice(0, tree.num_tokens)
        counted = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.int64)
        for block in layout.blocks(window):
            pairs = layout.visible(block.queries, block.keys, window)
            if not block.masked:  # what the kernel computes without a mask is what is visible
                assert torch.equal(pairs, torch.ones_like(pairs).tril() if block.causal else torch.ones_like(pairs))
            counted[block.queries, block.keys] += pairs
        assert torch.equal(counted, layout.visible(whole, whole, window).long())


def test_shared_tokens_are_computed_once() -> None:
    # By hand: a trunk of 100 tokens, 3 leaves of 200. Causal squares 100^2 + 3 200^2, and 600 queries on 100 keys.
    tree = branching([300, 300, 300], [300, 100, 100])
    blocks = TreeLayout(tree).blocks(None)
    pairs = [(b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in blocks]
    assert sum(pairs) == 100**2 + 3 * 200**2 + 600 * 100
    assert len(blocks) == 5


def test_many_tiny_branches_are_few_blocks() -> None:
    tree = planned([[0, *divmod(number, 16)] for number in range(200)])
    assert tree.num_tokens == 1 + 13 + 200
    # A root on itself and under 213 tokens; 13 nodes, each on itself and under its leaves; the leaves.
    assert len(TreeLayout(tree, max_masked=0).blocks(None)) == 2 + 2 * 13 + 200
    # The root, as before; 12 subtrees of 17 tokens, three to 64, of which the last three leave room for one of 9.
    assert len(TreeLayout(tree, max_masked=64).blocks(None)) == 2 + 4


def test_a_gradient_without_memory_of_its_own_is_read_right() -> None:
    tree = branching([150, 120], [150, 70])
    inputs = states(tree, heads=4, shared=2)
    got = torch.autograd.grad(attend(inputs, TreeLayout(tree)).sum(), inputs)
    expected = torch.autograd.grad(dense(tree, *inputs).sum(), inputs)
    assert max(largest_errors(list(got), list(expected))) < 1e-9


@pytest.mark.parametrize(("size", "value_size"), [(8, 6), (6, 8)])
def test_values_may_have_a_size_of_their_own(size: int, value_size: int) -> None:
    tree = branching([150, 120], [150, 70])
    inputs = states(tree, heads=4, shared=2, size=size, value_size=value_size)
    got = with_gradients(attend(inputs, TreeLayout(tree)), inputs)
    assert max(largest_errors(got, with_gradients(dense(tree, *inputs), inputs))) < 1e-9


def test_large_scores_do_not_overflow() -> None:
    tree = branching([150, 120], [150, 70])
    inputs = [tensor.detach().float().mul(40).requires_grad_() for tensor in states(tree, heads=4, shared=2)]
    got = with_gradients(attend(inputs, TreeLayout(tree)), inputs)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = with_gradients(dense(tree, *doubles), doubles)
    # Scores near 2,000 are known to 1e-4 in float32, and so are the weights that they give.
    assert max(largest_errors(got, expected)) < 1e-3


def test_an_empty_tree_gives_an_empty_output() -> None:
    tree = planned([])
    inputs = states(tree, heads=4, shared=2)
    output = attend(inputs, TreeLayout(tree))
    assert output.shape == (4, 0, 8)
    output.sum().backward()
    assert inputs[1].grad is not None
    assert inputs[1].grad.shape == (2, 0, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each("sinks_H", [None, torch.linspace(-1, 2, 4, dtype=torch.float64)])
@each("window", [None, 40])
def test_the_mask_for_gpus_shows_the_same_pairs(
    window: int | None, sinks_H: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU FlexAttention has no backward pass, and is not compiled here.
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(module, "_compiled_flex_attention", lambda *kind: flex_attention)
    tree = branching([150, 140, 130], [150, 70, 100])
    query, key, value = (tensor.detach() for tensor in states(tree, heads=4, shared=2))
    flex: Any = module._flex_attention
    got = flex(query, key, value, TreeLayout(tree), scale=SCALE, window=window, sinks_H=sinks_H)
    torch.testing.assert_close(got, dense(tree, query, key, value, sinks_H, window=window), rtol=1e-9, atol=1e-12)


@each(
    ("shapes", "dtypes", "window", "words"),
    [
        ([(4, 3, 8), (2, 4, 8), (2, 4, 8)], "fff", None, r"shape \(heads, 4, size\), got \[\(4, 3, 8\)"),
        ([(1, 4, 4, 8), (2, 4, 8), (2, 4, 8)], "fff", None, r"shape \(heads, 4, size\)"),
        ([(3, 4, 8), (2, 4, 8), (2, 4, 8)], "fff", None, "H a multiple of Y"),
        ([(4, 4, 8), (2, 4, 6), (2, 4, 8)], "fff", None, "H a multiple of Y"),
        ([(4, 4, 8), (2, 4, 8), (1, 4, 8)], "fff", None, "H a multiple of Y"),
        ([(4, 4, 8), (2, 4, 8), (2, 4, 8)], "ffb", None, "one floating-point dtype"),
        ([(4, 4, 8), (2, 4, 8), (2, 4, 8)], "fff", 0, "a window of at least 1 token, got 0"),
    ],
)
def test_wrong_inputs_are_refused(shapes: list[tuple[int, ...]], dtypes: str, window: int | None, words: str) -> None:
    kinds = {"f": torch.float32, "b": torch.bfloat16}
    tensors = [torch.zeros(shape, dtype=kinds[kind]) for shape, kind in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=words):
        attend(tensors, TreeLayout(planned([[1, 2, 3], [1, 4]])), window=window)


@each("window", [None, 40, 200])
@each(
    ("lengths", "forks"),
    [
        ([700], [0]),
        ([500, 400, 450], [0, 130, 300]),
        ([128, 256, 300, 50], [0, 128, 100, 7]),
        ([130, 20, 700], [0, 0, 0]),
    ],
)
def test_flex_blocks_hold_every_visible_pair_and_whole_blocks_hold_no_other(
    window: int | None, lengths: list[int], forks: list[int]
) -> None:
    tree = branching(lengths, forks)
    layout, num = TreeLayout(tree), tree.num_tokens
    visible = layout.visible(slice(0, num), slice(0, num), window)
    padded = (
        torch.nn.functional.pad(visible, (0, -num % 128, 0, -num % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    )
    expected_some, expected_all = padded.amax((1, 3)), padded.amin((1, 3))
    mask = layout.flex_mask(window)
    whole = mask.full_kv_num_blocks[0, 0]
    found_some, found_all = (torch.zeros_like(expected_some) for _ in range(2))
    for row, (count, full) in enumerate(zip(mask.kv_num_blocks[0, 0].tolist(), whole.tolist(), strict=True)):
        found_some[row, mask.kv_indices[0, 0, row, :count].long()] = True
        found_all[row, mask.full_kv_indices[0, 0, row, :full].long()] = True
    assert torch.equal(found_all, expected_all)
    assert not (found_some & found_all).any()
    # Depths of a block are between the least and the largest: a window may keep a block of which it hides every pair.
    missed = expected_some & ~(found_some | found_all)
    assert not missed.any()
    if window is None:
        assert torch.equal(found_some | found_all, expected_some)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compiles, whatever vLLM has set in this process."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
def test_compiled_flex_attention_is_attention_along_the_tree() -> None:
    """On a CPU torch compiles the forward pass alone; it reads the lists of blocks, as a GPU does."""
    tree = branching([500, 400, 450], [0, 130, 300])
    query, key, value = (state.detach().float() for state in states(tree, heads=4, shared=2, size=32, value_size=32))
    with torch.no_grad():
        got = module._flex_attention(query, key, value, TreeLayout(tree), scale=SCALE, window=200, sinks_H=None)
        expected = tree_attention(query, key, value, TreeLayout(tree), scale=SCALE, window=200)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def compiled(compiler: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What torch has compiled, which runs as it is: no compiler takes its time."""
    from torch._dynamo import reset

    graphs: list[Any] = []

    def as_it_is(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=as_it_is))
    module._compiled_flex_attention.cache_clear()
    yield graphs
    module._compiled_flex_attention.cache_clear()
    reset()


def attend_by_flex(length: int, *, window: int | None, dtype: torch.dtype, has_gradient: bool) -> None:
    tree = branching([length], [0])
    query, key, value = (state.detach().to(dtype) for state in states(tree, heads=4, shared=2))
    with torch.set_grad_enabled(has_gradient):  # inputs that require one are refused on a CPU
        module._flex_attention(query, key, value, TreeLayout(tree), scale=SCALE, window=window, sinks_H=None)


@pytest.mark.slow
def test_no_run_recompiles_flex_attention_more_often_than_torch_lets_it(compiled: list[Any]) -> None:
    """Lengths of the probe, the proof, rows that are scored and trained, short ones and empty passes, in any order."""
    kinds = [
        (None, torch.float32, True),
        (None, torch.float32, False),
        (64, torch.float32, True),
        (64, torch.half, True),
    ]
    for length in (416, 300, 32, 1, 129):
        for window, dtype, has_gradient in kinds:
            attend_by_flex(length, window=window, dtype=dtype, has_gradient=has_gradient)
    assert len(kinds) < len(compiled) <= 4 * len(kinds)


def test_attention_that_torch_would_not_compile_again_ends_the_run(compiled: list[Any]) -> None:
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    with config.patch(recompile_limit=1):
        attend_by_flex(300, window=None, dtype=torch.float32, has_gradient=True)
        with pytest.raises(FailOnRecompileLimitHit):
            attend_by_flex(1, window=None, dtype=torch.float32, has_gradient=True)
    assert len(compiled) == 1
