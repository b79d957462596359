"""Optimizers by name: torch's AdamW, and those of bitsandbytes, which keep their state in 8 bits or page it out."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import nn

from agentrl.errors import ConfigError
from agentrl.registry import suggest

__all__ = ["OptimizerName", "make_optimizer"]

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
"""`adamw`: torch's, fused. The others are of bitsandbytes. `8bit`: both running means are kept in 8 bits, with one scale for
each 256 of them (arXiv 2110.02861), but for weights of less than 4096 entries. `paged`: the state moves to the CPU's memory
while the GPU's is full; on a CPU nothing is paged, and bitsandbytes warns."""

_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Return an optimizer (an `OptimizerName`) of those parameters that require a gradient.

    Raises:
        ConfigError: for a name that does not exist, or what is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    settings: dict[str, Any] = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
    if name == "adamw":
        return torch.optim.AdamW(trained, **settings, fused=True)
    if name not in _BITSANDBYTES:
        raise ConfigError(f"train.optimizer: there is no {name!r}.{suggest(name, get_args(OptimizerName))}")
    try:
        optimizers = import_module("bitsandbytes").optim
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer: {name} needs bitsandbytes ({error}); pip install 'agentrl[bitsandbytes]', or set it to adamw"
        ) from error
    optimizer: torch.optim.Optimizer = getattr(optimizers, _BITSANDBYTES[name])(trained, **settings)
    return optimizer
