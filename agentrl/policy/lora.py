"""Low-rank adapters: add them through peft, read them merged into the weights, save and load them in peft's format.

    W' = W + alpha / rank * B A

(LoRA, arXiv 2106.09685, section 4.1), where W stays as it is, and A and B are trained; B is 0 at first. `Z` rank, `I` inputs
and `O` outputs of a layer.
"""

import hashlib
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl.distributed.processes import is_main
from agentrl.errors import ConfigError
from agentrl.models.auto_classes import text_modules
from agentrl.policy.config import LoraSettings
from agentrl.recipe.registry import suggest

__all__ = [
    "adapted_layers",
    "adapter_state",
    "add_lora",
    "add_sizes",
    "base_weights",
    "check_adapter",
    "find_layers",
    "has_adapters",
    "holds_adapters",
    "load_adapter",
    "lost_change",
    "merged_weights",
    "round_frozen",
    "save_adapter",
    "weight_changes",
]

_ADAPTER = "default"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_SCALE = ("r", "lora_alpha", "use_rslora", "alpha_pattern")
"""Fields of peft's configuration that set the scale of adapters; other differences show in names or shapes."""
_BASE = "base"
"""Key in the header of an adapter's file: a hash of the weights that it was trained with."""
_NUM_HASHED = 4096
"""Elements of each weight that are hashed."""


def add_lora(model: Any, settings: LoraSettings) -> None:
    """Add adapters to a transformers model, in place; freeze all else. The model computes what it did before.

    It stays of its class. Its linear layers gain children, so that the names in its `state_dict` are others:
    `merged_weights` has those of before. Adapters are in float32, whatever the model is in; A is drawn from torch's
    global generator.

    Raises:
        ConfigError: if peft is not installed, or for target modules that do not exist or cannot be adapted; the model
            may be unusable after the latter.
    """
    peft = _peft()
    layers = find_layers(model, settings.target_modules)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path or None,
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=layers,
    )
    peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    if set(adapted_layers(model)) != set(layers):
        # By their names peft takes dense layers of a mixture for its experts, here and when it loads adapters.
        raise ConfigError(
            f"model.lora.target_modules: peft cannot list all linear layers of {type(model).__name__} from its experts; "
            "set it to those of its attention: [q_proj, k_proj, v_proj, o_proj]"
        )
    for layer in adapted_layers(model).values():
        if layer.weight.is_meta:  # of weights without content peft makes adapters without
            for matrices in (layer.lora_A, layer.lora_B):
                matrices[_ADAPTER].to_empty(device="cpu")
            layer.reset_lora_parameters(_ADAPTER, init_lora_weights=True)
        layer.forward = MethodType(_forward, layer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _forward(layer: Any, inputs: Tensor) -> Tensor:
    """Return the output of an adapted layer, in half precision rounded once.

    peft adds the adapter's output to one that is rounded already: of a young adapter nearly nothing would be left.
    """
    if not _is_half(layer, inputs):
        outputs: Tensor = type(layer).forward(layer, inputs)
        return outputs
    change = layer.lora_B[_ADAPTER](layer.lora_A[_ADAPTER](inputs)) * layer.scaling[_ADAPTER]
    weight_IO = layer.weight if layer.fan_in_fan_out else layer.weight.T
    flat = torch.addmm(change.flatten(0, -2), inputs.flatten(0, -2), weight_IO)
    outputs = flat.unflatten(0, inputs.shape[:-1])
    bias = layer.base_layer.bias
    return outputs if bias is None else outputs + bias.to(outputs.dtype)


def _is_half(layer: Any, inputs: Tensor) -> bool:
    return torch.is_autocast_enabled(inputs.device.type) or layer.weight.dtype.itemsize < 4


class _Sized(nn.Module):
    """A linear layer with an adapter, as `_forward` computes with it."""

    fan_in_fan_out = False  # of fake tensors, `Conv1D`s become layers of the other form
    scaling: ClassVar = {_ADAPTER: 1.0}

    def __init__(self, layer: Any, *, rank: int) -> None:
        super().__init__()
        shape = layer.weight.shape
        outputs, inputs = shape if isinstance(layer, nn.Linear) else shape[::-1]
        self.base_layer = nn.Linear(inputs, outputs, layer.bias is not None, dtype=layer.weight.dtype)
        self.lora_A = nn.ModuleDict({_ADAPTER: nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({_ADAPTER: nn.Linear(rank, outputs, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, inputs: Tensor) -> Tensor:
        if _is_half(self, inputs):
            return _forward(self, inputs)
        changed: Tensor = self.base_layer(inputs) + self.lora_B[_ADAPTER](self.lora_A[_ADAPTER](inputs)) * 1.0
        return changed


def add_sizes(model: Any, settings: LoraSettings) -> None:
    """Add adapters to a model without content, to count what `add_lora` would add; without peft.

    Raises:
        ConfigError: as `find_layers`.
    """
    layers = find_layers(model, settings.target_modules)
    model.requires_grad_(False)
    for name in layers:
        model.set_submodule(name, _Sized(model.get_submodule(name), rank=settings.rank))
        model.get_submodule(name).base_layer.requires_grad_(False)


def round_frozen(model: Any) -> None:
    """Round frozen weights to bfloat16, in place: autocast would round them for each pass, and hold both."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def merged_weights(model: Any, *, is_rounded: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with its adapter merged into it, by its name in the model without adapters.

    In the order of that model's `state_dict`. The sum is computed in float32, and rounded once to the dtype of the weight
    unless `is_rounded` is false. Sharded weights are gathered one at a time, and every rank must go through all of them.
    The model is left as it is. Without adapters these are the entries of its `state_dict`.
    """
    layers, state = adapted_layers(model), model.state_dict()
    for name, weight in base_weights(model):
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or layer not in layers:
            yield name, weight
            continue
        left, right = _change(layer, layers[layer], state)
        merged = weight + left @ right
        yield name, merged.to(weight.dtype) if is_rounded else merged


def base_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight without its adapter, otherwise as `merged_weights`."""
    layers = adapted_layers(model)
    for name, tensor in model.state_dict().items():
        if name.partition(".lora_")[0] not in layers:
            layer, _, kind = name.rpartition(".base_layer.")
            yield (f"{layer}.{kind}" if layer in layers else name), _whole(tensor)


def weight_changes(model: Any) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield for each adapted weight, by its name in the model without adapters, two matrices in float32.

    Their product is the adapter's change of the weight, in the weight's layout. Every rank must go through all.
    """
    state = model.state_dict()
    for name, layer in adapted_layers(model).items():
        yield f"{name}.weight", _change(name, layer, state)


def lost_change(model: Any, dtype: torch.dtype) -> float:
    """Return the share of the adapters' change D of the weights W that is lost if their sum is rounded to a dtype.

        1 - <round(W + D) - round(W), D> / <D, D>

    The products are over all adapted weights; 0 while adapters change nothing. Every rank must call it.
    """
    changes = dict(weight_changes(model))
    arrived, whole = 0.0, 0.0
    for name, weight in base_weights(model):
        if name not in changes:
            continue
        left, right = changes[name]
        change = left @ right
        rounded = (weight + change).to(dtype).float() - weight.to(dtype).float()
        arrived += float((rounded * change).sum(dtype=torch.float64))
        whole += float((change * change).sum(dtype=torch.float64))
    return 1 - arrived / whole if whole else 0.0


def adapter_state(model: Any) -> dict[str, Tensor]:
    """Return the weights of the adapters by their names in peft's files; they are the model's own, not copies."""
    state = _peft().get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    return {f"base_model.model.{name}": tensor for name, tensor in state.items()}


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapters into a folder that `peft.PeftModel.from_pretrained(base_model, folder)` loads.

    Called on every rank, and rank 0 writes.
    """
    state = {name: _whole(tensor).contiguous() for name, tensor in adapter_state(model).items()}
    base = _hash_base(model)
    if is_main():
        save_file(state, folder / _WEIGHTS, metadata={"format": "pt", _BASE: base})
        model.peft_config[_ADAPTER].save_pretrained(str(folder))


def has_adapters(model: Any) -> bool:
    """Return whether `add_lora` prepared a model."""
    return bool(adapted_layers(model))


def holds_adapters(folder: Path) -> bool:
    """Return whether a folder holds adapters, written by `save_adapter` or peft."""
    return (folder / _WEIGHTS).is_file() and (folder / _CONFIG).is_file()


def check_adapter(model: Any, folder: Path) -> None:
    """Check that a folder of `save_adapter` or peft holds an adapter of this model; called on every rank.

    Raises:
        ConfigError: if the folder holds no adapters, adapters of other layers, size or scale, or those that `save_adapter`
            wrote for a model with other base weights.
    """
    if not holds_adapters(folder):
        raise ConfigError(f"no adapter in {folder}: it lacks {_WEIGHTS} or {_CONFIG}")
    with safe_open(folder / _WEIGHTS, framework="pt") as file:
        names, trained_with = file.keys(), (file.metadata() or {}).get(_BASE)
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    own = {name: tuple(tensor.shape) for name, tensor in adapter_state(model).items()}
    found = _scale(json.loads((folder / _CONFIG).read_text(encoding="utf-8"))) | saved
    expected = _scale(model.peft_config[_ADAPTER].to_dict()) | own
    if differing := sorted(key for key in found | expected if found.get(key) != expected.get(key)):
        key = differing[0]
        raise ConfigError(
            f"the adapter in {folder} does not fit model.lora: {key} is {found.get(key)}, expected {expected.get(key)}"
        )
    if trained_with not in (None, _hash_base(model)):  # peft notes none
        raise ConfigError(
            f"model.name_or_path: the adapter in {folder} was trained with other weights than those of "
            f"{model.config.name_or_path or 'this model'}; name the model that the run began with, or begin another run"
        )


def load_adapter(model: Any, folder: Path) -> None:
    """Load adapters that `save_adapter` or peft wrote into a model that `add_lora` prepared; called on every rank.

    Raises:
        ConfigError: as `check_adapter`.
    """
    check_adapter(model, folder)
    saved = load_file(folder / _WEIGHTS)
    for name, tensor in adapter_state(model).items():
        new = saved[name]
        tensor.copy_(
            distribute_tensor(new, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else new
        )


def _hash_base(model: Any) -> str:
    """Return a hash of some of the weights that are adapted, as bfloat16 rounds them: another fine-tuning has another."""
    layers = list(adapted_layers(model).values())
    digest = hashlib.sha256()
    for layer in layers[:: max(1, len(layers) // 16)]:
        weight = _whole(layer.weight).flatten()[:_NUM_HASHED]
        rounded = weight.to(torch.bfloat16) if weight.is_floating_point() else weight  # quantized ones are packed
        digest.update(rounded.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def find_layers(model: Any, targets: Literal["all-linear"] | tuple[str, ...]) -> list[str]:
    """Return the names of the linear layers to adapt, of those that text goes through.

    Raises:
        ConfigError: for targets that do not exist or cannot be adapted.
    """
    from transformers.pytorch_utils import Conv1D

    read = {id(one) for part in text_modules(model) for one in part.modules()}
    kept = {id(model.get_output_embeddings()), *(id(one) for router in _routers(model) for one in router.modules())}
    modules = [(name, module) for name, module in model.named_modules() if id(module) in read - kept]
    known = [name for name, module in modules if isinstance(module, nn.Linear | Conv1D)]
    if targets == "all-linear":
        return known
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in known):
            endings = {name.rpartition(".")[2] for name in known}
            raise ConfigError(
                f"model.lora.target_modules: {type(model).__name__} has no linear layer {target!r} that can be adapted (its "
                f"head and its embeddings cannot).{suggest(target, endings)}"
            )
    return [name for name in known if any(f".{name}".endswith(f".{target}") for target in targets)]


def _routers(model: Any) -> Iterator[nn.Module]:
    """Yield the router of each layer; some are linear layers."""
    for layer in model.modules():
        children = dict(layer.named_children())
        if "experts" in children:
            yield from (children[name] for name in ("gate", "router", "classifier") if name in children)


def _change(name: str, layer: Any, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    lora_a_ZI, lora_b_OZ = (_whole(state[f"{name}.lora_{matrix}.{_ADAPTER}.weight"]) for matrix in "AB")
    lora_b_OZ = lora_b_OZ * layer.scaling[_ADAPTER]
    # GPT-2 keeps its weights as (in, out).
    return (lora_a_ZI.T, lora_b_OZ.T) if layer.fan_in_fan_out else (lora_b_OZ, lora_a_ZI)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _scale(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that set the scale of adapters; None if off."""
    return {key: config.get(key) or None for key in _SCALE}


def adapted_layers(model: Any) -> dict[str, Any]:
    """Return the layers that have an adapter, by name: those with attributes of peft, which may not be installed."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(f"model.lora: needs peft ({error}); pip install 'agentrl[lora]'") from error
