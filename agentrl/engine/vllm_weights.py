"""Weights on their way to vLLM's server: in which dtype, in which order, and as files."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from agentrl.engine.batched import check_weight
from agentrl.engine.model_class import auto_class
from agentrl.engine.vllm_common import BACKEND, EXTENSION
from agentrl.engine.weight_channel import LEFT, RIGHT, Weight
from agentrl.errors import EngineError

_BUCKET_BYTES = 2**24
"""Largest size of what is handed over at once, of which there is a copy in memory; a larger weight is handed over alone."""
_COMPARED = 2**22
"""Numbers of a weight that are rounded at once to see whether they stay as they are."""
_ROUTERS = (".gate.weight", ".router.weight")
"""Ends of names of weights that choose among experts: vLLM keeps some in single precision."""


class Answer(NamedTuple):
    """What a server says of itself."""

    name: str
    """Of its model."""
    dtype: torch.dtype
    """What it computes in."""
    logprobs_mode: str
    num_workers: int
    """Processes of it that can take weights from a channel, all of them. 0: it reads files alone."""
    is_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the client must know of the model that the server runs."""

    shapes: Mapping[str, torch.Tensor]
    """Its `state_dict`, without values."""
    vocab_size: int
    dtype: torch.dtype
    num_workers: int = 0
    is_gpu: bool = False
    ties: Mapping[str, str] = field(default_factory=dict)
    """Weights that are another one, by that one's name."""


def read_answer(answer: Any) -> Answer:
    """Take what matters here from a server's configuration."""
    config = answer["vllm_config"]
    model, workers = config["model_config"], config["parallel_config"]
    transfer = config.get("weight_transfer_config") or {}
    can_receive = workers["worker_extension_cls"] == EXTENSION and transfer.get("backend") == BACKEND
    return Answer(
        name=str(model["model"]),
        dtype=getattr(torch, model["dtype"].removeprefix("torch.")),
        logprobs_mode=model["logprobs_mode"],
        num_workers=workers["world_size"] if can_receive and workers["data_parallel_size"] == 1 else 0,
        is_gpu=config["device_config"]["device"].startswith("cuda"),
    )


def read_model(answer: Answer) -> ServedModel:
    """Read the configuration of the server's model, and what weights such a model has."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(answer.name)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot read here the configuration of {answer.name!r}, the model of vLLM's server: {error}. Start the server "
            "with a name on the hub, or with the whole path of a folder that both see"
        ) from error
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return ServedModel(
        shapes=model.state_dict(),
        ties=find_ties(model),
        vocab_size=config.get_text_config().vocab_size,
        dtype=answer.dtype,
        num_workers=answer.num_workers,
        is_gpu=answer.is_gpu,
    )


def find_ties(model: torch.nn.Module) -> dict[str, str]:
    """Return which parameters of a model are another one, by that one's name."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(weight), name) for name, weight in model.named_parameters(remove_duplicate=False)
    }
    return {name: other for name, other in names.items() if name != other}


def in_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], model: ServedModel, *, is_exact: bool = False
) -> Iterator[list[Weight]]:
    """Yield weights, some at a time, each with the dtype in which it is handed over.

    That is the server's for matrices, to which it would round them itself; vectors, of which it keeps some in single
    precision, and routers stay as they are, and where it is to be exact all that rounding would change.

    Raises:
        EngineError: when names or shapes are not the model's. vLLM keeps what is not pushed, and of tied embeddings it
            keeps a packed copy, which would go stale: so all must be there.
    """
    missing = set(model.shapes)

    def checked() -> Iterator[Weight]:
        for name, tensor in named_tensors:
            check_weight(name, tensor, model.shapes)
            missing.discard(name)
            if name in model.ties:  # goes with the other one
                continue
            names = (name, *(tied for tied, other in model.ties.items() if other == name))
            is_rounded = tensor.is_floating_point() and tensor.ndim > 1 and not name.endswith(_ROUTERS)
            if is_rounded and is_exact:
                parts = tensor.flatten().split(_COMPARED)  # of a whole embedding two copies would be held
                is_rounded = all(part.to(model.dtype).to(part.dtype).equal(part) for part in parts)
            yield Weight(names, tensor, model.dtype if is_rounded else tensor.dtype)
        if missing:
            raise EngineError(f"load_weights needs every weight of the model; {min(missing)!r} is missing")

    return _in_buckets(checked())


def changes_in_buckets(
    changes: Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]], model: ServedModel
) -> Iterator[list[Weight]]:
    """Yield what is added to weights, as `in_buckets` yields weights; each product is two that the worker multiplies.

    Raises:
        EngineError: when names or shapes are not the model's.
    """

    def checked() -> Iterator[Weight]:
        for name, (left, right) in changes:
            check_weight(name, torch.empty(left.shape[0], right.shape[1], device="meta"), model.shapes)
            yield Weight((name + LEFT,), left, left.dtype)
            yield Weight((name + RIGHT,), right, right.dtype)

    return _in_buckets(checked())


def _in_buckets(weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    bucket: list[Weight] = []
    size = 0
    for weight in weights:
        if bucket and size + weight.num_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.num_bytes
    yield bucket


async def write_weights(folder: Path, buckets: Iterable[list[Weight]], *, has_ties: bool) -> None:
    """Write weights as files that vLLM's loader reads, a bucket in each.

    Args:
        folder: where.
        buckets: the weights.
        has_ties: weights that are another one are written too, each in a file of its own.
    """
    num_files = 0
    for bucket in buckets:
        files = [[(weight.names[0], weight) for weight in bucket]]
        if has_ties:
            files += [[(name, weight)] for weight in bucket for name in weight.names[1:]]
        for file in files:
            path = folder / f"model-{num_files:05}.safetensors"
            tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, (_, tensor, dtype) in file}
            await asyncio.to_thread(save_file, tensors, path)
            path.chmod(0o644)  # the server may run under another user
            num_files += 1
