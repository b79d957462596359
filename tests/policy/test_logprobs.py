"""`fused_logprobs` against the full log-softmax. `T` tokens, `V` vocabulary, `D` hidden."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.models.logits import LogitMap
from agentrl.policy.logprobs import fused_logprobs
from tests.support.each import each

torch.set_num_threads(1)
LINEAR = LogitMap()


def make_inputs(
    num_tokens: int, vocabulary: int, hidden: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden_TD, weight_VD, bias_V (leaves that need gradients) and targets_T."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets_T = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return normal(num_tokens, hidden), normal(vocabulary, hidden), normal(vocabulary), targets_T


def full_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None,
    temperature: float,
    behind: LogitMap = LINEAR,
) -> tuple[Tensor, Tensor]:
    """Hold all of the logits."""
    logits_TV = hidden_TD @ weight_VD.T
    if bias_V is not None:
        logits_TV = logits_TV + bias_V
    logprobs_TV = (behind(logits_TV) / temperature).log_softmax(-1)
    return logprobs_TV[torch.arange(len(targets_T)), targets_T], -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def relative_error(got: Tensor | None, expected: Tensor | None) -> float:
    assert got is not None
    assert expected is not None
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(1, 13),
    vocabulary=st.integers(1, 29),
    chunk_elements=st.sampled_from([1, 2, 7, 16, 50, 200, 10**6]),
    temperature=st.sampled_from([0.6, 1.0, 1.5]),
    with_bias=st.booleans(),
    behind=st.builds(LogitMap, factor=st.sampled_from([1.0, 0.25, 3.0]), cap=st.sampled_from([None, 1.5, 30.0])),
    seed=st.integers(0, 999),
)
def test_values_entropy_and_gradients_equal_the_full_log_softmax(
    num_tokens: int,
    vocabulary: int,
    chunk_elements: int,
    temperature: float,
    with_bias: bool,
    behind: LogitMap,
    seed: int,
) -> None:
    hidden_TD, weight_VD, all_bias_V, targets_T = make_inputs(num_tokens, vocabulary, 5, seed=seed)
    bias_V = all_bias_V if with_bias else None
    leaves = [hidden_TD, weight_VD, *([all_bias_V] if with_bias else [])]
    weight_T = torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    logprobs_T, entropy_T = fused_logprobs(
        hidden_TD,
        weight_VD,
        targets_T,
        bias_V=bias_V,
        temperature=temperature,
        behind=behind,
        chunk_elements=chunk_elements,
    )
    expected_T, expected_entropy_T = full_logprobs(hidden_TD, weight_VD, targets_T, bias_V, temperature, behind)
    torch.testing.assert_close(logprobs_T, expected_T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_T, expected_entropy_T, rtol=1e-12, atol=1e-12)
    for of_logprobs, of_entropy in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.3)):
        got, expected = (
            torch.autograd.grad(
                # A weight of its own for each token and result.
                (of_logprobs * weight_T * one_T + of_entropy * weight_T.flip(0) * other_T).sum(),
                leaves,
                retain_graph=True,
            )
            for one_T, other_T in ((logprobs_T, entropy_T), (expected_T, expected_entropy_T))
        )
        for got_gradient, expected_gradient in zip(got, expected, strict=True):
            torch.testing.assert_close(got_gradient, expected_gradient, rtol=1e-11, atol=1e-12)


@each("behind", [LINEAR, LogitMap(cap=2.0)])
@each("chunk_elements", [6, 28])
def test_the_entropy_has_a_gradient_alone(behind: LogitMap, chunk_elements: int) -> None:
    hidden_TD, weight_VD, bias_V, targets_T = make_inputs(4, 7, 3)

    def entropies(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor) -> Tensor:
        return fused_logprobs(
            hidden_TD,
            weight_VD,
            targets_T,
            bias_V=bias_V,
            temperature=0.7,
            behind=behind,
            chunk_elements=chunk_elements,
        )[1]

    assert torch.autograd.gradcheck(entropies, (hidden_TD, weight_VD, bias_V))


def test_the_gradient_of_the_entropy_is_finite_where_tokens_have_no_probability() -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(6, 40, 8, dtype=torch.float32)
    hidden_TD = (hidden_TD * 1000).detach().requires_grad_()  # e^-5000 is 0
    for chunk_elements in (100, 1000):
        entropy_T = fused_logprobs(hidden_TD, weight_VD, targets_T, chunk_elements=chunk_elements)[1]
        for gradient in torch.autograd.grad(entropy_T.sum(), (hidden_TD, weight_VD)):
            assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("chunk_elements", [6, 28])
def test_gradients_pass_the_finite_difference_check(chunk_elements: int) -> None:
    hidden_TD, weight_VD, bias_V, targets_T = make_inputs(4, 7, 3)

    def logprobs(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor) -> Tensor:
        return fused_logprobs(
            hidden_TD, weight_VD, targets_T, bias_V=bias_V, temperature=0.7, chunk_elements=chunk_elements
        )[0]

    assert torch.autograd.gradcheck(logprobs, (hidden_TD, weight_VD, bias_V))


def test_large_logits_neither_overflow_nor_give_positive_log_probabilities() -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(64, 40, 8, dtype=torch.float32)
    hidden_TD = (hidden_TD * 1000).detach().requires_grad_()
    logprobs_T, entropy_T = fused_logprobs(hidden_TD, weight_VD, targets_T, chunk_elements=100)
    expected_T, expected_entropy_T = full_logprobs(hidden_TD.double(), weight_VD.double(), targets_T, None, 1.0)
    # Logits near 5,000 in float32: their own rounding is the error.
    torch.testing.assert_close(logprobs_T.double(), expected_T, rtol=1e-5, atol=5e-3)
    torch.testing.assert_close(entropy_T.double(), expected_entropy_T, rtol=1e-3, atol=5e-3)
    assert float(logprobs_T.detach().max()) <= 0
    logprobs_T.sum().backward()
    assert hidden_TD.grad is not None
    assert bool(hidden_TD.grad.isfinite().all())


def test_float32_agrees_with_float64() -> None:
    inputs = make_inputs(200, 300, 32, dtype=torch.float32)
    hidden_TD, weight_VD, bias_V, targets_T = inputs
    got_T, _ = fused_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_elements=4096)
    got = torch.autograd.grad(got_T.sum(), (hidden_TD, weight_VD, bias_V))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_TD, weight_VD, bias_V)]
    expected_T, _ = full_logprobs(exact[0], exact[1], targets_T, exact[2], 1.0)
    expected = torch.autograd.grad(expected_T.sum(), exact)
    assert relative_error(got_T, expected_T) < 1e-6
    assert max(relative_error(a, b) for a, b in zip(got, expected, strict=True)) < 1e-6


@each("weight_dtype", [torch.bfloat16, torch.float32])
@each("autocast", [False, True])
def test_bfloat16_inputs_give_logprobs_in_float32_and_gradients_to_the_precision_of_bfloat16(
    weight_dtype: torch.dtype, autocast: bool
) -> None:
    hidden_TD, weight_VD, bias_V, targets_T = make_inputs(200, 300, 32, dtype=torch.bfloat16)
    weight_VD = weight_VD.detach().to(weight_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got_T, entropy_T = fused_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_elements=4096)
        (got_T - 0.5 * entropy_T).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_TD, weight_VD, bias_V)]
    expected_T, expected_entropy_T = full_logprobs(exact[0], exact[1], targets_T, exact[2], 1.0)
    (expected_T - 0.5 * expected_entropy_T).sum().backward()
    assert got_T.dtype == entropy_T.dtype == torch.float32
    assert relative_error(got_T, expected_T) < 1e-6
    assert relative_error(entropy_T, expected_entropy_T) < 1e-5
    for leaf, reference in zip((hidden_TD, weight_VD, bias_V), exact, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert (
            relative_error(leaf.grad, reference.grad) < 2**-8
        )  # factors, and each tile's product, are rounded to 8 bits


def test_autocast_does_not_round_the_logits() -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(50, 60, 16, dtype=torch.float32)
    plain_T, _ = fused_logprobs(hidden_TD, weight_VD, targets_T)
    plain = torch.autograd.grad(plain_T.sum(), weight_VD)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_T, _ = fused_logprobs(hidden_TD, weight_VD, targets_T)
        cast = torch.autograd.grad(cast_T.sum(), weight_VD)[0]
    assert torch.equal(plain_T, cast_T)
    assert torch.equal(plain, cast)


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden_TD, weight_VD, bias_V, targets_T = make_inputs(0, 7, 3)
    logprobs_T, entropy_T = fused_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V)
    assert logprobs_T.shape == entropy_T.shape == (0,)
    logprobs_T.sum().backward()
    assert weight_VD.grad is not None
    assert bias_V.grad is not None
    assert hidden_TD.grad is not None
    assert torch.equal(weight_VD.grad, torch.zeros_like(weight_VD))
    assert torch.equal(bias_V.grad, torch.zeros_like(bias_V))
    assert hidden_TD.grad.shape == (0, 3)


@pytest.mark.parametrize("chunk_elements", [10, 35])
def test_a_second_backward_pass_gives_the_same_gradient(chunk_elements: int) -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(5, 7, 3)
    loss = fused_logprobs(hidden_TD, weight_VD, targets_T, chunk_elements=chunk_elements)[0].sum()
    first = torch.autograd.grad(loss, (hidden_TD, weight_VD), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden_TD, weight_VD))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_frozen_inputs_get_no_gradient() -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(5, 7, 3)
    expected = torch.autograd.grad(full_logprobs(hidden_TD, weight_VD, targets_T, None, 1.0)[0].sum(), hidden_TD)[0]
    logprobs_T, _ = fused_logprobs(hidden_TD, weight_VD.detach(), targets_T, chunk_elements=10)
    logprobs_T.sum().backward()
    assert relative_error(hidden_TD.grad, expected) < 1e-12


class LargestTensor(TorchDispatchMode):
    """Record the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@each("chunk_elements", [64, 200, 1000])
def test_no_tensor_exceeds_a_chunk_or_the_inputs(chunk_elements: int) -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(100, 90, 2)
    with LargestTensor() as largest:
        fused_logprobs(hidden_TD, weight_VD, targets_T, chunk_elements=chunk_elements)[0].sum().backward()
    assert largest.elements <= max(chunk_elements, hidden_TD.numel(), weight_VD.numel()) < 100 * 90


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    hidden_TD, weight_VD, _, targets_T = make_inputs(3, 7, 2)
    targets_T[1] = target
    with pytest.raises(ValueError, match=rf"targets in 0\.\.6, got {target} at token 1"):
        fused_logprobs(hidden_TD, weight_VD, targets_T)


def test_wrong_shapes_dtypes_and_temperatures_are_refused() -> None:
    hidden_TD, weight_VD, bias_V, targets_T = make_inputs(3, 7, 2)
    with pytest.raises(ValueError, match=r"got \(3, 1\) and \(7, 2\)"):
        fused_logprobs(hidden_TD[:, :1], weight_VD, targets_T)
    with pytest.raises(ValueError, match=r"got torch.int64 of \(2,\)"):
        fused_logprobs(hidden_TD, weight_VD, targets_T[:2])
    with pytest.raises(ValueError, match=r"got torch.int32 of \(3,\)"):
        fused_logprobs(hidden_TD, weight_VD, targets_T.int())
    with pytest.raises(ValueError, match=r"bias_V of shape \(7,\), got \(6,\)"):
        fused_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V[:6])
    with pytest.raises(ValueError, match=r"floating-point hidden and weight, got torch\.int64"):
        fused_logprobs(hidden_TD.long(), weight_VD, targets_T)
    with pytest.raises(ValueError, match=r"temperature > 0, got 0\.0"):
        fused_logprobs(hidden_TD, weight_VD, targets_T, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_elements >= 1, got 0"):
        fused_logprobs(hidden_TD, weight_VD, targets_T, chunk_elements=0)
