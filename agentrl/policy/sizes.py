"""What a model's weights and passes take, counted without computing anything.

The model is made of fake tensors, which have sizes and no content: a pass over it takes a tenth of a second, whatever its size.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentrl.engine.model_class import auto_class, name_body, with_layers
from agentrl.policy.autocast import cast_experts
from agentrl.policy.config import LoraSettings
from agentrl.policy.lora import add_lora, round_frozen
from agentrl.policy.towers import freeze_towers
from agentrl.policy.tree_model import no_mask

_NAME = "agentrl_sizes"


class Weights(NamedTuple):
    """Numbers of weights."""

    total: int
    trained: int
    layer: int
    """Of the largest layer."""
    outside: int
    """Of what is in no layer: embedding and head."""
    embedding: int
    """Of the embedding, where it is trained."""
    head: int
    """Of the head, where it is trained."""
    is_tied: bool
    """Head and embedding are one."""


class Kept(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass."""

    layer: int
    """Of each layer."""
    rest: int
    """Of what comes before and after the layers."""
    largest: int
    """Of the largest tensor that a layer keeps."""


class Sizes:
    """What is counted of one model, each of it once."""

    def __init__(self, config: Any, lora: LoraSettings | None) -> None:
        """Count nothing yet.

        Args:
            config: of the model.
            lora: adapters, where these are trained.
        """
        self.config = config
        self.kept = cache(partial(count_kept, config, lora))
        """`count_kept` of this model."""
        self.of_pass = cache(partial(count_pass, config, lora))
        """`count_pass` of this model."""
        self._lora = lora

    @cached_property
    def weights(self) -> Weights:
        """Those of the model as it is trained."""
        return count_weights(self.config, self._lora)

    @cached_property
    def base(self) -> Weights:
        """Those of the model without adapters."""
        return self.weights if self._lora is None else count_weights(self.config, None)


def count_weights(config: Any, lora: LoraSettings | None) -> Weights:
    """Count the weights of a model by its configuration."""
    with _made(config, lora, dtype=torch.float32) as model:
        sizes = {id(p): p.numel() for p in model.parameters()}
        names = set(model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        in_layers = [{id(p): p.numel() for p in layer.parameters()} for layer in layers]
        outside = sizes.keys() - {number for layer in in_layers for number in layer}
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return Weights(
            total=sum(sizes.values()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            layer=max((sum(layer.values()) for layer in in_layers), default=0),
            outside=sum(sizes[number] for number in outside),
            embedding=embedding.numel() if embedding.requires_grad else 0,
            head=head.numel() if head.requires_grad else 0,
            is_tied=head is embedding,
        )


def count_kept(
    config: Any,
    lora: LoraSettings | None,
    *,
    num_tokens: int,
    weights: torch.dtype,
    autocast: bool,
    checkpointing: bool,
) -> Kept:
    """Count what a pass over `num_tokens` tokens keeps, with attention that keeps no scores.

    Args:
        config: of the model.
        lora: adapters, where these are trained.
        num_tokens: of the pass.
        weights: dtype that the weights are in when layers are computed.
        autocast: to bfloat16; copies of float32 weights that it makes are among what is kept.
        checkpointing: layers keep their inputs alone.
    """
    text = config.get_text_config()
    # The grouped product of experts has fake tensors in half precision alone; what else is kept is of the same dtype.
    scale = 2 if weights == torch.float32 and not autocast and getattr(text, "num_experts_per_tok", None) else 1
    weights = torch.bfloat16 if scale == 2 else weights
    both = [
        _kept_by(with_layers(config, num), lora, num_tokens, weights, autocast=autocast, checkpointing=checkpointing)
        for num in (1, 2)
    ]
    (one, _), (two, largest) = ((scale * size, scale * most) for size, most in both)
    if text.num_hidden_layers == 1:
        return Kept(layer=0, rest=one, largest=largest)
    return Kept(layer=two - one, rest=2 * one - two, largest=largest)


def _kept_by(
    config: Any,
    lora: LoraSettings | None,
    num_tokens: int,
    weights: torch.dtype,
    *,
    autocast: bool,
    checkpointing: bool,
) -> tuple[int, int]:
    """Return the bytes that all storages of a pass have together, and the largest."""
    kept: dict[int, tuple[int, Tensor]] = {}
    with _made(config, lora, dtype=weights) as model:
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes(), tensor  # the tensor, so that no other gets its place
            return tensor

        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            hidden = model.base_model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
            keep(hidden.last_hidden_state)
    sizes = [size for size, _ in kept.values()]
    return sum(sizes), max(sizes)


def count_pass(config: Any, lora: LoraSettings | None, *, num_tokens: int, dtype: torch.dtype) -> int:
    """Count the most that a pass without gradients has at once beside the weights, where no cache is kept.

    Args:
        config: of the model.
        lora: adapters, where these are trained.
        num_tokens: of the pass.
        dtype: of weights and pass.
    """
    scale = 2 if dtype == torch.float32 and getattr(config.get_text_config(), "num_experts_per_tok", None) else 1
    made = _made(with_layers(config, 2), lora, dtype=torch.bfloat16 if scale == 2 else dtype)
    with made as model, torch.no_grad(), _Live(model.parameters()) as live:
        model.base_model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
    most: int = scale * live.most
    return most


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that are there at the same time, without those of some tensors."""

    def __init__(self, without: Iterable[Tensor]) -> None:
        super().__init__()
        self.most, self._now = 0, 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in without}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self._now)
        return out

    def _forget(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self._now -= num_bytes


@contextmanager
def _made(config: Any, lora: LoraSettings | None, *, dtype: torch.dtype) -> Iterator[Any]:
    """Make a model of fake tensors, ready to be trained."""
    cast_experts()
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, no_mask)
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = name_body(auto_class(config).from_config(config, attn_implementation=_NAME, dtype=dtype).train())
        freeze_towers(model)
        if lora is not None:
            add_lora(model, lora)
            if dtype == torch.bfloat16:
                round_frozen(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(model)
        yield model


def _make_fake(model: Any) -> None:
    """Replace tensors without a device by fake ones of the CPU, for which there is autocast."""
    made: dict[int, tuple[Tensor, Any]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = tensor, nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                if tensor is not None:
                    tensors[name] = made[id(tensor)][1]


class _Attention(torch.autograd.Function):
    """Keeps what attention without scores keeps: its inputs, its output, and a number for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)[..., : value.shape[-1]]  # in the order of the query, as the real one
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError


def _attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    out: Tensor = _Attention.apply(query.to(value.dtype), key.to(value.dtype), value)
    return out.transpose(1, 2).contiguous(), None
