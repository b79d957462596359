"""Attention along trees and log-probabilities on a GPU, against float64 on the CPU. `T` tokens, `V` vocabulary, `D` hidden."""

import pytest
import torch
from torch import Tensor

from agentrl.policy.layout.tree import TokenTree
from agentrl.policy.layout.tree_attention import TreeLayout
from agentrl.policy.logprobs import fused_logprobs
from tests.policy.test_logprobs import full_logprobs, make_inputs, relative_error
from tests.policy.test_tree_attention import attend, branching, dense, states, with_gradients
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]  # as on a CPU


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 170])
def test_attention_and_its_gradients_equal_dense_masked_attention(
    window: int | None, has_sinks: bool, dtype: torch.dtype, bound: float
) -> None:
    # Segments of 90 to 200 tokens, forks of forks, a small subtree behind a long one, and a second root.
    tree = branching([300, 280, 290, 260, 204, 203, 70, 30], [300, 100, 200, 100, 200, 201, 0, 0])
    inputs = states(tree, heads=4, shared=2, size=32, value_size=32)
    if has_sinks:
        inputs.append(torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_())
    assert_equal(tree, inputs, window=window, dtype=dtype, bound=bound)


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS[:2])
@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (64, 64), (96, 96), (128, 128), (256, 256), (192, 128)])
def test_heads_of_models_that_people_train(size: int, value_size: int, dtype: torch.dtype, bound: float) -> None:
    tree = branching([300, 280, 204], [300, 100, 200])
    inputs = states(tree, heads=4, shared=1, size=size, value_size=value_size)
    assert_equal(tree, inputs, window=None, dtype=dtype, bound=bound)


@pytest.mark.parametrize("length", [1, 2, 16, 127, 128, 129, 257])
def test_trees_of_less_than_a_block_and_of_just_more(length: int) -> None:
    tree = branching([length, max(1, length // 2)], [length, length // 3])
    inputs = states(
        tree, heads=4, shared=2, size=32, value_size=32
    )  # grouped: torch has another kernel for few queries
    assert_equal(tree, inputs, window=None, dtype=torch.float32, bound=1e-5)


def assert_equal(
    tree: TokenTree, inputs: list[Tensor], *, window: int | None, dtype: torch.dtype, bound: float
) -> None:
    expected = with_gradients(dense(tree, *inputs, window=window), inputs)
    cast = [tensor.detach().to("cuda", dtype).requires_grad_() for tensor in inputs]
    output = attend(cast, TreeLayout(tree, device="cuda"), window=window)
    assert output.dtype == dtype
    for found, exactly in zip(with_gradients(output, cast), expected, strict=True):
        largest = max(float(exactly.abs().max()), 1.0)  # scores of what sees itself alone have no gradient
        assert float((found.cpu().double() - exactly).abs().max()) < bound * largest


@pytest.mark.parametrize("chunk_elements", [2**10, 2**21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_those_of_the_full_log_softmax(dtype: torch.dtype, chunk_elements: int) -> None:
    *inputs, targets_T = make_inputs(200, 1000, 64, dtype=dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in inputs]
    expected = full_logprobs(exact[0], exact[1], targets_T, exact[2], 0.7)
    found = fused_logprobs(
        on_gpu[0], on_gpu[1], targets_T.cuda(), bias_V=on_gpu[2], temperature=0.7, chunk_elements=chunk_elements
    )
    weight_T = torch.linspace(-1, 1, 200, dtype=torch.float64)
    (expected[0] * weight_T).sum().backward()
    (found[0] * weight_T.cuda().float()).sum().backward()
    assert found[0].dtype == torch.float32  # and no logit is rounded to half precision
    for got, exactly in zip(found, expected, strict=True):
        assert relative_error(got.cpu(), exactly) < 1e-5
    for got, exactly in zip(on_gpu, exact, strict=True):
        assert got.grad is not None
        bound = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        assert relative_error(got.grad.cpu(), exactly.grad) < bound


def test_under_autocast_weights_are_rounded_and_logits_are_not() -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(200, 1000, 64, dtype=torch.float32)
    expected_T, _ = full_logprobs(hidden_TD.bfloat16().double(), weight_VD.bfloat16().double(), targets_T, None, 1.0)
    with torch.autocast("cuda", torch.bfloat16):
        found_T, _ = fused_logprobs(hidden_TD.cuda().bfloat16(), weight_VD.cuda(), targets_T.cuda())
    assert relative_error(found_T.cpu(), expected_T) < 1e-5
