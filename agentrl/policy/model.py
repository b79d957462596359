"""The policy: a transformers causal language model, loaded by name or made from a configuration.

`T` trained tokens, `D` hidden size, `V` vocabulary.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from agentrl.chat import local_folder, pretrained_tokenizer
from agentrl.errors import ConfigError
from agentrl.models.auto_classes import auto_class, name_body, text_modules
from agentrl.models.logits import logit_map
from agentrl.models.moe import cast_experts
from agentrl.policy.config import Layout, LocalModelConfig
from agentrl.policy.layout import Inputs, hidden_states
from agentrl.policy.layout.recurrent import can_continue, mixers_of
from agentrl.policy.logprobs import fused_logprobs


def local_config(config: LocalModelConfig, *, vocab_size: int, **further: Any) -> Any:
    """Return the Qwen3 configuration of a model to make."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_std,
        tie_word_embeddings=True,
        **further,
    )


def hide_bars() -> None:
    """Turn off transformers' progress bars unless they are seen on a terminal: in a log each is hundreds of lines."""
    from transformers.utils import logging

    if not getattr(sys.stderr, "isatty", bool)():
        logging.disable_progress_bar()


def make_local_model(config: LocalModelConfig, tokenizer: Any, *, attention: str | None = None) -> Any:
    """Return a Qwen3 with random weights (from torch's global generator) for a tokenizer."""
    from transformers import Qwen3ForCausalLM

    hide_bars()
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Qwen3ForCausalLM(local_config(config, vocab_size=len(tokenizer), **tokens, attn_implementation=attention))


def load_pretrained(
    name_or_path: str, *, attention: str | None = None, field: str = "model.name_or_path"
) -> tuple[Any, Any]:
    """Return (model in float32, tokenizer) of a Hugging Face folder or hub name; gpt-oss's 4-bit experts are expanded.

    Raises:
        ConfigError: when there is no such model, or its weights are quantized in another way.
    """
    from transformers.utils.quantization_config import Mxfp4Config

    source, config, tokenizer = open_checkpoint(name_or_path, field=field)
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if quantization(config) else {}
    with checkpoint_errors(name_or_path, field=field):
        model, found = auto_class(config).from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    if missing := sorted(found["missing_keys"]):
        others = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ConfigError(f"{field}: {name_or_path!r} lacks weights of its model: {missing[0]}{others}; get it again")
    return name_body(model.float()), tokenizer  # quantized weights come in bfloat16


def open_config(name_or_path: str, *, field: str) -> tuple[str, Any]:
    """Return (source for transformers, configuration) of a Hugging Face folder or hub name.

    Raises:
        ConfigError: when there is no such model.
    """
    from transformers import AutoConfig

    folder = local_folder(name_or_path, field=field)
    if folder and not (folder / "config.json").is_file():
        raise ConfigError(f"{field}: no model in {name_or_path!r}: {folder / 'config.json'} does not exist")
    source = str(folder or name_or_path)
    with checkpoint_errors(name_or_path, field=field):
        return source, AutoConfig.from_pretrained(source, trust_remote_code=False)


def open_checkpoint(name_or_path: str, *, field: str) -> tuple[str, Any, Any]:
    """Return (source for transformers, configuration, tokenizer) of a Hugging Face folder or hub name.

    Raises:
        ConfigError: when there is no such model, or its weights are quantized in a way that cannot be trained.
    """
    hide_bars()
    source, config = open_config(name_or_path, field=field)
    tokenizer = pretrained_tokenizer(name_or_path, field=field)
    if (method := quantization(config)) not in (None, "mxfp4"):
        raise ConfigError(
            f"{field}: the weights of {name_or_path!r} are quantized ({method}), and cannot be trained; name the model that "
            "they were made from"
        )
    return source, config, tokenizer


@contextmanager
def checkpoint_errors(name_or_path: str, *, field: str) -> Iterator[None]:
    """Turn errors of transformers about a model that it cannot load into one line with the field that names it.

    Raises:
        ConfigError: for a file that is not there or cannot be read.
    """
    try:
        yield
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"{field}: cannot load {name_or_path!r}: {' '.join(str(error).split())}") from error


def quantization(config: Any) -> str | None:
    """Return the quantization of a checkpoint's weights, by its name in transformers. None: there is none."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return None if method is None else str(method)


_OF_OTHER_HEADS = ("classifier_dropout", "summary_first_dropout")


def check_attention(name: str | None, device: torch.device, *, is_half: bool) -> None:
    """Refuse attention that a machine or a precision cannot train with.

    Raises:
        ConfigError: with the missing requirement.
    """
    if name in (None, "sdpa", "eager"):
        return
    from transformers import utils

    field = f"model.attention: {name}"
    if device.type != "cuda":
        raise ConfigError(f"{field} trains on GPUs alone; set it to sdpa, or leave it out")
    if name == "flex_attention":
        return
    if not is_half:
        raise ConfigError(
            f"{field} computes in half precision alone; set train.precision: bfloat16, or attention to sdpa"
        )
    if not getattr(utils, f"is_{name.replace('attention', 'attn')}_available")():
        raise ConfigError(f"{field} is not installed here: `pip install flash-attn`, or set it to sdpa")


def checkpoint_layers(model: Any, every: int) -> None:
    """Let every n-th layer keep its inputs alone, and compute the rest again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0


def check_dropout(config: Any) -> None:
    """Refuse to train models that draw random numbers in a pass: dropout, or jitter in the choice of experts.

    Raises:
        ConfigError: with the fields to set to 0.
    """
    words = ("dropout", "_pdrop", "layerdrop", "jitter")
    random = {k: v for k, v in config.get_text_config().to_dict().items() if any(word in k for word in words)}
    random = {name: value for name, value in random.items() if name not in _OF_OTHER_HEADS}
    if found := {name: value for name, value in random.items() if isinstance(value, float) and value > 0}:
        raise ConfigError(
            f"model.name_or_path: chance within a pass makes importance ratios random; set {', '.join(found)} to 0"
        )


class Policy(nn.Module):
    """The model as the trainer sees it: tokens in, log-probabilities of the trained ones out.

    It is one module, so that wrappers for several ranks see one forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        layout: Layout = "padded",
        field: str = "model.name_or_path",
        sharded_checkpoint: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._behind = logit_map(model.config, field=field)
        cast_experts()
        self.model = model
        self.layout = layout
        """Layout of rows (`choose_layout`)."""
        self.sharded_checkpoint = dict(sharded_checkpoint or {})
        """This rank's parts of weights that the model does not hold yet, until it is sharded (`load_sharded`)."""
        self.has_copy = False
        """Whether passes under autocast compute with a rounded copy of the weights (`rounded_weights`)."""

    @property
    def is_recurrent(self) -> bool:
        """Whether parts of the model compute rows one by one, whatever the layout (`see_rows`)."""
        return bool(mixers_of(self.model))

    @property
    def can_continue(self) -> bool:
        """Whether these parts compute shared prefixes once, on a tree."""
        return can_continue(self.model)

    def rounding(self) -> AbstractContextManager[None]:
        """Return a context for several passes, forward and backward, that share one rounded copy of the weights, if any."""
        return rounded_weights(self.model) if self.has_copy else nullcontext()

    def forward(self, inputs: Inputs, slot_T: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [T] of each target, read at its predecessor."""
        device_type = inputs.ids_BL.device.type
        is_half = torch.is_autocast_enabled(device_type)
        with self.rounding() if is_half else nullcontext():
            hidden_TD = hidden_states(self.model, inputs)[slot_T]
        if is_half:  # as the head would read them
            hidden_TD = hidden_TD.to(torch.get_autocast_dtype(device_type))
        head = self.model.get_output_embeddings()
        return fused_logprobs(
            hidden_TD, head.weight, targets_T, bias_V=head.bias, temperature=temperature, behind=self._behind
        )


@contextmanager
def rounded_weights(model: Any) -> Iterator[None]:
    """Return a context for passes under autocast that compute with a bfloat16 copy of the float32 weights.

    The copy is made on entering, so that it is never older than the weights, which must not change within. Gradients reach
    the weights and are added up in float32. Embedding and head stay as they are, and what embeddings return is rounded:
    hidden states are bfloat16 between layers too. Layers that run again in the backward pass need the context there. Within
    another it changes nothing.
    """
    head = model.get_output_embeddings()
    modules = [module for part in text_modules(model) for module in part.modules() if module is not head]
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    places = [
        (module, name, weight)
        for module in modules
        if not isinstance(module, nn.Embedding)
        for name, weight in module._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]
    if not places:
        yield
        return
    copies: dict[int, Any] = {id(weight): weight.to(torch.bfloat16) for _, _, weight in places}
    hooks = [embedding.register_forward_hook(_round_output) for embedding in embeddings]
    for module, name, weight in places:
        module._parameters[name] = copies[id(weight)]
    try:
        yield
    finally:
        for module, name, weight in places:
            module._parameters[name] = weight
        for hook in hooks:
            hook.remove()


def _round_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


_MOST_GRAPHS = 64
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
    if lacking := _lacking_compiler(device):
        raise ConfigError(f"train.compile: {lacking}, or set it to none")
    torch._dynamo.config.recompile_limit = max(_MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def _lacking_compiler(device: torch.device) -> str | None:
    """Return what has to be installed or changed before torch can compile for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    # torch reads the variable whenever it compiles, and the configuration once.
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE turns it off, as vLLM does in its process on a CPU: set engine.name to vllm_server"
    if device.type != "cpu":
        return None if has_triton() else "install Triton (pip install triton; on Windows triton-windows)"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "install a C++ compiler (apt install g++; on Windows the build tools of Visual Studio)"
    return None
