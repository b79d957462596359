"""Memory plan of a run: bytes that each process needs, from the recipe alone, before anything is loaded or rented.

Weights and passes are counted on a model of fake tensors, which have sizes and no content: a pass over it takes a tenth of a
second, whatever its size. Models beside the policy (a teacher, a critic of its own) are not counted.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentrl.chat import local_folder
from agentrl.credit import load_credit
from agentrl.engine.batched import BatchedConfig
from agentrl.engine.transformers.engine import MAX_MASK, SAMPLING_BYTES
from agentrl.engine.vllm.common import check_reloadable, executor_arguments, is_reloadable
from agentrl.engine.vllm.engine import VLLMConfig
from agentrl.errors import ConfigError
from agentrl.models.auto_classes import auto_class, freeze_towers, head_size, layer_configs, name_body, with_layers
from agentrl.models.logits import logit_map
from agentrl.models.moe import cast_experts
from agentrl.policy.config import LoraSettings
from agentrl.policy.layout.tree_attention import no_mask
from agentrl.policy.logprobs import tile_elements
from agentrl.policy.lora import add_sizes, round_frozen
from agentrl.policy.model import local_config
from agentrl.policy.sharded_checkpoint import can_load_sharded
from agentrl.recipe.config import Recipe, deployed
from agentrl.types import Need

_NAME = "agentrl_sizes"


class Weights(NamedTuple):
    """Numbers of weights."""

    total: int
    trained: int
    layer: int
    """Weights of the largest layer."""
    largest: int
    """Elements of the largest tensor that is trained."""
    outside: int
    """Weights in no layer: embedding and head."""
    embedding: int
    """Weights of the embedding, if it is trained."""
    head: int
    """Weights of the head, if it is trained."""
    is_tied: bool
    """Whether head and embedding are one."""


class Kept(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass."""

    layer: int
    """Bytes of each layer."""
    rest: int
    """Bytes before and after the layers."""
    largest: int
    """Bytes of the largest tensor that a layer keeps."""


class Sizes:
    """Counts of one model, each computed once."""

    def __init__(self, config: Any, lora: LoraSettings | None) -> None:
        """Count nothing yet.

        Args:
            config: configuration of the model.
            lora: adapters, if these are trained.
        """
        self.config = config
        self.kept = cache(partial(count_kept, config, lora))
        """`count_kept` of this model."""
        self.of_pass = cache(partial(count_pass, config, lora))
        """`count_pass` of this model."""
        self._lora = lora

    @cached_property
    def weights(self) -> Weights:
        """Weights of the model as it is trained."""
        return count_weights(self.config, self._lora)

    @cached_property
    def base(self) -> Weights:
        """Weights of the model without adapters."""
        return self.weights if self._lora is None else count_weights(self.config, None)

    @cached_property
    def adapted(self) -> "Sizes":
        """Counts of the same model with adapters of default size."""
        return Sizes(self.config, LoraSettings())


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
            largest=max(p.numel() for p in model.parameters() if p.requires_grad),
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
    """Count the bytes that a pass over `num_tokens` tokens keeps, with attention that keeps no scores.

    Args:
        config: configuration of the model.
        lora: adapters, if these are trained.
        num_tokens: tokens of the pass.
        weights: dtype of the weights when layers are computed.
        autocast: whether there is autocast to bfloat16; the copies of float32 weights that it makes are counted.
        checkpointing: whether layers keep their inputs alone.
    """
    text = config.get_text_config()
    # The grouped product of experts has fake tensors in half precision alone; what else is kept is of the same dtype.
    scale = 2 if weights == torch.float32 and not autocast and getattr(text, "num_experts_per_tok", None) else 1
    weights = torch.bfloat16 if scale == 2 else weights

    def kept_by(num_layers: int) -> tuple[int, int]:
        few = with_layers(config, num_layers)
        options: dict[str, Any] = {"autocast": autocast, "checkpointing": checkpointing}
        size, copy, other = _at_length(few, num_tokens, lambda num: _kept_by(few, lora, num, weights, **options))
        return scale * size, scale * max(copy, other)

    (one, _), (two, largest) = kept_by(1), kept_by(2)
    if text.num_hidden_layers == 1:
        return Kept(layer=0, rest=one, largest=largest)
    return Kept(layer=two - one, rest=2 * one - two, largest=largest)


_CHUNK = 64
"""Tokens of a round of linear attention's loop."""


def _at_length(config: Any, num_tokens: int, count: Callable[[int], Sequence[int]]) -> list[int]:
    """Return what `count` finds in a pass of `num_tokens` tokens.

    Linear attention goes through a pass in rounds, each of which takes milliseconds with fake tensors and keeps as much as
    another: what two short passes keep, with as many tokens in the last round, tells the rest.
    """
    rounds, rest = divmod(num_tokens, _CHUNK)
    if rounds < 6 or "linear_attention" not in (getattr(config.get_text_config(), "layer_types", None) or ()):
        return [*count(num_tokens)]
    few = 4  # of so many tokens any tensor is larger than a layer's state
    found = count(rest + few * _CHUNK), count(rest + (few + 1) * _CHUNK)
    return [first + (rounds - few) * (second - first) for first, second in zip(*found, strict=True)]


def _kept_by(
    config: Any,
    lora: LoraSettings | None,
    num_tokens: int,
    weights: torch.dtype,
    *,
    autocast: bool,
    checkpointing: bool,
) -> tuple[int, int, int]:
    """Return the bytes of all storages of a pass together, of the largest copy of a weight, and of the largest other tensor."""
    kept: dict[int, tuple[int, Tensor]] = {}
    with _made(config, lora, dtype=weights) as model:
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        shapes = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
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
    largest = {True: 0, False: 0}
    for size, tensor in kept.values():
        largest[tensor.shape in shapes] = max(size, largest[tensor.shape in shapes])
    return sum(size for size, _ in kept.values()), largest[True], largest[False]


def count_pass(config: Any, lora: LoraSettings | None, *, num_tokens: int, dtype: torch.dtype) -> int:
    """Count the peak bytes of a pass without gradients beside the weights, without a cache.

    Args:
        config: configuration of the model.
        lora: adapters, if these are trained.
        num_tokens: tokens of the pass.
        dtype: dtype of weights and pass.
    """
    scale = 2 if dtype == torch.float32 and getattr(config.get_text_config(), "num_experts_per_tok", None) else 1
    made = _made(with_layers(config, 2), lora, dtype=torch.bfloat16 if scale == 2 else dtype)
    with made as model, torch.no_grad(), _Live(model.parameters()) as live:
        model.base_model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
    most: int = scale * live.most
    return most


class _Live(TorchDispatchMode):
    """Counts the peak bytes of live storages, without those of some tensors."""

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
            add_sizes(model, lora)
            if dtype == torch.bfloat16:
                round_frozen(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(model)
        yield model


def _make_fake(model: Any) -> None:
    """Replace tensors on the meta device by fake ones on the CPU, for which there is autocast."""
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
    """Keeps the tensors of attention without scores: its inputs, its output, and a number for each query."""

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


GB = 10**9
_SINGLE, _HALF = 4, 2
_OPTIMIZER_BYTES = {"adamw": 8, "paged_adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2}
_TILES = 3
_VLLM_SHARE, _SERVER_SHARE = 0.4, 0.9
"""Shares of a GPU's memory that vLLM takes: in the trainer's process, and as a server."""
_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "mlp", "moe"})
"""Kinds of layers that keep no keys and values, as transformers names them."""
_CONTEXT, _SERVER_CONTEXT = 27 * GB // 10, GB
"""Bytes of CUDA and kernels on each GPU: in training as measured on an H200 (benchmarks/gpu.py), most of it from the proof of
tree attention in float32; of vLLM not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Memory of one kind of process."""

    name: str
    count: int
    uses: Mapping[str, int]
    """Bytes of each use; all are needed at the same time."""
    cached_tokens: int | None = None
    """Tokens whose keys and values a vLLM has room for. None: there is none here."""
    live: int = 0
    """Sequences that a vLLM samples at once at most."""
    at_start: int = 0
    """Bytes of the whole model before its weights are sharded."""
    kept_versions: int = 0
    """Bytes in the host's memory: trained weights of earlier versions (`loss.anchor: sampled`)."""

    @property
    def total(self) -> int:
        """Bytes of all uses."""
        return sum(self.uses.values())


def model_config(recipe: Recipe) -> Any:
    """Return the configuration of a recipe's model, without its weights.

    Raises:
        ConfigError: if there is none.
    """
    from transformers import AutoConfig

    name, local = recipe.model.name_or_path, recipe.model.local
    if name is None:
        return local_config(local, vocab_size=local.vocab_size)
    folder = local_folder(name)
    try:
        return AutoConfig.from_pretrained(folder or name, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"model.name_or_path: cannot read the configuration of {name!r}: {error}. A folder with its config.json is enough: "
            "--model.name_or_path FOLDER"
        ) from error


def model_sizes(recipe: Recipe) -> Sizes:
    """Return the counts of a recipe's model, for several plans.

    Raises:
        ConfigError: if there is no model.
    """
    return Sizes(model_config(recipe), recipe.model.lora)


def tokens_of_a_pass(recipe: Recipe) -> int:
    """Return the tokens of the largest pass, unless history is rewritten."""
    return max(recipe.train.max_tokens_per_micro_batch, recipe.rollout.max_context_tokens)


def plan_memory(recipe: Recipe, *, gpus: int, memory: int, sizes: Sizes | None = None) -> list[ProcessMemory]:
    """Return the memory of each kind of process: ranks that train, and vLLM's servers if the recipe names any.

    Args:
        recipe: recipe of the run; the servers of its section `deployment` are in place of those of its engine.
        gpus: number of all GPUs; each server takes one (or its `tensor_parallel_size`), the others train.
        memory: memory of each GPU, in bytes; vLLM takes a share of it.
        sizes: counts of the recipe's model, if other plans have made them. None: they are made.

    Raises:
        ConfigError: if servers leave no GPU to train on, or there is no model.
    """
    recipe = deployed(recipe)
    engine: Any = recipe.engine
    servers = list(engine.server.urls) if engine.name == "vllm_server" else []
    parallel = max(1, int(_option(recipe, "tensor_parallel_size", 1))) if servers else 1
    num_training = gpus - len(servers) * parallel
    if num_training < 1:
        raise ConfigError(
            f"engine.server.url: {len(servers)} servers of {parallel} GPUs leave none of {gpus} to train on"
        )
    if engine.name == "vllm":
        executor_arguments(num_training, engine.vllm)
    sizes = model_sizes(recipe) if sizes is None else sizes
    if engine.name in ("vllm", "vllm_server"):
        check_reloadable(sizes.config)
    found = [_trainer(recipe, sizes, num_training, memory)]
    if servers:
        taken = _vllm(recipe, memory, _SERVER_SHARE)
        found.append(
            ProcessMemory(
                name="sampling",
                count=len(servers) * parallel,
                uses={"vLLM": taken},
                cached_tokens=_cached_tokens(recipe, sizes, taken, parallel=parallel),
                live=_live(recipe, num_training, num_engines=len(servers)),
            )
        )
    return found


def _live(recipe: Recipe, num_training: int, *, num_engines: int) -> int:
    """Return the number of sequences that an engine samples at once at most; `num_engines` share the episodes of all ranks."""
    rollout, engine = recipe.rollout, recipe.engine
    num_sampling = engine.num_sampling(num_training, num_groups=rollout.num_groups)
    started = (1 + rollout.staleness_bound) * rollout.num_groups * rollout.group_size
    live = min(started, num_sampling * rollout.live_episodes(rollout.num_groups // num_sampling))
    return min(-(-live // num_engines), getattr(engine, "max_batch_size", None) or live)


def _half(recipe: Recipe) -> int:
    return _HALF if recipe.train.precision == "bfloat16" else _SINGLE


def _trainer(recipe: Recipe, sizes: Sizes, num_processes: int, memory: int) -> ProcessMemory:
    """Return the peak memory of a rank that trains: in an update's second micro-batch, or in sampling."""
    train, counted = recipe.train, sizes.weights
    shards = train.num_shards(num_processes)
    is_sharded = shards > 1
    is_in_parts = recipe.model.name_or_path is not None and can_load_sharded(sizes.config, num_processes)
    frozen = counted.total - counted.trained
    has_reference = (
        recipe.loss.kl_coefficient > 0 or Need.REFERENCE_LOGPROBS in load_credit(recipe.credit).requirements()
    )
    away, per_weight = train.offload, _OPTIMIZER_BYTES[train.optimizer]
    held = {
        "weights": (_SINGLE * counted.trained + (_HALF if _is_rounded(recipe) else _SINGLE) * frozen) // shards,
        # It shares frozen weights with the policy; but shards have one owner.
        "reference": _reference_bytes(recipe, counted, shards) if has_reference else 0,
    }
    moments = {"optimizer": per_weight * counted.trained // shards}
    lasting = ({} if "weights" in away else held) | ({} if "optimizer" in away else moments)
    of_a_weight: dict[str, int] = (
        {"optimizer, of one weight": per_weight * counted.largest // shards} if "optimizer" in away else {}
    )
    moment = max([*_moments(recipe, sizes, shards), of_a_weight], key=_together)
    update = held | {
        "gradients": _SINGLE * counted.trained // shards,
        # With a GPU they are in the host's memory.
        "weights before an update": _SINGLE * counted.trained // shards if train.target_kl and not memory else 0,
        **moment,
        "tiles of logits": (_TILES + (logit_map(sizes.config).cap is not None))
        * _SINGLE
        * tile_elements(is_gpu=train.device != "cpu"),
    }
    by_vllm = bool(memory) and isinstance(recipe.engine, VLLMConfig)
    # Else `auto` takes the other engine.
    by_vllm &= recipe.engine.name == "vllm" or (num_processes == 1 and is_reloadable(sizes.config))
    sampling = {"a pass of sampling": 0 if by_vllm else _sampling_pass(recipe, sizes, num_processes)}
    vllm = {"vLLM": _vllm(recipe, memory, _VLLM_SHARE)} if by_vllm else {}
    at_other_times = [held | moments] if is_sharded else []  # at a checkpoint
    if by_vllm and getattr(recipe.engine, "sleep", False):
        a_sync = held | {"vLLM": sizes.base.total * _half(recipe)}
        at_other_times += [lasting | vllm, a_sync]
    else:
        lasting |= vllm if by_vllm else _engine(recipe, sizes, num_processes)
    if num_processes > 1 and not is_sharded:
        lasting["gradients, to be averaged"] = _SINGLE * counted.trained  # DDP's buckets
    if memory:
        lasting["CUDA and kernels"] = _CONTEXT
    together = recipe.rollout.samples_during_update
    times = [update | sampling] if together else [update, sampling]
    uses = max((time | lasting for time in [*times, *at_other_times]), key=_together)
    uses = {name: size for name, size in uses.items() if size}
    cached = _cached_tokens(recipe, sizes, vllm["vLLM"]) if vllm else None
    num_kept = recipe.loss.kept_versions if recipe.loss.anchor == "sampled" else 0
    return ProcessMemory(
        name="training",
        count=num_processes,
        uses=uses,
        cached_tokens=cached,
        live=_live(recipe, num_processes, num_engines=num_processes),
        at_start=0 if is_in_parts or not is_sharded else _SINGLE * counted.total,
        kept_versions=num_kept * _SINGLE * counted.trained // shards,
    )


def _together(uses: Mapping[str, int]) -> int:
    return sum(uses.values())


def _is_rounded(recipe: Recipe) -> bool:
    """Return whether frozen weights are kept in half precision."""
    return recipe.model.lora is not None and recipe.train.precision == "bfloat16"


def _reference_bytes(recipe: Recipe, counted: Weights, shards: int) -> int:
    frozen = (_HALF if _is_rounded(recipe) else _SINGLE) * (counted.total - counted.trained) if shards > 1 else 0
    return (_SINGLE * counted.trained + frozen) // shards


def _moments(recipe: Recipe, sizes: Sizes, shards: int) -> Iterator[dict[str, int]]:
    """Yield the uses of a backward pass beside weights and optimizer: at the head, in a layer, at the embedding, at its end."""
    train, counted = recipe.train, sizes.weights
    is_half = train.precision == "bfloat16"
    is_sharded = shards > 1
    is_rounded, is_copied = _is_rounded(recipe), train.bfloat16_copy and not is_sharded
    options: dict[str, Any] = {
        "num_tokens": tokens_of_a_pass(recipe),
        "weights": torch.bfloat16 if is_half and (is_sharded or is_rounded or is_copied) else torch.float32,
        "autocast": is_half,
    }
    whole = sizes.kept(**options, checkpointing=False)
    kept = sizes.kept(**options, checkpointing=True) if train.gradient_checkpointing else whole
    num_layers, every = sizes.config.get_text_config().num_hidden_layers, int(train.gradient_checkpointing)
    num_again = -(-num_layers // every) if every else 0
    all_kept = num_again * kept.layer + (num_layers - num_again) * whole.layer + kept.rest
    in_layer = 2 * whole.largest + (whole.layer if train.gradient_checkpointing else 0)  # computed again

    together = _HALF if is_half else _SINGLE  # bytes of each weight that is put together, and of its gradient
    layer, outside = (together * counted.layer, together * counted.outside) if is_sharded else (0, 0)
    copies = 0
    if is_copied:
        copies = _HALF * (counted.trained if is_rounded else counted.total - counted.outside)
    elif is_half and not (is_sharded or is_rounded):
        copies = _HALF * (counted.total - counted.outside) * num_again // num_layers  # autocast's, until the pass ends
    of_weight = together if is_sharded else _SINGLE
    embedding, head = of_weight * counted.embedding, of_weight * counted.head
    # The head's gradient stays to the end if it is added to the embedding's, or sharded with it.
    staying = head if counted.is_tied or is_sharded else 0

    def moment(activations: int, put_together: int, gradients: int) -> dict[str, int]:
        return {
            "activations": activations,
            "layers put together": put_together,
            "gradients of embedding and head": gradients,
        }

    yield moment(all_kept, outside + layer + copies, _SINGLE * counted.head)
    # Two layers, for the next is fetched while one is computed; gradients of one before they are sharded.
    of_layer = _SINGLE * counted.layer if is_sharded else 0
    yield moment(all_kept + in_layer, outside + 2 * layer + of_layer + copies, staying)
    yield moment(kept.rest, outside + copies, staying + embedding)
    if is_sharded:  # in single precision: what is sent and received, and a copy of each
        own = counted.embedding + (0 if counted.is_tied else counted.head)
        yield moment(0, 0, 2 * (_SINGLE * own + _SINGLE * own // shards))


def _vllm(recipe: Recipe, memory: int, share: float) -> int:
    """Return the bytes of a GPU that vLLM takes; `share` is the default of the recipe's field."""
    return int(_option(recipe, "gpu_memory_utilization", share) * memory)


def _option(recipe: Recipe, name: str, default: float) -> float:
    """Return a numeric option of vLLM."""
    engine: Any = recipe.engine
    value = engine.vllm.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"engine.vllm.{name}: expected a number above 0, got {value!r}")
    return value


def _rows(recipe: Recipe, engine: BatchedConfig, num_processes: int) -> int:
    """Return the number of requests that an engine in a rank that trains decodes together."""
    groups = recipe.rollout.num_groups // engine.num_sampling(num_processes, num_groups=recipe.rollout.num_groups)
    return engine.max_batch_size or recipe.rollout.live_episodes(groups)


def _engine(recipe: Recipe, sizes: Sizes, num_processes: int) -> dict[str, int]:
    """Return the memory of an engine in a rank that trains, unless it is vLLM."""
    engine = recipe.engine
    if not isinstance(engine, BatchedConfig):
        return {}  # elsewhere, or a stranger's
    tokens = recipe.rollout.max_context_tokens * _rows(recipe, engine, num_processes)
    keys_and_values = tokens * _bytes_per_token(recipe, sizes.config)
    return {"engine": sizes.weights.total * _half(recipe), "keys and values": keys_and_values}


def _sampling_pass(recipe: Recipe, sizes: Sizes, num_processes: int) -> int:
    """Return the peak memory of a pass of an engine in this process: over prompts, or for sampling from logits."""
    engine = recipe.engine
    if not isinstance(engine, BatchedConfig):
        return 0
    size = _half(recipe)
    context, rows = recipe.rollout.max_context_tokens, _rows(recipe, engine, num_processes)
    # A longer prompt than the engine computes at once is computed alone, as much at once as its mask allows.
    tokens = max(min(engine.max_prefill_tokens, rows * context), min(context, MAX_MASK // context))
    mask = (size + 1) * min(tokens * context, MAX_MASK)
    dtype = torch.bfloat16 if size == _HALF else torch.float32
    logits = SAMPLING_BYTES + (size if size == _HALF else 0)  # in half precision there is a copy of each
    logits *= rows * sizes.config.get_text_config().vocab_size
    return int(max(sizes.of_pass(num_tokens=tokens, dtype=dtype) + mask, logits))


def _bytes_per_token(recipe: Recipe, config: Any) -> int:
    """Return the bytes of a token's keys and values; of the latent, with latent attention (DeepSeek).

    Recurrent layers keep none, nor do those that are no attention, nor those that read an earlier layer's (Gemma 4).
    """
    text = config.get_text_config()
    if (num_heads := getattr(text, "num_attention_heads", None)) is None:
        return 0
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    num_own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    attending = [
        layer
        for kind, layer in list(zip(kinds, layer_configs(text), strict=False))[:num_own]
        if kind not in _WITHOUT_KEYS
    ]
    if rank := getattr(text, "kv_lora_rank", None):
        size = len(attending) * (rank + text.qk_rope_head_dim)
    else:
        size = sum(2 * (getattr(one, "num_key_value_heads", None) or num_heads) * head_size(one) for one in attending)
    return int(size * _half(recipe))


def _cached_tokens(recipe: Recipe, sizes: Sizes, taken: int, *, parallel: int = 1) -> int | None:
    """Return the number of tokens for which vLLM has room, if it takes so much of each GPU. None: tokens take no room."""
    if not (bytes_per_token := _bytes_per_token(recipe, sizes.config)):
        return None
    weights = sizes.base.total * _half(recipe)
    left = parallel * (taken - _SERVER_CONTEXT) - weights
    return max(left, 0) // bytes_per_token
