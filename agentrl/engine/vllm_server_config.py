"""What a recipe says of vLLM's servers."""

from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.engine.base import Engine, EngineConfig, EngineContext
from agentrl.engine.vllm_common import check_reloadable
from agentrl.types import Amount, AmountOrZero, Count, Seconds


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


class VLLMServerConfig(EngineConfig):
    """vLLM in a process of its own, over HTTP; `agentrl serve RECIPE` starts one."""

    name: str = "vllm_server"
    server: ServerConfig = ServerConfig()
    max_batch_size: Count = 64
    """Largest number of requests that a server decodes together, where `agentrl serve` starts it."""
    max_prefill_tokens: Amount = 8192
    """Largest number of prompt tokens that such a server computes at once."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs` for such a server, such as gpu_memory_utilization."""

    def num_sampling(self, num_processes: int) -> int:
        """Return how many processes have servers: each as many as another."""
        num = len(self.server.urls)
        most = min(num, num_processes, self.server.processes or max(1, num // 2))
        return max(count for count in range(1, most + 1) if num % count == 0)

    def of_process(self, index: int) -> Self:
        """Return the fields with one server's address."""
        return self.model_copy(update={"server": self.server.model_copy(update={"url": self.server.urls[index]})})

    def build(self, context: EngineContext) -> "Engine":
        """Return a client of the process's server, or of all of its servers.

        Raises:
            ConfigError: for a model whose weights it could not replace.
        """
        from agentrl.engine.vllm_experts import VLLMExperts
        from agentrl.engine.vllm_server import VLLMServer
        from agentrl.engine.vllm_servers import VLLMServers

        check_reloadable(context.model.config)
        folder, share = self.server.folder or context.handover, context.share
        urls = self.server.urls[share.process :: share.num_processes]
        experts = VLLMExperts.of(context.model) if context.tells_experts else None
        servers = [
            VLLMServer(
                self.server.model_copy(update={"url": url}), folder=folder, device=context.device, experts=experts
            )
            for url in urls
        ]
        return servers[0] if len(servers) == 1 else VLLMServers(servers)
