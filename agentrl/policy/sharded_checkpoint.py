"""Loading of checkpoints whose weights are never whole on one rank: each reads its part from the files.

The model is made on torch's device `meta`, without content, and sharded; then its parts are put in.
"""

import copy
from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.distributed.processes import num_processes, process_index
from agentrl.models.auto_classes import LAYER_KINDS, auto_class, name_body, with_layers
from agentrl.policy.model import (
    checkpoint_errors,
    load_pretrained,
    open_checkpoint,
    quantization,
)

_PLAN = {"layers.*": "free_full_weight"}
"""Default plan by which transformers shards a family that has none: the rest goes with the whole model."""
_VOCABULARY = 512


def load_sharded(
    name_or_path: str, *, num_shards: int, attention: str | None = None, field: str = "model.name_or_path"
) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return (model on `meta`, tokenizer, this process's part of each weight in float32); called on every process.

    A part is what FSDP2 gives a process: of the first dimension, an even share in the order of the processes, of which
    `num_shards` in a row have all. Of what does not come in parts (`can_load_sharded`) each process reads the whole, and has
    none.

    Raises:
        ConfigError: as `load_pretrained`.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    source, config, tokenizer = open_checkpoint(name_or_path, field=field)
    if not can_load_sharded(config, num_processes()):
        return *load_pretrained(name_or_path, attention=attention, field=field), {}
    family, planned = auto_class(config), copy.deepcopy(config)
    text = planned.get_text_config()
    text.base_model_fsdp_plan = text.base_model_fsdp_plan or _PLAN
    with checkpoint_errors(name_or_path, field=field):
        loaded = family.from_pretrained(
            source,
            config=planned,
            dtype=torch.float32,
            attn_implementation=attention,
            distributed_config=DistributedConfig(fsdp_size=num_processes()),
        )
    with torch.device("meta"):
        model = name_body(family.from_config(config, dtype=torch.float32, attn_implementation=attention).eval())
    for name, buffer in loaded.named_buffers():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, buffer)
    model.generation_config, model.config.name_or_path = loaded.generation_config, source
    weights = ((name, weight.detach()) for name, weight in loaded.named_parameters())
    if num_shards == num_processes():
        return model, tokenizer, {name: weight.to_local() for name, weight in weights}
    return model, tokenizer, {name: _rows(weight.full_tensor(), num_shards) for name, weight in weights}


def _rows(whole: Tensor, num_shards: int) -> Tensor:
    """Return a copy of this process's part of a weight; transformers reads another for each process alone."""
    rows = ceil(len(whole) / num_shards)
    return whole[process_index() % num_shards * rows :][:rows].clone()


def can_load_sharded(config: Any, num: int) -> bool:
    """Return whether each of `num` ranks can read its part of a checkpoint.

    transformers shards neither quantized weights, nor a mixture whose last rank would have no expert after each rank before
    it has had an even share, rounded up.
    """
    text, names = config.get_text_config(), ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(text, name, None))), None)
    return quantization(config) is None and (experts is None or ceil(experts / num) * (num - 1) < experts)


def materialize(model: nn.Module, sharded_checkpoint: Mapping[str, Tensor]) -> None:
    """Put this rank's parts of weights, by their names in the checkpoint, into a model that is sharded on `meta`."""
    for name, weight in model.named_parameters():
        if isinstance(weight, DTensor) and weight.is_meta:
            part = DTensor.from_local(
                sharded_checkpoint[name.replace(".base_layer.", ".")].to(weight.device_mesh.device_type, weight.dtype),
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
            # In place of the weight itself, which FSDP2 and a tied head refer to.
            torch.utils.swap_tensors(weight, nn.Parameter(part, weight.requires_grad))


def small_like(model: Any, device: torch.device) -> Any:
    """Return a model of the same family and widths with random weights: a layer of each kind, two at least, and few tokens.

    What layouts it can be run on is known without the weights of the model itself.
    """
    text = model.config.get_text_config()
    kinds = [list(getattr(text, name, None) or ()) for name in LAYER_KINDS]
    firsts = [layers.index(kind) for layers in kinds for kind in layers]
    num = 1 + max([1, getattr(text, "first_k_dense_replace", None) or 0, *firsts])
    config = with_layers(model.config, num)
    small = config.get_text_config()
    small.vocab_size = min(_VOCABULARY, small.vocab_size)
    small.pad_token_id = None if small.pad_token_id is None else 0  # one that is in the small vocabulary
    if hasattr(small, "vocab_size_per_layer_input"):
        small.vocab_size_per_layer_input = small.vocab_size
    small.initializer_range = small.hidden_size**-0.5  # so that tokens matter to one another at any width
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        made = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation=model.config._attn_implementation
        )
    return name_body(made.eval())
