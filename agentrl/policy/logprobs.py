"""Log-probabilities of given tokens from hidden states, without the matrix of all logits.

`T` tokens, `V` vocabulary, `D` hidden; `R` rows (tokens) and `C` columns (vocabulary entries) of one tile of logits.
"""

from collections.abc import Iterator
from math import isfinite, isqrt
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.models.logits import LogitMap
from agentrl.policy.host_reads import require

__all__ = ["fused_logprobs", "tile_elements"]

_LINEAR = LogitMap()
_ALIGNMENT = 128
"""Multiple of a tile's columns: with others a GPU takes at least twice as long (benchmarks/gpu.py)."""


def fused_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    behind: LogitMap = _LINEAR,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of its distribution.

        z = behind(hidden weight^T + bias) / temperature
        logprob_t = z[t, target_t] - logsumexp(z[t]),    entropy_t = logsumexp(z[t]) - sum_v softmax(z[t])_v z[t, v]

    Logits exist one tile of at most `chunk_elements` (by default `tile_elements`) at a time, and one more tile of scratch,
    another with a cap, and another if the entropy has a gradient. They are computed again in the backward pass, unless one
    tile holds them all and there is no cap. The gradient of the weight is added up in one float32 buffer of its shape. Logits
    are float32 for half-precision inputs, added up in float32; float64 stays float64. Autocast changes nothing, so that
    logits are not rounded to half precision. The dtype of `hidden` decides the multiplication. In bfloat16 a GPU gets the
    weight rounded to it, tile by tile, and uses its tensor cores; in the backward pass the weight and the gradients of logits
    are rounded to it everywhere, and on a CPU each tile's product.

    Shapes: hidden `(T, D)`, weight `(V, D)`, targets int64 `(T,)`, bias `(V,)`. Both results are `(T,)`, float32
    (float64 for float64 inputs). Both are differentiable in hidden, weight and bias, once. T = 0 gives empty results and zero
    gradients.

    Raises:
        ValueError: for a wrong rank, dtype or length, a target outside 0..V-1, or a temperature that is not above 0.
    """
    _check(hidden_TD, weight_VD, targets_T, bias_V)
    if not (isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"expected a finite temperature > 0, got {temperature}; at 0 there is no distribution to score"
        )
    if chunk_elements is None:
        chunk_elements = tile_elements(is_gpu=hidden_TD.is_cuda)
    if chunk_elements < 1:
        raise ValueError(f"expected chunk_elements >= 1, got {chunk_elements}")
    # x / divisor, and of that cap * tanh(x / (divisor * cap)): both with the temperature in them.
    divisor, cap = temperature / behind.factor, None if behind.cap is None else behind.cap / temperature
    outputs = _FusedLogprobs.apply(hidden_TD, weight_VD, bias_V, targets_T, divisor, cap, chunk_elements)
    return cast("tuple[Tensor, Tensor]", outputs)


def tile_elements(*, is_gpu: bool) -> int:
    """Return the logits of a tile: few for a processor's cache, many so that a GPU has enough to do (benchmarks/gpu.py)."""
    return 2**24 if is_gpu else 2**21


class _FusedLogprobs(torch.autograd.Function):
    """The forward pass keeps one normalizer for each token; the backward pass computes each tile's logits again.

    If all logits fit in one tile, that tile is kept: computing it again would take a third of a small step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        divisor: float,
        cap: float | None,
        chunk_elements: int,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, dtype = len(targets_T), _accumulator(hidden_TD, weight_VD)
        logsumexp_T = torch.empty(num_tokens, dtype=dtype, device=hidden_TD.device)
        entropy_T, target_logit_T = torch.empty_like(logsumexp_T), torch.zeros_like(logsumexp_T)
        tiles = _Tiles(hidden_TD, weight_VD, bias_V, divisor, cap, chunk_elements)
        scratch = torch.empty_like(tiles.buffer)
        for rows in tiles.row_slices():
            maxima = []
            sums = []
            moments = []
            for columns in tiles.column_slices():
                logits_RC = tiles.logits(rows, columns)
                index_R, inside_R = _local_targets(targets_T[rows], columns)
                target_logit_R = logits_RC.gather(1, index_R[:, None])[:, 0]
                target_logit_T[rows] = torch.where(inside_R, target_logit_R, target_logit_T[rows])
                maximum_R = logits_RC.amax(1)
                logits_RC.sub_(maximum_R[:, None])
                exp_RC = torch.exp(logits_RC, out=scratch[: logits_RC.numel()].view_as(logits_RC))
                maxima.append(maximum_R)
                sums.append(exp_RC.sum(1))
                moments.append(exp_RC.mul_(logits_RC).sum(1))
            # From sums relative to each tile's own maximum to sums relative to the row's.
            tile_maximum, tile_sum, tile_moment = map(torch.stack, (maxima, sums, moments))  # (tiles, R) each
            maximum_R = tile_maximum.amax(0)
            shift = tile_maximum - maximum_R
            scale = shift.exp()
            sum_R = (tile_sum * scale).sum(0)
            moment_R = ((tile_moment + shift * tile_sum) * scale).sum(0)
            logsumexp_T[rows] = maximum_R + sum_R.log()
            entropy_T[rows] = sum_R.log() - moment_R / sum_R
        # A kept tile has its rows' maxima subtracted already, and so has its normalizer; a cap's slope needs them.
        keep = cap is None and num_tokens * len(weight_VD) <= chunk_elements and num_tokens > 0
        kept_TV = tiles.tile(slice(0, num_tokens), slice(0, len(weight_VD))) if keep else None
        normalizer_T = sum_R.log() if keep else logsumexp_T
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, normalizer_T, entropy_T, kept_TV)
        ctx.divisor = divisor
        ctx.cap = cap
        ctx.chunk_elements = chunk_elements
        ctx.set_materialize_grads(False)
        return target_logit_T - logsumexp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        hidden_TD, weight_VD, bias_V, targets_T, normalizer_T, entropy_T, kept_TV = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if grad_T is None and grad_entropy_T is None:
            return None, None, None, None, None, None, None
        grad_T = torch.zeros_like(normalizer_T) if grad_T is None else grad_T
        dtype = normalizer_T.dtype
        grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=dtype) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        tiles = _Tiles(hidden_TD, weight_VD, bias_V, ctx.divisor, ctx.cap, ctx.chunk_elements)
        for rows in tiles.row_slices():
            grad_R = (grad_T[rows] / ctx.divisor)[:, None]
            for columns in tiles.column_slices():
                logits_RC = tiles.logits(rows, columns) if kept_TV is None else kept_TV
                slope_RC = None if ctx.cap is None else (logits_RC / ctx.cap).square_().neg_().add_(1)
                log_softmax_RC = torch.sub(logits_RC, normalizer_T[rows, None], out=tiles.tile(rows, columns))
                # d logprob / d z = onehot(target) - softmax(z),  d entropy / d z = -softmax(z) (log softmax(z) + entropy)
                factor_RC: Tensor = -grad_R
                if grad_entropy_T is not None:
                    bonus_R = (grad_entropy_T[rows] / ctx.divisor)[:, None]
                    factor_RC = (log_softmax_RC + entropy_T[rows, None]).mul_(-bonus_R).sub_(grad_R)
                grad_RC = log_softmax_RC.exp_().mul_(factor_RC)
                index_R, inside_R = _local_targets(targets_T[rows], columns)
                grad_RC.scatter_add_(1, index_R[:, None], torch.where(inside_R[:, None], grad_R, 0))
                if slope_RC is not None:
                    grad_RC.mul_(slope_RC)
                if grad_bias_V is not None:
                    grad_bias_V[columns] += grad_RC.sum(0)
                if grad_hidden_TD is not None:
                    _add_product(grad_hidden_TD[rows], grad_RC, weight_VD[columns], operand=hidden_TD.dtype)
                if grad_weight_VD is not None:
                    _add_product(grad_weight_VD[columns], grad_RC.T, hidden_TD[rows], operand=hidden_TD.dtype)
                del slope_RC  # or the next one would lie beside it
        return (
            None if grad_hidden_TD is None else grad_hidden_TD.to(hidden_TD.dtype),
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


class _Tiles:
    """The logits, tile by tile in one buffer: each tile overwrites the one before."""

    def __init__(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        divisor: float,
        cap: float | None,
        chunk_elements: int,
    ) -> None:
        self.hidden_TD = hidden_TD
        self.weight_VD = weight_VD
        self.bias_V = bias_V
        self.divisor = divisor
        self.cap = cap
        num_rows, num_columns = len(hidden_TD), len(weight_VD)
        # Whole rows if the vocabulary is small; else near-square tiles, which read the weight least often.
        self.rows = max(1, min(num_rows, max(chunk_elements // num_columns, isqrt(chunk_elements))))
        self.columns = min(num_columns, chunk_elements // self.rows)
        if hidden_TD.is_cuda and _ALIGNMENT < self.columns < num_columns:
            self.columns -= self.columns % _ALIGNMENT
        self.operand = _operand(hidden_TD, weight_VD)
        dtype = _accumulator(hidden_TD, weight_VD)
        num_elements = min(num_rows, self.rows) * self.columns
        self.buffer = torch.empty(num_elements, dtype=dtype, device=hidden_TD.device)

    def row_slices(self) -> Iterator[slice]:
        """Yield slices of tokens."""
        return _slices(len(self.hidden_TD), self.rows)

    def column_slices(self) -> Iterator[slice]:
        """Yield slices of the vocabulary."""
        return _slices(len(self.weight_VD), self.columns)

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Return the part of the buffer that holds one tile."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return self.buffer[: shape[0] * shape[1]].view(shape)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Compute one tile, divided and capped."""
        logits_RC = self.tile(rows, columns)
        _product(self.hidden_TD[rows], self.weight_VD[columns].T, operand=self.operand, out=logits_RC)
        if self.bias_V is not None:
            logits_RC.add_(self.bias_V[columns])
        if self.divisor != 1:
            logits_RC.div_(self.divisor)
        return logits_RC if self.cap is None else logits_RC.div_(self.cap).tanh_().mul_(self.cap)


# Autocast does not change the products below: it rewrites neither `out=` nor in-place nor `out_dtype` products.


def _product(left: Tensor, right: Tensor, *, operand: torch.dtype, out: Tensor) -> None:
    """Write left @ right, multiplied in `operand`, accumulated and kept in the dtype of `out`."""
    if operand == out.dtype:
        torch.mm(left.to(operand), right.to(operand), out=out)
    else:
        torch.mm(left.to(operand), right.to(operand), out_dtype=out.dtype, out=out)


def _add_product(total: Tensor, grad: Tensor, factor: Tensor, *, operand: torch.dtype) -> None:
    """Add grad @ factor to `total`."""
    if operand != torch.bfloat16:  # float16 included, in which small gradients would vanish
        total.addmm_(grad, factor.to(total.dtype))
    elif total.is_cuda:
        total += torch.mm(grad.to(operand), factor.to(operand), out_dtype=total.dtype)
    else:
        total += grad.to(operand) @ factor.to(operand)


def _accumulator(hidden_TD: Tensor, weight_VD: Tensor) -> torch.dtype:
    """Return the dtype of logits and sums: float32, or float64 for float64 inputs."""
    both = torch.promote_types(hidden_TD.dtype, weight_VD.dtype)
    return torch.promote_types(both, torch.float32)


def _operand(hidden_TD: Tensor, weight_VD: Tensor) -> torch.dtype:
    """Return the dtype to multiply in: half precision only if the device then still adds up in float32."""
    if hidden_TD.is_cuda and hidden_TD.dtype in (torch.bfloat16, torch.float16):
        return hidden_TD.dtype
    return _accumulator(hidden_TD, weight_VD)


def _local_targets(targets_R: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each target in a tile (some valid column if it is outside), and whether it is inside."""
    local_R = targets_R - columns.start
    last = columns.stop - columns.start - 1
    index_R = local_R.clamp(0, last)
    return index_R, local_R == index_R


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _check(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, bias_V: Tensor | None) -> None:
    """Check ranks, dtypes, lengths and the range of the targets."""
    if hidden_TD.ndim != 2 or weight_VD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1] or not len(weight_VD):
        raise ValueError(
            f"expected hidden_TD (T, D) and weight_VD (V, D) with V > 0, "
            f"got {tuple(hidden_TD.shape)} and {tuple(weight_VD.shape)}"
        )
    if not (hidden_TD.is_floating_point() and weight_VD.is_floating_point()):
        raise ValueError(f"expected floating-point hidden and weight, got {hidden_TD.dtype} and {weight_VD.dtype}")
    if targets_T.shape != hidden_TD.shape[:1] or targets_T.dtype != torch.int64:
        raise ValueError(
            f"expected targets_T int64 of shape ({len(hidden_TD)},), got {targets_T.dtype} of {tuple(targets_T.shape)}"
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"expected bias_V of shape ({len(weight_VD)},), got {tuple(bias_V.shape)}")
    outside_T = (targets_T < 0) | (targets_T >= len(weight_VD))

    def error() -> Exception:
        index = int(outside_T.nonzero()[0])
        return ValueError(f"expected targets in 0..{len(weight_VD) - 1}, got {int(targets_T[index])} at token {index}")

    require(~outside_T.any(), error)
