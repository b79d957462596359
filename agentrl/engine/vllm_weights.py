"""Weights as files, on their way to vLLM's server."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.engine.batched import check_weight
from agentrl.errors import EngineError

_BUCKET_BYTES = 2**31
"""Largest size of a file of weights, and of the copy in memory that it is written from; a larger weight has one of its own."""
_ROUTERS = (".gate.weight", ".router.weight")
"""Ends of names of weights that choose among experts: vLLM keeps some in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the client must know of the model that the server runs."""

    shapes: Mapping[str, torch.Tensor]
    """Its `state_dict`, without values."""
    vocab_size: int
    dtype: torch.dtype
    """What it computes in."""


def read_model(name: str, dtype: torch.dtype) -> ServedModel:
    """Read the configuration of the server's model, and what weights such a model has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot read here the configuration of {name!r}, the model of vLLM's server: {error}. Start the server with "
            "a name on the hub, or with the whole path of a folder that both see"
        ) from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ServedModel(shapes=model.state_dict(), vocab_size=config.get_text_config().vocab_size, dtype=dtype)


async def write_weights(folder: Path, named_tensors: Iterable[tuple[str, torch.Tensor]], model: ServedModel) -> None:
    """Write weights as files that vLLM's loader reads, one bucket after the other.

    Matrices are written in the server's dtype, to which it would round them itself; vectors, of which it keeps some in
    single precision, and routers as they are.

    Raises:
        EngineError: when names or shapes are not the model's. vLLM keeps what is not pushed, and of tied embeddings it
            keeps a packed copy, which would go stale: so all must be there.
    """
    missing, num, size = set(model.shapes), 0, 0
    bucket: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        check_weight(name, tensor, model.shapes)
        missing.discard(name)
        is_rounded = tensor.is_floating_point() and tensor.ndim > 1 and not name.endswith(_ROUTERS)
        dtype = model.dtype if is_rounded else tensor.dtype
        if bucket and size + tensor.numel() * dtype.itemsize > _BUCKET_BYTES:
            await _write_file(folder / f"model-{num:05}.safetensors", bucket)
            bucket, num, size = {}, num + 1, 0
        bucket[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()  # tied weights share their storage
        size += bucket[name].nbytes
    if missing:
        raise EngineError(f"load_weights needs every weight of the model; {min(missing)!r} is missing")
    await _write_file(folder / f"model-{num:05}.safetensors", bucket)


async def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    await asyncio.to_thread(save_file, tensors, path)
    path.chmod(0o644)  # the server may run under another user
