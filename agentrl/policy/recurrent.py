"""The recurrent parts of hybrid models see rows one by one, however the rows of a pass are laid out.

`B` lines of a pass, `L` slots of a line, `P = B * L` slots of a pass, `R` rows, `W` tokens of the longest row, `D` hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.errors import TrainingError
from agentrl.policy.tree import IntArray

__all__ = ["RECURRENT", "Rows", "mixers_of", "see_rows"]

RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""What transformers calls layers with a recurrent part."""
_HOOKED = "_agentrl_sees_rows"
_ROWS = "agentrl_rows"
"""The argument of a pass that holds its rows, and where a layer keeps them as it runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where the rows of a pass are in it, as tensors on its device."""

    slot_RW: Tensor
    """Slot of each token of each row; shorter rows end in slots of no meaning."""
    read_BL: Tensor
    """Where in `R * W` the value of each slot is: that of one of the rows that share it."""

    @classmethod
    def of(cls, paths: Sequence[IntArray], ids_BL: Tensor) -> "Rows":
        """Return the rows whose tokens are in the given slots of a pass, without those that another row begins with."""
        num_slots, device = ids_BL.numel(), ids_BL.device
        paths = _longest(paths, num_slots)
        slot_RW = np.zeros((len(paths), max(map(len, paths))), dtype=np.int64)
        read_P = np.zeros(num_slots, dtype=np.int64)
        for row, path in enumerate(paths):
            slot_RW[row, : len(path)] = path
            read_P[path] = row * slot_RW.shape[1] + np.arange(len(path))
        return cls(torch.from_numpy(slot_RW).to(device), torch.from_numpy(read_P).to(device).view(ids_BL.shape))


def mixers_of(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Return the recurrent parts that text goes through, each after its layer: what has a convolution over tokens.

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


def see_rows(model: Any) -> bool:
    """Let the recurrent parts of a model see the rows that a pass is given as `agentrl_rows`; without, what they always do.

        out[slot] = mixer(hidden[slots of a row that holds the slot])[position in it]

    What rows share is computed for each of them here, and once by all other parts of the model. A layer that gradient
    checkpointing runs again gets the rows of its own pass again. Returns whether the model has such parts.
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
    hidden_BLD: Tensor = args[0] if args else kwargs["hidden_states"]
    return (hidden_BLD.flatten(0, 1)[rows.slot_RW],), {}  # neither mask nor cache: rows begin at their first token


def _together(mixer: nn.Module, args: tuple[Any, ...], out_RWD: Any) -> Tensor | None:  # noqa: ARG001
    rows: Rows | None = getattr(mixer, _ROWS, None)
    if rows is None:
        return None
    if not isinstance(out_RWD, Tensor):
        raise TrainingError(f"{type(mixer).__name__} returns more than hidden states; its rows must be padded")
    return out_RWD.flatten(0, 1)[rows.read_BL]


def _longest(paths: Sequence[IntArray], num_slots: int) -> list[IntArray]:
    """Return the paths that no other begins with, each once, and without empty ones."""
    goes_on_P = np.zeros(num_slots, dtype=bool)
    for path in paths:
        goes_on_P[path[:-1]] = True
    ends = {int(path[-1]): path for path in paths if len(path) and not goes_on_P[path[-1]]}
    return list(ends.values())
