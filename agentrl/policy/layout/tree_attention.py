"""Attention of each token of a tree to itself and its ancestors, and its use in transformers models.

`P` tokens of the tree, `H` query heads, `Y` key-value heads, `A = H / Y` query heads that share one,
`D` head size of queries and keys, `E` of values; `Q` queries and `L` keys of one block, `S` segments of the tree.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from agentrl.errors import TrainingError
from agentrl.policy.layout.recurrent import RECURRENT, mixers_of
from agentrl.policy.layout.tree import TokenTree


class TreeLayout:
    """Structure of a tree for attention, on one device: made once for a forward pass, used by all its layers.

    Neighbouring subtrees of up to `max_masked` tokens in all are one block under a mask: the calls saved cost more than
    the pairs wasted.
    """

    def __init__(self, tree: TokenTree, *, device: torch.device | str = "cpu", max_masked: int = 64) -> None:
        subtree_stop_P = torch.from_numpy(tree.subtree_stop_S.repeat(tree.stop_S - tree.start_S))
        self.num_tokens = tree.num_tokens
        self.subtree_stop_P = subtree_stop_P.to(device)
        """One past the last descendant of each token."""
        self.depth_P = torch.from_numpy(tree.depth_P).to(device)
        """Position of each token in its rows."""
        self._tree, self._max_masked = tree, max_masked
        self._blocks: dict[int | None, list[_Block]] = {}
        self._flex_masks: dict[int | None, Any] = {}

    def visible(self, queries: slice, keys: slice, window: int | None) -> Tensor:
        """Return which of a range of keys each of a range of queries attends to: boolean (Q, L)."""
        query_Q1 = torch.arange(queries.start, queries.stop, device=self.depth_P.device)[:, None]
        key_L = torch.arange(keys.start, keys.stop, device=self.depth_P.device)
        visible_QL: Tensor = (key_L <= query_Q1) & (query_Q1 < self.subtree_stop_P[keys])
        if window is not None:
            visible_QL &= self.depth_P[queries, None] - self.depth_P[keys] < window
        return visible_QL

    def blocks(self, window: int | None) -> "list[_Block]":
        """Return the blocks that hold all visible pairs once, those in which queries meet themselves first."""
        if window not in self._blocks:
            blocks = list(_plan_blocks(self._tree, window, self._max_masked))
            self._blocks[window] = sorted(blocks, key=lambda block: block.queries.start != block.keys.start)
        return self._blocks[window]

    def flex_mask(self, window: int | None) -> Any:
        """Return the block mask for FlexAttention, from the common parts of its blocks of keys, without all pairs."""
        from torch.nn.attention.flex_attention import BlockMask

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            is_visible = (key <= query) & (query < self.subtree_stop_P[key])
            return is_visible if window is None else is_visible & (self.depth_P[query] - self.depth_P[key] < window)

        if window not in self._flex_masks:
            some_QL, all_QL = self._flex_blocks(window)
            self._flex_masks[window] = BlockMask.from_kv_blocks(
                *_listed(some_QL & ~all_QL),
                *_listed(all_QL),
                BLOCK_SIZE=_FLEX_BLOCK,
                mask_mod=visible,
                seq_lengths=(self.num_tokens, self.num_tokens),
            )
        return self._flex_masks[window]

    def _flex_blocks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return of which blocks of queries and keys some pair may be visible, and of which all are: two (Q, L)."""
        start_B = torch.arange(0, self.num_tokens, _FLEX_BLOCK, device=self.depth_P.device)
        stop_B = (start_B + _FLEX_BLOCK).clamp(max=self.num_tokens)
        least_stop_L, most_stop_L = _extremes(self.subtree_stop_P)
        is_before_QL = stop_B[None, :] <= start_B[:, None]
        # A block's own keys see themselves. One that ends behind the last token is under the mask, as flex wants it.
        some_QL = torch.eye(len(start_B), dtype=torch.bool, device=start_B.device)
        some_QL |= is_before_QL & (start_B[:, None] < most_stop_L)
        all_QL = is_before_QL & (stop_B[:, None] <= least_stop_L) & (stop_B[:, None] == start_B[:, None] + _FLEX_BLOCK)
        if window is not None:
            least_B, most_B = _extremes(self.depth_P)
            some_QL &= least_B[:, None] - most_B < window
            all_QL &= most_B[:, None] - least_B < window
        return some_QL, all_QL


FLEX_KERNEL: Mapping[str, Any] = {"BACKEND": "TRITON"}
"""Kernel of FlexAttention: torch's default for less than 128 queries fails for some numbers of heads."""
_FLEX_BLOCK = 128
"""Queries and keys of one block of FlexAttention."""
_LARGE_HEAD = 128
"""Size of heads beyond which the blocks that torch chooses for float32 may have no room in a processor of a GPU."""


def _extremes(number_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest number of each of FlexAttention's blocks."""
    blocks = number_P.split(_FLEX_BLOCK)
    return torch.stack([block.min() for block in blocks]), torch.stack([block.max() for block in blocks])


def _listed(chosen_QL: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys are chosen for each block of queries, and which: (1, 1, Q) and (1, 1, Q, L)."""
    order_QL = chosen_QL.int().argsort(dim=1, descending=True, stable=True)
    return chosen_QL.sum(1, dtype=torch.int32)[None, None], order_QL.to(torch.int32)[None, None].contiguous()


def tree_attention(
    query_HPD: Tensor,
    key_YPD: Tensor,
    value_YPD: Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention of each token to itself and its ancestors.

        out_i = sum_j softmax_j(scale query_i . key_j) value_j,    j <= i < subtree_stop_j,  depth_i - depth_j < window

    The softmax has one more entry, of no value, if heads have a sink (gpt-oss): its score is the head's own.

    On a CPU: causal flash attention within each segment and dense flash attention of its descendants to it, merged by
    their log-sum-exps l,

        out = sum_b exp(l_b - l) out_b,    l = logsumexp_b l_b

    The weight of a pair, exp(scale query_i . key_j - l_i), and its gradient (arXiv 2205.14135, appendix B.2) need the
    final out and l alone, so that the flash backward of each block under these is exact. Blocks that a window cuts,
    and small subtrees, carry a mask, which lives as long as its block is computed. Query head h reads key-value head
    h // (H / Y) in place. Half-precision blocks are merged, and their gradients added, in float32.

    Elsewhere: FlexAttention, compiled, under a block mask of the same visibility.

    Shapes: query `(H, P, D)`, key `(Y, P, D)`, value `(Y, P, E)` with H a multiple of Y; result `(H, P, E)`, laid out
    as (P, H, E). All of one dtype: float64, float32, bfloat16 or float16; sinks `(H,)` may be of another. Differentiable in
    query, key, value and sinks, once.

    Raises:
        ValueError: for a wrong rank, dtype or length, or a window below 1.
    """
    _check(query_HPD, key_YPD, value_YPD, layout, window)
    size, value_size = query_HPD.shape[-1], value_YPD.shape[-1]
    if query_HPD.device.type != "cpu":
        return _flex_attention(query_HPD, key_YPD, value_YPD, layout, scale=scale, window=window, sinks_H=sinks_H)
    if size != value_size:  # the kernel knows one head size; zeros add nothing to a product
        width = max(size, value_size)
        query_HPD, key_YPD = pad(query_HPD, (0, width - size)), pad(key_YPD, (0, width - size))
        value_YPD = pad(value_YPD, (0, width - value_size))
    out = _TreeAttention.apply(query_HPD, key_YPD, value_YPD, sinks_H, layout, scale, window)
    return cast("Tensor", out)[..., :value_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A range of queries on a range of keys."""

    queries: slice
    keys: slice
    causal: bool = False
    """Queries and keys are the same chain of tokens."""
    masked: bool = False
    """Not all pairs are visible, and not by causality alone."""


def _plan_blocks(tree: TokenTree, window: int | None, max_masked: int) -> Iterator[_Block]:
    """Yield blocks: small subtrees under a mask, else each link on itself and its descendants on it."""
    done = 0
    links = _links(tree, window)
    for number, (start, stop, subtree_stop) in enumerate(links):
        if start < done:
            continue
        done = max(stop, _small_subtrees_stop(links, number, max_masked))
        own = slice(start, done)
        yield _Block(queries=own, keys=own, causal=done == stop, masked=done != stop)
        if done >= subtree_stop:
            continue
        depth_Q = tree.depth_P[stop:subtree_stop]
        first = tree.depth_P[start]
        last = tree.depth_P[stop - 1]
        if window is None or depth_Q.max() - first < window:
            yield _Block(queries=slice(stop, subtree_stop), keys=own)
        elif len(reach := (depth_Q - last < window).nonzero()[0]):
            yield _Block(queries=slice(stop + int(reach[0]), stop + int(reach[-1]) + 1), keys=own, masked=True)


def _small_subtrees_stop(links: list[tuple[int, int, int]], number: int, max_masked: int) -> int:
    """Return the stop of the longest run of whole subtrees from a link on that is small in all, or the link itself."""
    start = stop = links[number][0]
    for first, _, subtree_stop in islice(links, number, None):
        if first == stop:
            if subtree_stop - start > max_masked:
                break
            stop = subtree_stop
    return stop


def _links(tree: TokenTree, window: int | None) -> list[tuple[int, int, int]]:
    """Return (start, stop, subtree stop) of each segment, or of its parts if the window would cut it."""
    segments = zip(tree.start_S.tolist(), tree.stop_S.tolist(), tree.subtree_stop_S.tolist(), strict=True)
    return [
        (part, min(part + (window or stop), stop), subtree_stop)
        for start, stop, subtree_stop in segments
        for part in range(start, stop, window or stop - start)
    ]


class _TreeAttention(torch.autograd.Function):
    """Flash attention block by block; heads that share keys read them through a view of stride 0."""

    @staticmethod
    def forward(
        ctx: Any,
        query_HPD: Tensor,
        key_YPD: Tensor,
        value_YPD: Tensor,
        sinks_H: Tensor | None,
        layout: TreeLayout,
        scale: float,
        window: int | None,
    ) -> Tensor:
        dtype = torch.promote_types(query_HPD.dtype, torch.float32)
        query_YAPD, key_YAPD, value_YAPD = _by_group(query_HPD, key_YPD, value_YPD)
        out_YAPD = _zeros_PHD(query_HPD, dtype).unflatten(0, (len(key_YPD), -1))
        lse_YAP = out_YAPD.new_empty(out_YAPD.shape[:3])
        for block in layout.blocks(window):
            mask_QL = _additive_mask(block, layout, window, query_HPD.dtype)
            part_YAQD, part_YAQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_YAPD[:, :, block.queries],
                key_YAPD[:, :, block.keys],
                value_YAPD[:, :, block.keys],
                0.0,
                block.causal,
                attn_mask=mask_QL,
                scale=scale,
            )
            if mask_QL is not None:  # the kernel gives queries that see no key a log-sum-exp of 0
                part_YAQ.masked_fill_(mask_QL.isneginf().all(1), -torch.inf)
            out_YAQD, lse_YAQ = out_YAPD[:, :, block.queries], lse_YAP[:, :, block.queries]
            if block.queries.start == block.keys.start:
                out_YAQD.copy_(part_YAQD)
                lse_YAQ.copy_(part_YAQ)
            else:
                out_YAQD.lerp_(part_YAQD.to(dtype), torch.sigmoid(part_YAQ - lse_YAQ)[..., None])
                lse_YAQ.copy_(torch.logaddexp(lse_YAQ, part_YAQ))
        if sinks_H is not None:
            without_YAP = lse_YAP
            lse_YAP = torch.logaddexp(lse_YAP, _sinks_by_group(sinks_H, lse_YAP))
            out_YAPD *= torch.exp(without_YAP - lse_YAP)[..., None]
        out_HPD: Tensor = out_YAPD.flatten(0, 1).to(query_HPD.dtype)
        ctx.save_for_backward(query_HPD, key_YPD, value_YPD, sinks_H, out_HPD, lse_YAP)
        ctx.layout = layout
        ctx.scale = scale
        ctx.window = window
        return out_HPD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_HPD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None, None]:
        query_HPD, key_YPD, value_YPD, sinks_H, out_HPD, lse_YAP = ctx.saved_tensors
        query_YAPD, key_YAPD, value_YAPD = _by_group(query_HPD, key_YPD, value_YPD)
        grad_YAPD, out_YAPD = (tensor.unflatten(0, (len(key_YPD), -1)) for tensor in (grad_HPD, out_HPD))
        sums = [_zeros_PHD(tensor, lse_YAP.dtype) for tensor in (query_HPD, key_YPD, value_YPD)]
        for block in ctx.layout.blocks(ctx.window):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_YAPD[:, :, block.queries],
                query_YAPD[:, :, block.queries],
                key_YAPD[:, :, block.keys],
                value_YAPD[:, :, block.keys],
                out_YAPD[:, :, block.queries],
                lse_YAP[:, :, block.queries],
                0.0,
                block.causal,
                attn_mask=_additive_mask(block, ctx.layout, ctx.window, query_HPD.dtype),
                scale=ctx.scale,
            )
            sums[0].unflatten(0, (len(key_YPD), -1))[:, :, block.queries].add_(parts[0])
            for total_YPD, part_YALD in zip(sums[1:], parts[1:], strict=True):
                total_YPD[:, block.keys] += part_YALD.sum(1, dtype=total_YPD.dtype)
        grad_query_HPD, grad_key_YPD, grad_value_YPD = (total.to(query_HPD.dtype) for total in sums)
        grad_sinks_H = None
        if sinks_H is not None:  # the weight of an entry whose value is zero
            weight_YAP = torch.exp(_sinks_by_group(sinks_H, lse_YAP) - lse_YAP)
            grad_sinks_H = -(weight_YAP * (grad_YAPD * out_YAPD).sum(-1)).sum(-1).flatten().to(sinks_H.dtype)
        return grad_query_HPD, grad_key_YPD, grad_value_YPD, grad_sinks_H, None, None, None


def _sinks_by_group(sinks_H: Tensor, lse_YAP: Tensor) -> Tensor:
    """Return the score of each head's sink as (Y, A, 1)."""
    return sinks_H.to(lse_YAP.dtype).view(*lse_YAP.shape[:2], 1)


def _by_group(query_HPD: Tensor, key_YPD: Tensor, value_YPD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query_YAPD = query_HPD.unflatten(0, (len(key_YPD), -1))
    key_YAPD, value_YAPD = (tensor[:, None].expand(-1, query_YAPD.shape[1], -1, -1) for tensor in (key_YPD, value_YPD))
    return query_YAPD, key_YAPD, value_YAPD


def _zeros_PHD(like_HPD: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: N802
    """Return zeros of a shape (H, P, D) that lie in memory as (P, H, D), as transformers wants them."""
    heads, num_tokens, size = like_HPD.shape
    return like_HPD.new_zeros(num_tokens, heads, size, dtype=dtype).transpose(0, 1)


def _additive_mask(block: _Block, layout: TreeLayout, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask: 0 for visible keys, else -inf; in the dtype of the queries, which the kernel relies on."""
    if not block.masked:
        return None
    visible_QL = layout.visible(block.queries, block.keys, window)
    return torch.zeros_like(visible_QL, dtype=dtype).masked_fill_(~visible_QL, -torch.inf)


def _flex_attention(
    query_HPD: Tensor,
    key_YPD: Tensor,
    value_YPD: Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attend by FlexAttention, for GPUs."""
    options: dict[str, Any] = dict(FLEX_KERNEL)
    if query_HPD.dtype == torch.float32 and max(query_HPD.shape[-1], value_YPD.shape[-1]) > _LARGE_HEAD:
        options |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
    arguments: dict[str, Any] = {
        "block_mask": layout.flex_mask(window),
        "scale": scale,
        "enable_gqa": len(query_HPD) != len(key_YPD),
        "kernel_options": options,
    }
    states = query_HPD[None], key_YPD[None], value_YPD[None]
    attend = _compiled_flex_attention(window, query_HPD.dtype, torch.is_grad_enabled(), query_HPD.requires_grad)
    if sinks_H is None:
        return cast("Tensor", attend(*states, **arguments))[0]
    from torch.nn.attention.flex_attention import AuxRequest

    out_1HPD, found = attend(*states, **arguments, return_aux=AuxRequest(lse=True))
    share_1HP = torch.sigmoid(found.lse - sinks_H.to(found.lse.dtype)[:, None])
    return cast("Tensor", out_1HPD * share_1HP[..., None].to(out_1HPD.dtype))[0]


@cache
def _compiled_flex_attention(*kind: Any) -> Any:
    """Return FlexAttention compiled for one kind of layer and pass.

    `fullgraph` fails if torch would fall back to attention that holds every pair, as it would after eight compilations of
    one function's code. So each kind has code of its own. That is compiled four times at most: for the first mask, for masks
    of any number of blocks, of one block, and for one token.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attend(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    attend.__code__ = attend.__code__.replace(co_name=f"attend {kind}")
    return torch.compile(attend, dynamic=True, fullgraph=True)


def _check(query_HPD: Tensor, key_YPD: Tensor, value_YPD: Tensor, layout: TreeLayout, window: int | None) -> None:
    """Check ranks, dtypes, lengths and the window."""
    shapes = [tuple(tensor.shape) for tensor in (query_HPD, key_YPD, value_YPD)]
    if any(len(shape) != 3 or shape[1] != layout.num_tokens for shape in shapes):
        raise ValueError(f"expected three tensors of shape (heads, {layout.num_tokens}, size), got {shapes}")
    (heads, _, size), (shared, _, key_size), (value_heads, _, _) = shapes
    if not shared or heads % shared or value_heads != shared or size != key_size:
        raise ValueError(
            f"expected query (H, P, D), key (Y, P, D) and value (Y, P, E), H a multiple of Y, got {shapes}"
        )
    if not (query_HPD.dtype == key_YPD.dtype == value_YPD.dtype and query_HPD.is_floating_point()):
        raise ValueError(
            f"expected one floating-point dtype, got {query_HPD.dtype}, {key_YPD.dtype} and {value_YPD.dtype}"
        )
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1 token, got {window}; None sees all ancestors")


NAME = "agentrl_tree"


class TreeError(TrainingError):
    """A model whose attention is more than a masked softmax over all ancestors, or those in a window."""


def tree_attention_of(model: Any) -> AbstractContextManager[None]:
    """Let a transformers model attend along trees, and as before afterwards. May be nested.

    Raises:
        TreeError: for a model with attention of its own (see `why_not`).
    """
    if reason := why_not(model):
        raise TreeError(reason)
    AttentionInterface.register(NAME, _uncompiled_attend() if has_compiled_layers(model) else _attend)
    AttentionMaskInterface.register(NAME, no_mask)
    return attention_set(model, NAME)


@contextmanager
def attention_set(model: Any, name: str) -> Iterator[None]:
    """Let all of a model attend by a registered attention function, and as before afterwards."""
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    before = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    before[""] = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def has_compiled_layers(model: nn.Module) -> bool:
    """Return whether parts of a model are compiled (`compile_layers`)."""
    return any(module._compiled_call_impl is not None for module in model.modules())


@cache
def _uncompiled_attend() -> Any:
    """Return attention that stays outside of a layer's graphs: each tree has blocks of its own, and flex is compiled apart."""
    return torch.compiler.disable(_attend)


def why_not(model: Any) -> str | None:
    """Return the reason for which a model cannot run on a tree, as far as is known without running it, or None."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        return f"{name} has an attention of its own, not one of transformers' attention functions"
    follows = {"full_attention", "sliding_attention", "mlp", "moe"}
    if mixers_of(model):  # which see rows, see `hidden_states`
        follows |= RECURRENT
    elif getattr(model, "_is_stateful", False):
        return f"{name} is recurrent: a branch would continue the state that its sibling left"
    if others := set(getattr(config, "layer_types", None) or ()) - follows:
        return f"{name} has layers of type {', '.join(sorted(others))}, which do not look along the branches of a tree"
    if "position_ids" not in signature(model.base_model.forward).parameters:
        return f"{name} takes no position_ids, without which siblings would stand behind one another"
    return None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the tree determines the visible tokens."""


def _attend(
    module: nn.Module,
    query_1HPD: Tensor,
    key_1YPD: Tensor,
    value_1YPD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    agentrl_tree: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend along a tree, as transformers calls it; the output is (1, P, H, D)."""
    extra = [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]
    extra += ["attention_mask"] if attention_mask is not None else []
    extra += ["dropout"] if dropout else []
    extra += ["is_causal=False"] if not kwargs.get("is_causal", getattr(module, "is_causal", True)) else []
    if extra:
        raise TreeError(f"{type(module).__name__} needs {', '.join(extra)}, which attention along a tree lacks")
    if agentrl_tree is None:
        raise TreeError(f"{type(module).__name__} was called without a tree; run the model through hidden_states")
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    out_HPD = tree_attention(
        query_1HPD[0].to(value_1YPD.dtype),  # norms of queries and keys leave autocast in float32
        key_1YPD[0].to(value_1YPD.dtype),
        value_1YPD[0],
        agentrl_tree,
        scale=query_1HPD.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        sinks_H=s_aux,
    )
    return out_HPD.transpose(0, 1)[None].contiguous(), None
