"""What vLLM is told and what it answers, in this process or over HTTP. Names are those of vLLM 0.32."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, model_validator

from agentrl.errors import ConfigError, EngineError
from agentrl.types import AmountOrZero, Count, FinishReason, Sampling, Seconds

HOW_TO_INSTALL = "pip install 'agentrl[vllm]' with a GPU; without one see docs/engines.md"
EXTENSION = "agentrl.engine.vllm.worker.WorkerExtension"
"""What vLLM's option `worker_extension_cls` is to name; where it is loaded, so is the backend."""
BACKEND = "agentrl"
"""Of vLLM's weight transfer: `vllm_worker.ChannelTransferEngine`."""
DRAWN = "agentrl_drawn"
"""Key of `SamplingParams.extra_args`: tokens at the end of the prompt that were drawn with this seed before."""
MIN_TEMPERATURE = 0.01
"""vLLM silently raises lower ones to it."""
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_NO_LOGPROB = -9999.0
"""What a server sends where a log-probability is not a number."""


class ServerConfig(BaseModel):
    """A vLLM server that samples in a process of its own, or on another machine; `agentrl serve RECIPE` starts one on this."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | tuple[str, ...] = "http://127.0.0.1:8000"
    """Where it listens. Several servers are dealt out evenly to training processes: of 2 processes each has 2 of 4 servers, of
    2 or 3 servers the first has all. A process spreads its conversations over its servers, and one that dies is left out, as
    long as another is up; a process that has none only trains."""
    processes: Count | None = None
    """How many training processes have servers, at most; 1: the first has all. As many as there are servers: each has one of
    its own, which plays faster where environments are slow, and a run ends with any of them. None: as many as can have two."""
    folder: Path | None = None
    """A folder that trainer and server both see by this path, for weights that cannot go to the server directly. None: one of
    this machine's for temporary files."""
    timeout_s: Seconds = 600.0
    """Deadline of whatever is no completion: a push of weights, a pause, a sign of life while it samples. A server that misses
    it counts as down. Keep it no longer than `rollout.engine_timeout_s`."""
    max_retries: AmountOrZero = 3
    """How often a request that the server did not answer, or answered with an error of its own (5xx), is made again."""
    max_connections: Count = 512
    """Completions that are asked for at the same time; others wait in line. Each takes an open file here and one at the server:
    many servers may open 1,024."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.urls:
            raise ValueError("url: expected at least one")
        for url in self.urls:
            try:
                parts = urlsplit(url)
                is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
            except ValueError:
                is_whole = False
            if not is_whole:
                raise ValueError(f"url: expected http://HOST:PORT, got {url!r}")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """`url` as a list."""
        return (self.url,) if isinstance(self.url, str) else self.url


def is_installed() -> bool:
    """Tell whether vLLM is there, without importing it: that takes seconds."""
    return find_spec("vllm") is not None


def is_reloadable(config: Any) -> bool:
    """Tell whether vLLM can replace all weights of a model; of gpt-oss it copies experts and sinks past its own reload."""
    return bool(config.get_text_config().model_type != "gpt_oss")


def check_reloadable(config: Any) -> None:
    """Refuse models whose weights vLLM cannot replace.

    Raises:
        ConfigError: naming the model.
    """
    if not is_reloadable(config):
        raise ConfigError(
            "engine.name: vLLM 0.32 drops the experts and sinks of gpt_oss when its weights are replaced, and would sample "
            "from others than the trainer's; set engine.name: transformers"
        )


def check_one_process(num_processes: int) -> None:
    """Refuse vLLM within processes that train together.

    Raises:
        ConfigError: saying what takes its place.
    """
    if num_processes > 1:
        raise ConfigError(
            "engine.name: vllm runs within one process only; with several start a server for each, or for some of them, "
            "and set engine.name: vllm_server and engine.server.url"
        )


def engine_arguments(*, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` that hold wherever it samples for training."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
    }
    if is_cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 2**30}
        # Blocks of 128, the default on a CPU, find half as much of a prompt in the cache. A request with a seed ends
        # vLLM on a CPU when its prompt is computed in parts ("CPU Generator does not use offset").
        arguments |= {"block_size": 32, "enable_chunked_prefill": False}
    return arguments


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Set every field of `SamplingParams`, so that no default of vLLM's or of the model's slips in."""
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
    """Return log-probabilities of sampled tokens from vLLM's: at temperature 0 it gives those of temperature 1."""
    return [0.0 if sampling.temperature == 0 else min(0.0, value) for value in values]


def parse_choice(choice: Any) -> tuple[list[int], list[float], FinishReason]:
    """Return the tokens that a server sampled, vLLM's log-probability of each, and why it stopped.

    Raises:
        ValueError: for what is none of these, as KeyError and TypeError.
        EngineError: where it sampled from no distribution.
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


def check_success(answer: Any) -> None:
    """Refuse an answer that tells of no success."""
    if answer["success"] is not True:
        raise ValueError("something still holds parts of the cache")
