"""Layers of a model that are compiled, each by itself (`train.compile`)."""

from typing import Any

import torch
from torch import nn

from agentrl.errors import ConfigError

_LIMIT = 64
"""Graphs of one layer's code: with and without gradient, for one line and several, by the number of lengths of packed rows."""


def compile_layers(model: Any, device: torch.device, *, backend: str = "inductor") -> None:
    """Compile each layer of a transformers model by itself, for passes of any shape.

    Weights keep their names, and copies of the model are not compiled.

    Raises:
        ConfigError: if this machine or the model has not what that takes.
    """
    names = set(model._no_split_modules or ())
    layers: list[nn.Module] = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"train.compile: {type(model).__name__} does not name its layers; set it to none")
    if lacking := _lacking(device):
        raise ConfigError(f"train.compile: {lacking}, or set it to none")
    torch._dynamo.config.recompile_limit = max(_LIMIT, torch._dynamo.config.recompile_limit)
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def _lacking(device: torch.device) -> str | None:
    """Return what has to be installed or changed before torch can compile for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if torch._dynamo.config.disable:
        return "torch is told not to compile (TORCHDYNAMO_DISABLE), as by vLLM in this process on a CPU; use a server for it"
    if device.type != "cpu":
        return None if has_triton() else "install Triton (pip install triton; on Windows triton-windows)"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "install a C++ compiler (apt install g++; on Windows the build tools of Visual Studio)"
    return None
