"""What a recipe says of vLLM's servers."""

from typing import Any, Self

from pydantic import Field

from agentrl.engine.base import Engine, EngineConfig, EngineContext
from agentrl.engine.vllm_common import ServerConfig, check_reloadable
from agentrl.types import Amount, Count


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
