"""The seam of sampling."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, PositiveFloat, model_validator

from agentrl.types import Amount, AmountOrZero, Completion, Count, Sampling

if TYPE_CHECKING:
    import torch


class ServerConfig(BaseModel):
    """A vLLM server that samples in a process of its own, or on another machine; `agentrl serve RECIPE` starts one on this."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | tuple[str, ...] = "http://127.0.0.1:8000"
    """Where it listens. Of several servers each serves one training process: the first, the second, ...; processes beyond
    them only train."""
    folder: Path | None = None
    """A folder that trainer and server both see by this path, in which weights are handed over. None: one of this machine's for
    temporary files."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of whatever is no completion: a push of weights, a pause."""
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


class EngineConfig(BaseModel):
    """What samples the rollouts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["auto", "transformers", "vllm", "vllm_server"] = "auto"
    """`transformers`: in this process, continuous batching over a key-value cache, on CPU or GPU. `vllm`: vLLM in this
    process. `vllm_server`: vLLM in another, see `server`. `auto`: `vllm` where it is installed and there is one training
    process, on a GPU (expected to be faster) and on a CPU from 10 million parameters on (measured); else `transformers`."""
    max_batch_size: Count = 64
    """Largest number of requests decoded together; each holds one row of the key-value cache."""
    max_prefill_tokens: Amount = 8192
    """Largest number of prompt tokens, padding included, computed at once; a longer prompt is computed alone."""
    lockstep: bool | None = None
    """Decode only when every live episode waits for tokens, so that batches do not depend on the timing of environments
    and a run repeats bit for bit. None: where `rollout.mode` is sync, the only one that can repeat. Set to false where
    environments take longer than a decoding step (milliseconds). A server decodes whenever there is something to decode."""
    sleep: bool = False
    """Give a GPU's memory back while the policy is updated (`name: vllm`): weights go to the host and back, keys and values
    are forgotten."""
    vllm: dict[str, Any] = {}
    """Further arguments of vLLM's `EngineArgs`, such as gpu_memory_utilization."""
    server: ServerConfig = ServerConfig()


class Sampler(Protocol):
    """Samples completions: what an episode knows of an engine.

    Every completion's log-probabilities are those of the distribution that was sampled: full support, temperature
    applied. An episode is one conversation: each of its prompts begins with the previous prompt and completion, so an
    engine can keep what it has computed.
    """

    def conversation(self, request_id: str) -> AbstractContextManager[None]:
        """Keep what was computed for this id between its requests; at exit forget it."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample after `prompt_ids` until a stop token or the budget; one request at a time for each id.

        Raises:
            EngineError: when the engine cannot; with the engine's own words.
        """


class Engine(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def busy_s(self) -> float:
        """Seconds spent computing since the engine was made."""

    async def pause(self) -> None:
        """Return every running request as it stands, with finish_reason `aborted`, and hold those that come."""

    async def resume(self) -> None:
        """Sample again."""

    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Replace the weights; nothing computed under earlier ones serves a later request.

        Raises:
            EngineError: while requests are running, or when names or shapes are not the model's. After the latter the
                weights may be replaced in part: load them again.
        """

    async def close(self) -> None:
        """Release what the engine holds; requests that still wait, and later ones, get an EngineError."""
