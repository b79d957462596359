"""Recurrent parts of hybrid models, which compute rows one by one in every layout of a pass.

`B` lines of a pass, `L` slots of a line, `P = B * L` slots of a pass, `R` rows, `W` tokens of the longest row or of a trunk,
`D` hidden size, `N` slots that recurrent parts compute.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.errors import TrainingError
from agentrl.policy.layout.tree import IntArray, common_prefix

RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Names in transformers of layers with a recurrent part."""
_HOOKED = "_agentrl_sees_rows"
_ROWS = "agentrl_rows"
"""Argument of a pass that holds its rows, and attribute in which a layer keeps them as it runs."""
_TRUNKS = "agentrl_trunks"
"""Attribute in which a mixer keeps the states of trunks as it runs."""


_LEAST_SAVED = 64
"""Tokens that a trunk must save: about the cost of a call of its own, for kernels take whole chunks."""


class Trunk(NamedTuple):
    """Consecutively computed slots: a prefix that rows share, or the rest of one row."""

    path_W: IntArray
    parent: int
    """The trunk that it continues; -1: it begins rows."""


def fork(paths: Sequence[IntArray], *, continues: bool) -> tuple[list[Trunk], list[Trunk]]:
    """Return the shared prefixes that are worth computing once, parents first, and the rest of each row.

    Args:
        paths: slots of the tokens of each row. Rows that another begins with are left out.
        continues: whether recurrent parts can continue from a state. False: each row is whole.
    """
    paths = sorted(_longest(paths), key=lambda path: int(path[-1]))  # a tree's slots are in depth-first order
    shared_R = [0, *(common_prefix(*pair) for pair in pairwise(paths))]
    trunks: list[Trunk] = []
    rows: list[Trunk] = []
    todo = [(0, len(paths), 0, -1)] if paths else []
    while todo:
        first, stop, begin, parent = todo.pop()
        if stop - first == 1 or not continues:
            rows += [Trunk(path[begin:], parent) for path in paths[first:stop]]
            continue
        end = min(shared_R[first + 1 : stop])
        cuts = [first, *(row for row in range(first + 1, stop) if shared_R[row] == end), stop]
        if end - begin > 1 and (stop - first - 1) * (end - begin) >= _LEAST_SAVED:
            trunks.append(Trunk(paths[first][begin:end], parent))
            begin, parent = end, len(trunks) - 1
        todo += [(*cut, begin, parent) for cut in pairwise(cuts)]
    return trunks, rows


def num_computed(paths: Sequence[IntArray], *, continues: bool) -> int:
    """Return the number of slots that recurrent parts compute: those of trunks, and the padded rests of rows."""
    trunks, rows = fork(paths, continues=continues)
    return sum(len(trunk.path_W) for trunk in trunks) + len(rows) * max((len(row.path_W) for row in rows), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Positions of the rows in a pass, as tensors on its device."""

    trunks: list[tuple[Tensor, int]]
    """Slots of each trunk, (W,), and the trunk that it continues; -1: none."""
    slot_RW: Tensor
    """Slot of each token in the rest of each row; shorter rests end in arbitrary slots."""
    parent_R: Tensor
    """The trunk that each continues; the one after the last: none."""
    read_BL: Tensor
    """Index of each slot's value among the N computed slots: all trunks, then `R * W`."""

    @classmethod
    def from_paths(cls, paths: Sequence[IntArray], ids_BL: Tensor, *, continues: bool) -> "Rows":
        """Return the rows whose tokens are in the given slots of a pass (see `fork`)."""
        device = ids_BL.device
        trunks, rows = fork(paths, continues=continues)
        width = max(2, *(len(row.path_W) for row in rows))  # a single token would be put in place
        slot_RW = np.zeros((len(rows), width), dtype=np.int64)
        read_P = np.zeros(ids_BL.numel(), dtype=np.int64)
        begin = 0
        for path_W, _ in trunks:
            read_P[path_W] = begin + np.arange(len(path_W))
            begin += len(path_W)
        for row, (path_W, _) in enumerate(rows):
            slot_RW[row, : len(path_W)] = path_W
            read_P[path_W] = begin + row * width + np.arange(len(path_W))
        parent_R = np.array([row.parent if row.parent >= 0 else len(trunks) for row in rows])
        return cls(
            [(torch.from_numpy(path_W).to(device), parent) for path_W, parent in trunks],
            torch.from_numpy(slot_RW).to(device),
            torch.from_numpy(parent_R).to(device),
            torch.from_numpy(read_P).to(device).view(ids_BL.shape),
        )


class _State:
    """State before and after a recurrent part: transformers' cache of one layer, which writes nothing in place."""

    record_past = True
    """Asked before a single token is put in place."""

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        """Begin with the last inputs of the convolution and a state, or as a row does."""
        self.conv_states, self.recurrent_states = [conv], [recurrent]
        self.end: list[Tensor] = []
        """The last inputs of the convolution and the state, once it has run."""

    @classmethod
    def branched(cls, trunks: Sequence["_State"], parent_R: Tensor) -> "_State":
        """Return the initial states of rows that continue trunks; that after the last trunk is a state of zeros."""
        ends = zip(*(trunk.end for trunk in trunks), strict=True)
        return cls(*(torch.cat([*of_all, torch.zeros_like(of_all[0])])[parent_R] for of_all in ends))

    @property
    def layers(self) -> Any:
        """Return itself in the place of every layer."""
        return defaultdict(lambda: self)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return whether there is an earlier state."""
        return self.conv_states[0] is not None

    def update_conv_state(self, conv_states: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        """Keep the last inputs, and return all with those before."""
        before = self.conv_states[0]
        full = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self.end = [nn.functional.pad(full, (conv_kernel_size, 0))[..., -conv_kernel_size:]]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Note the state."""
        self.end.append(recurrent_states)
        return recurrent_states


def mixers_of(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Return the recurrent parts that text goes through, each named after its layer: modules with a convolution over tokens.

    So have Mamba, gated delta nets and short convolutions in transformers; attention and feed-forward parts have none. One that
    needs more than hidden states (RecurrentGemma's, which reads positions) is not among them: it could not be given rows.
    """
    return [
        (layer, mixer)
        for layer in model.get_decoder().modules()
        for mixer in layer.children()
        if any(isinstance(part, nn.Conv1d) for part in mixer.children())
        and [name for name, one in signature(mixer.forward).parameters.items() if _is_needed(one)] == ["hidden_states"]
    ]


def _is_needed(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind not in (
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    )


def can_continue(model: Any) -> bool:
    """Return whether all recurrent parts of a model continue a state with more than a token, which not all kernels do.

    Their code shows it: a part that keeps a state passes the initial state to its kernel.
    """
    return all(_can_continue(type(mixer).forward) for _, mixer in mixers_of(model))


@cache
def _can_continue(forward: Callable[..., Any]) -> bool:
    if _cache_argument(forward) is None:
        return False
    try:
        code = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return False
    return "update_conv_state" in code and ("update_recurrent_state" not in code or "initial_state" in code)


def _cache_argument(forward: Callable[..., Any]) -> str | None:
    names = signature(forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in names), None)


def see_rows(model: Any) -> bool:
    """Let the recurrent parts of a model see the rows that a pass is given as `agentrl_rows`; without it they work as always.

        out[slot] = mixer(hidden[slots of a row that holds the slot])[position in it]

    What rows share is computed once where the model `can_continue` and that saves anything: a trunk after the other, and then
    what is left of all rows, each from the state of its trunk. Else it is computed for each row, and once by all other parts
    of the model. A layer that gradient checkpointing runs again gets the rows of its own pass again. Returns whether the
    model has such parts.
    """
    found = mixers_of(model)
    for layer, mixer in found:
        if not hasattr(mixer, _HOOKED):
            setattr(mixer, _HOOKED, True)
            layer.register_forward_pre_hook(_take_rows, with_kwargs=True)
            mixer.register_forward_pre_hook(_apart, with_kwargs=True)
            mixer.register_forward_hook(_together)
    return bool(found)


def _take_rows(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    rows = kwargs.pop(_ROWS, None)
    for mixer in layer.children():
        if hasattr(mixer, _HOOKED):
            setattr(mixer, _ROWS, rows)
    return args, kwargs


def _apart(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    rows: Rows | None = getattr(mixer, _ROWS, None)
    if rows is None:
        return None
    hidden_PD: Tensor = (args[0] if args else kwargs["hidden_states"]).flatten(0, 1)
    name = str(_cache_argument(type(mixer).forward))
    states = list[_State]()
    out = list[Tensor]()
    for slot_W, parent in rows.trunks:
        state = _State(*states[parent].end) if parent >= 0 else _State()
        out.append(_only(mixer, mixer.forward(hidden_PD[slot_W][None], **{name: state})).flatten(0, 1))
        states.append(state)
    setattr(mixer, _TRUNKS, out)
    begun = {name: _State.branched(states, rows.parent_R)} if states else {}
    return (hidden_PD[rows.slot_RW],), begun  # no mask, and no cache of others: rows begin at their first token


def _together(mixer: nn.Module, args: tuple[Any, ...], out_RWD: Any) -> Tensor | None:  # noqa: ARG001
    rows: Rows | None = getattr(mixer, _ROWS, None)
    if rows is None:
        return None
    trunks: list[Tensor] = mixer.__dict__.pop(_TRUNKS)
    return torch.cat([*trunks, _only(mixer, out_RWD).flatten(0, 1)])[rows.read_BL]


def _only(mixer: nn.Module, out: Any) -> Tensor:
    if not isinstance(out, Tensor):
        raise TrainingError(f"{type(mixer).__name__} returns more than hidden states; its rows must be padded")
    return out


def _longest(paths: Sequence[IntArray]) -> list[IntArray]:
    """Return the paths that no other begins with, each once, and without empty ones."""
    goes_on_P = np.zeros(max((int(path.max()) for path in paths if len(path)), default=-1) + 1, dtype=bool)
    for path in paths:
        goes_on_P[path[:-1]] = True
    ends = {int(path[-1]): path for path in paths if len(path) and not goes_on_P[path[-1]]}
    return list(ends.values())
