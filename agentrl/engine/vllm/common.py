"""Arguments, requests and answers of vLLM, in this process or over HTTP. Names are those of vLLM 0.32."""

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator

from agentrl.engine.base import Adapters, is_half, merging_refused
from agentrl.errors import ConfigError, EngineError
from agentrl.types import AmountOrZero, Count, FinishReason, Sampling, Seconds, check_address

HOW_TO_INSTALL = "pip install 'agentrl[vllm]' with a GPU; without one see docs/engines.md"
EXTENSION = "agentrl.engine.vllm.worker.WorkerExtension"
"""Value of vLLM's option `worker_extension_cls`; loading it registers the backend too."""
BACKEND = "agentrl"
"""Name of our backend of vLLM's weight transfer, `ChannelTransferEngine`."""
DRAWN = "agentrl_drawn"
"""Key of `SamplingParams.extra_args`: number of tokens at the end of the prompt that were drawn with this seed before."""
MIN_TEMPERATURE = 0.01
"""vLLM silently raises lower ones to it."""
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_NO_LOGPROB = -9999.0
"""Value that a server sends for a log-probability that is not a number."""


class ServerConfig(BaseModel):
    """A vLLM server in a process of its own, or on another machine; `agentrl serve RECIPE` starts one on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | tuple[str, ...] = "http://127.0.0.1:8000"
    """Address of the server, or of several. Each rank spreads its conversations over all of them, and leaves out one that dies
    as long as another is up. Rank 0 sends them the weights."""
    folder: Path | None = None
    """Folder that trainer and server both see by this path, for weights that cannot go to the server directly. None: a
    temporary folder of this machine."""
    timeout_s: Seconds = 600.0
    """Deadline of everything except completions, in seconds: a weight sync, a pause, a health check while it samples. A server
    that misses it counts as down. Keep it no longer than `rollout.engine_timeout_s`."""
    max_retries: AmountOrZero = 3
    """Retries of a request that the server did not answer, or answered with an error of its own (5xx)."""
    max_connections: Count = 512
    """Largest number of completions requested at once; others wait. Each takes an open file here and one at the server: many
    servers may open 1,024."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.urls:
            raise ValueError("url: expected at least one")
        for url in self.urls:
            check_address("url", url, "http", "https")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """`url` as a list."""
        return (self.url,) if isinstance(self.url, str) else self.url


def is_installed() -> bool:
    """Return whether vLLM is installed, without importing it, which takes seconds."""
    return find_spec("vllm") is not None


def is_reloadable(config: Any) -> bool:
    """Return whether vLLM can replace all weights of a model; its reload misses experts and sinks of gpt-oss."""
    return bool(config.get_text_config().model_type != "gpt_oss")


def check_reloadable(config: Any) -> None:
    """Raise for models whose weights vLLM cannot replace.

    Raises:
        ConfigError: naming the model.
    """
    if not is_reloadable(config):
        raise ConfigError(
            "engine.name: vLLM 0.32 drops the experts and sinks of gpt_oss when its weights are replaced, and would sample "
            "from others than the trainer's; set engine.name: transformers"
        )


def executor_arguments(num_processes: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` that give each of several ranks a vLLM of its own, on its own GPU.

    The ranks have a process group already, by which vLLM makes its own: all of them build their engine at once.

    Args:
        num_processes: number of ranks.
        given: arguments that the recipe gives.

    Raises:
        ConfigError: if one vLLM is to run on several GPUs.
    """
    if num_processes == 1:
        return {}
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if given.get(name, 1) != 1:
            raise ConfigError(
                f"engine.vllm.{name}: each of {num_processes} training processes has a vLLM on its own GPU; remove it, or "
                "set engine.name: vllm_server, whose servers have GPUs of their own"
            )
    return {"distributed_executor_backend": "external_launcher"}


LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution that is sampled: temperature applied."""
CHANGES_LOGPROBS = ("dtype", "quantization", "kv_cache_dtype", "hf_overrides", "model_impl")
"""Arguments of `EngineArgs` that change what vLLM computes."""


def engine_arguments(*, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` that sampling for training always needs."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "logprobs_mode": LOGPROBS_MODE,
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
    }
    if is_cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 2**30}
        # Blocks of 128, the default on a CPU, find half as much of a prompt in the cache. A request with a seed ends
        # vLLM on a CPU when its prompt is computed in parts ("CPU Generator does not use offset").
        arguments |= {"block_size": 32, "enable_chunked_prefill": False}
    return arguments


ADAPTER = "policy"
"""Name of the adapter in vLLM."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room."""


def adapter_arguments(adapters: Adapters | None, dtype: torch.dtype, *, model: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` that keep adapters apart from weights; none unless `dtype` is half precision.

    Raises:
        ConfigError: if vLLM cannot keep them apart.
    """
    if adapters is None or not is_half(dtype):
        return {}
    if adapters.rank > _RANKS[-1]:
        raise merging_refused(
            f"vLLM keeps adapters up to rank {_RANKS[-1]} apart from weights, not rank {adapters.rank}"
        )
    if not torch.cuda.is_available() and any(name.endswith(".experts") for name, _ in model.named_modules()):
        raise merging_refused("vLLM cannot keep adapters apart from the weights of a mixture of experts on a CPU")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in _RANKS if rank >= adapters.rank),
        # Others stay as they are: wrapped, experts alone would take gigabytes.
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in adapters.layers}),
    }


def parse_dtype(given: torch.dtype | str | None, model: Any) -> torch.dtype:
    """Return the dtype that vLLM's option `dtype` names; None and `auto` are the model's."""
    if given is None or given == "auto":
        given = model.dtype
    return given if isinstance(given, torch.dtype) else getattr(torch, given, torch.float32)


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return every field of `SamplingParams`, so that no default of vLLM or the model applies."""
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "extra_args": {DRAWN: sampling.drawn},
        "routed_experts_prompt_start": sampling.experts_from,
    }


def sampled_logprobs(values: list[float], sampling: Sampling) -> list[float]:
    """Convert vLLM's log-probabilities of sampled tokens: at temperature 0 it returns those of temperature 1."""
    return [0.0 if sampling.temperature == 0 else min(0.0, value) for value in values]


def parse_choice(choice: Any) -> tuple[list[int], list[float], FinishReason]:
    """Return the tokens that a server sampled, vLLM's log-probability of each, and the finish reason.

    Raises:
        ValueError: for a malformed answer; also KeyError and TypeError.
        EngineError: if it sampled from no distribution.
    """
    token_ids = [int(token) for token in choice["token_ids"]]
    scored = choice["logprobs"]["content"] if token_ids else []
    logprobs = [float(entry["logprob"]) for entry in scored]
    reason = FINISH_REASONS[choice["finish_reason"]]
    if len(logprobs) != len(token_ids) or not (token_ids or reason is FinishReason.ABORTED):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities")
    if not all(_NO_LOGPROB < logprob < math.inf for logprob in logprobs):
        raise EngineError("vLLM's server sampled from a distribution that is not one: its weights are not finite")
    return token_ids, logprobs, reason


def abort_body(server_ids: Iterable[str]) -> dict[str, list[str]]:
    """Return the body of an abort, with the server's names of requests."""
    return {"request_ids": [f"generate-tokens-{server_id}" for server_id in server_ids]}


def check_success(answer: Any) -> None:
    """Raise ValueError for an answer that does not report success."""
    if answer["success"] is not True:
        raise ValueError("something still holds parts of the cache")
