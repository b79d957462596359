"""Layout of rows of tokens for one pass through a model: as a token tree, packed, or padded.

`B` rows of a pass, `L` positions of a row, `P = B * L` slots of a pass (of a tree, its tokens), `D` hidden size, `Q` slots
that are asked for, `R` rows before they are laid out, `T` tokens that are read, `V` vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import ConfigError, TrainingError
from agentrl.models.logits import logit_map
from agentrl.policy.config import Layout
from agentrl.policy.layout.packed import PackedRows, attends_by_rows, packed_attention_of
from agentrl.policy.layout.recurrent import Rows, can_continue, mixers_of, see_rows
from agentrl.policy.layout.tree import IntArray, plan_tree
from agentrl.policy.layout.tree_attention import FLEX_KERNEL, TreeLayout, tree_attention_of
from agentrl.policy.logprobs import fused_logprobs

_SHORT_ROW, _LONG_ROW = 48, 416
"""Tokens of the probe's rows: on a GPU several blocks of FlexAttention, whose kernels are others for less than one; and so
many that recurrent parts compute once what rows share."""
_SMALL = 2**20
"""Entries of a weight whose gradient a machine has room for beside the model: of norms and adapters at least."""
_HEAD_ROW, _LARGEST_HEAD_GAP = 16, 1e-3
"""Tokens on which a head is proven, and by how much their log-probabilities may differ, in nats."""
_LARGEST_GAP = 1e-4
"""Between a layout and separate rows, in nats and relative to the gradient, in float32: more is no rounding."""
_LARGEST_NOISE = 2.0
"""Largest noise of a layout in bfloat16, relative to the difference of separate rows in bfloat16 from float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """The tokens of one pass, each in its slot."""

    ids_BL: Tensor
    positions_BL: Tensor | None = None
    """Position of each token within its row. None: that of its column."""
    tree: TreeLayout | None = None
    """Tokens that each token sees. None: those before it in its row."""
    paths: Sequence[IntArray] = ()
    """Slots of each row's tokens, if rows share slots or are packed."""


Index = Callable[[IntArray, IntArray], IntArray]
"""Returns the slots of (row, position) pairs: `(Q,)` and `(Q,)` to `(Q,)`."""


def lay_out(rows: Sequence[IntArray], layout: Layout, *, device: torch.device | str = "cpu") -> tuple[Inputs, Index]:
    """Return the inputs of a pass over rows of token ids, and a function to the slots of their tokens."""
    if layout == "tree":
        tree = plan_tree(rows)
        ids_1P, depth_1P = (torch.from_numpy(column_P).to(device)[None] for column_P in (tree.ids_P, tree.depth_P))
        on_device = TreeLayout(tree, device=device)
        return Inputs(ids_BL=ids_1P, positions_BL=depth_1P, tree=on_device, paths=tree.paths), tree.index
    lengths = [len(row) for row in rows]
    lines = pack(lengths) if layout == "packed" else [[number] for number in range(len(rows))]
    width = max(lengths)
    # Padding is on the right, a row of its own: nothing that is read can see it.
    ids_BL, positions_BL = np.zeros((2, len(lines), width), dtype=np.int64)
    start_R = np.zeros(len(rows), dtype=np.int64)
    for line, members in enumerate(lines):
        slot = 0
        for number in members:
            start_R[number], stop = line * width + slot, slot + lengths[number]
            ids_BL[line, slot:stop], positions_BL[line, slot:stop] = rows[number], np.arange(lengths[number])
            slot = stop
        positions_BL[line, slot:] = np.arange(width - slot)
    return (
        Inputs(
            ids_BL=torch.from_numpy(ids_BL).to(device),
            positions_BL=torch.from_numpy(positions_BL).to(device) if layout == "packed" else None,
            paths=[start + np.arange(length) for start, length in zip(start_R, lengths, strict=True)]
            if layout == "packed"
            else (),
        ),
        lambda row_Q, position_Q: start_R[row_Q] + position_Q,
    )


def pack(lengths: Sequence[int]) -> list[list[int]]:
    """Return which rows stand behind one another so that none is wider than the longest (first fit, longest first)."""
    lines: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        line = next((line for line, free in enumerate(left) if free >= lengths[number]), len(lines))
        if line == len(lines):
            lines.append([])
            left.append(max(lengths))
        lines[line].append(number)
        left[line] -= lengths[number]
    return lines


def hidden_states(model: Any, inputs: Inputs) -> Tensor:
    """Return the hidden states (P, D) of a causal language model at each slot: those of its rows one by one.

    Under gradient checkpointing layers run again in the backward pass, which must then lie within `attending` as well.

    Raises:
        TrainingError: for a tree and a model that cannot run on one, or for gradient checkpointing outside of `attending`.
    """
    layout: Layout = "tree" if inputs.tree is not None else "packed" if inputs.paths else "padded"
    arguments: dict[str, Any] = {"input_ids": inputs.ids_BL, "use_cache": False}
    if inputs.positions_BL is not None:
        arguments["position_ids"] = inputs.positions_BL
    if inputs.paths and see_rows(model):
        arguments["agentrl_rows"] = Rows.from_paths(inputs.paths, inputs.ids_BL, continues=can_continue(model))
    if layout == "tree":
        arguments["agentrl_tree"] = inputs.tree
        if "agentrl_rows" not in arguments:  # else transformers reads the positions, and waits for the device
            arguments["attention_mask"] = torch.ones_like(inputs.ids_BL)
    elif layout == "packed" and attends_by_rows(model):
        arguments["agentrl_packed"] = PackedRows.from_paths(inputs.paths, inputs.ids_BL)
        arguments["attention_mask"] = torch.ones_like(inputs.ids_BL)
    elif model.config.get_text_config()._attn_implementation == "flex_attention":
        arguments["kernel_options"] = FLEX_KERNEL
    before = model.config._attn_implementation
    runs_again = model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False)
    with attending(model, layout):
        if runs_again and model.config._attn_implementation != before:
            raise TrainingError(
                "gradient checkpointing runs layers again in the backward pass, with the attention that is set then; "
                "put forward and backward into `with attending(model, layout):`"
            )
        return cast("Tensor", model.base_model(**arguments).last_hidden_state).flatten(0, 1)


def attending(model: Any, layout: Layout) -> AbstractContextManager[None]:
    """Return a context for forward and backward together: gradient checkpointing runs layers again in the latter."""
    if layout == "tree":
        return tree_attention_of(model)
    return packed_attention_of(model) if layout == "packed" and attends_by_rows(model) else nullcontext()


def choose_layout(
    model: Any, wanted: Literal["auto"] | Layout, *, max_tokens: int = 8192, half: bool = False
) -> tuple[Layout, str | None]:
    """Return the layout that a model runs on, and a message if `auto` had to pass over a better one.

    Args:
        model: model with its weights, on the device on which it runs.
        wanted: by the recipe.
        max_tokens: the longest row there is going to be.
        half: it is going to be trained under autocast to bfloat16, whose kernels are others.

    Raises:
        ConfigError: if the wanted layout is not exact for the model.
    """
    if wanted == "padded":
        return wanted, None
    if "flash" in (attention := str(model.config.get_text_config()._attn_implementation)):
        why = f"model.attention: {attention} has no float32, in which layouts are proven"
        if wanted != "auto":
            raise ConfigError(
                f"train.layout: {wanted}: {why}; leave model.attention out, or set train.layout to padded"
            )
        return "padded", f"train.layout: rows are padded, since {why}; leave it out to have them as a tree"
    passed_over = []
    for layout in get_args(Layout)[:2] if wanted == "auto" else (wanted,):
        gap, why = probe_layout(model, layout, max_tokens=max_tokens)
        if gap <= _LARGEST_GAP and half:
            noise, why = probe_noise(model, layout, max_tokens=max_tokens)
            gap = 0.0 if noise <= _LARGEST_NOISE else inf
        if gap <= _LARGEST_GAP:
            break
        passed_over.append(f"{layout}: {why}")
    else:
        layout = "padded"
    if passed_over and wanted != "auto":
        raise ConfigError(f"train.layout: {passed_over[0]}; set it to auto")
    return layout, f"train.layout: rows are {layout}, since not {'; nor '.join(passed_over)}" if passed_over else None


def check_head(model: Any) -> None:
    """Check that a model's logits follow from its hidden states by its head, as the trainer and the engine compute them.

    Raises:
        ConfigError: for a model that computes something in between.
    """
    attention = str(model.config.get_text_config()._attn_implementation)
    if "flash" in attention or "flex" in attention:
        return  # which have no float32 to compare in, or no kernel for so few tokens
    device, was_training = model.get_input_embeddings().weight.device, model.training
    model.eval()
    try:
        ids_L = np.random.default_rng(0).integers(model.config.get_text_config().vocab_size, size=_HEAD_ROW)
        inputs, index = lay_out([ids_L], "padded", device=device)
        slot_T = index(np.zeros(len(ids_L) - 1, dtype=np.int64), np.arange(len(ids_L) - 1))
        ids_1L = torch.from_numpy(ids_L)[None].to(device)
        targets_T = ids_1L[0, 1:]
        head = model.get_output_embeddings()
        behind = logit_map(model.config)
        with torch.no_grad():
            hidden_TD = hidden_states(model, inputs)[slot_T]
            ours_T, _ = fused_logprobs(hidden_TD, head.weight, targets_T, bias_V=head.bias, behind=behind)
            own_TV = model(input_ids=ids_1L, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    finally:
        model.train(was_training)
    gap = float((ours_T - own_TV.gather(-1, targets_T[:, None])[:, 0]).abs().max())
    if not gap <= _LARGEST_HEAD_GAP:
        raise ConfigError(
            f"model.name_or_path: {type(model).__name__} computes more between its hidden states and its logits than its head "
            f"(log-probabilities differ by {gap:.2g} without it), and cannot be trained here"
        )


def probe_layout(model: Any, layout: Layout, *, max_tokens: int = 8192) -> tuple[float, str]:
    """Return the largest difference of a layout from the same rows run one by one, and its quantity.

    Random rows, of which some branch and some are short, without dropout and autocast: the largest difference of their
    log-probabilities, and that of the gradient of all small weights over its largest entry, whichever is more. The rows
    are longer than the sliding window of the configuration if that cuts rows of at most `max_tokens` tokens. In
    float32 up to 1e-4 is rounding; weights of half precision add their own. Infinite for models that cannot run on the
    layout or give NaN.
    """
    try:
        together, alone = _probes(model, (layout, False), (None, False), max_tokens=max_tokens)
    except (TrainingError, RuntimeError) as error:  # what a kernel raises that the model or the machine does not fit
        return inf, f"{type(model).__name__} does not run so: {error}"
    gaps = [float((found - expected).abs().max()) for found, expected in zip(together, alone, strict=True)]
    gaps[1:] = [gap / (float(expected.abs().max()) or 1.0) for gap, expected in zip(gaps[1:], alone[1:], strict=True)]
    worst = inf if any(map(isnan, gaps)) else max(gaps)
    return worst, f"{type(model).__name__} gives other log-probabilities or gradients so (by {worst:.1e})"


def probe_noise(model: Any, layout: Layout, *, max_tokens: int = 8192) -> tuple[float, str]:
    """Return the noise of a layout under autocast to bfloat16, and its quantity; 1 is that of rows one by one.

    The rows of `probe_layout`; the median over tokens of the difference of log-probabilities, and that over entries of the
    gradient, whichever is more. Infinite for models that cannot run so or give NaN.
    """
    try:
        passes = _probes(model, (layout, True), (None, True), (None, False), max_tokens=max_tokens)
    except (TrainingError, RuntimeError) as error:
        return inf, f"{type(model).__name__} does not run so in bfloat16: {error}"
    ratios = []
    for together, alone, exact in zip(*passes, strict=True):
        noise = float((alone - exact).abs().median())
        ratios.append(float((together - exact).abs().median()) / (noise or 1.0))
    worst = inf if any(map(isnan, ratios)) else max(ratios)
    return worst, f"{type(model).__name__} in bfloat16 is {worst:.1f} times as far from float32 so as row by row"


def _probes(model: Any, *hows: tuple[Layout | None, bool], max_tokens: int) -> list[list[Tensor]]:
    """Return what `_probe` returns for each of (layout, whether under autocast to bfloat16), without dropout."""
    device = model.get_input_embeddings().weight.device
    was_training = model.training
    model.eval()
    try:
        least = _LONG_ROW if device.type != "cpu" or mixers_of(model) else _SHORT_ROW
        rows = _probe_rows(model.config.get_text_config(), max_tokens, seed=0, least=least)
        found = []
        for layout, half in hows:
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                found.append(_probe(model, rows, layout, device))
        return found
    finally:
        model.train(was_training)


def _probe(model: Any, rows: list[IntArray], layout: Layout | None, device: torch.device) -> list[Tensor]:
    """Return the log-probabilities of rows, and gradients if there are any; layout None: one by one."""
    head, behind = model.get_output_embeddings(), logit_map(model.config)
    passes = [rows] if layout is not None else [[row] for row in rows]
    logprobs = []
    small = [p for p in model.parameters() if p.requires_grad and p.numel() <= _SMALL]
    with torch.set_grad_enabled(bool(small)):
        for group in passes:
            inputs, index = lay_out(group, layout or "padded", device=device)
            hidden_PD = hidden_states(model, inputs)
            for number, ids_L in enumerate(group):
                slot_L = index(np.full(len(ids_L) - 1, number), np.arange(len(ids_L) - 1))
                targets_L = torch.from_numpy(ids_L[1:]).to(device)
                found_L, _ = fused_logprobs(hidden_PD[slot_L], head.weight, targets_L, bias_V=head.bias, behind=behind)
                logprobs.append(found_L.float())
        found_T = torch.cat(logprobs)
        if not small:
            return [found_T]
        weight_T = torch.linspace(-1, 1, len(found_T), device=device)
        found = torch.autograd.grad((found_T * weight_T).sum(), small, allow_unused=True, materialize_grads=True)
        return [found_T.detach(), torch.cat([gradient.flatten() for gradient in found])]


def _probe_rows(config: Any, max_tokens: int, *, seed: int, least: int = _SHORT_ROW) -> list[IntArray]:
    """Return three rows, of which one leaves the others after a third, these part after two thirds, and two short ones.

    The first has `least` tokens, and more if a sliding window cuts longer ones only.
    """
    window = getattr(config, "sliding_window", None) or 0
    length = least if window >= max_tokens else max(least, window + 24)
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    rng = np.random.default_rng(seed)
    ids_L = rng.integers(config.vocab_size, size=length)
    rows = [ids_L]
    for fork in (length // 3, 2 * length // 3):
        branch_L = rng.integers(config.vocab_size, size=length - 5)
        branch_L[:fork] = ids_L[:fork]
        branch_L[fork] = (ids_L[fork] + 1) % config.vocab_size
        rows.append(branch_L)
    return [*rows, *rng.integers(config.vocab_size, size=(2, length // 3))]
