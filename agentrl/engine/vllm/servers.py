"""Several vLLM servers as one engine.

What a recipe says of vLLM's servers.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from pydantic import Field

from agentrl.engine.base import Engine, EngineConfig, EngineContext, KeptBase
from agentrl.engine.vllm.common import ServerConfig, check_reloadable
from agentrl.engine.vllm.http import ServerLostError
from agentrl.engine.vllm.server import Changes, VLLMServer, sync_weights
from agentrl.errors import EngineError
from agentrl.types import Amount, Completion, Count, Sampling

log = logging.getLogger(__name__)


class VLLMServers:
    """Spreads conversations over servers, each where its prefix is cached; see `VLLMServer`.

    A server that is down, or that does not answer within its deadline, is left out: its conversations continue on the others.
    With the next push of weights it comes back, where it answers again.
    """

    def __init__(self, servers: Sequence[VLLMServer]) -> None:
        """Take servers of the same model."""
        self._servers = tuple(servers)
        self._lost: dict[VLLMServer, ServerLostError] = {}
        """Those that are left out, and why."""
        self._homes: dict[str, VLLMServer | None] = {}
        """Where each conversation is sampled. None: nowhere yet."""
        self._load: Counter[VLLMServer] = Counter()
        """Requests without an answer."""

    @property
    def busy_s(self) -> float:
        """Seconds in which a server had at least one request, on the mean of all."""
        return sum(server.busy_s for server in self._servers) / len(self._servers)

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return max(server.version for server in self._up() or self._servers)

    @contextmanager
    def conversation(self, request_id: str) -> Iterator[None]:
        """Keep to the server that has what was computed for this id."""
        self._homes[request_id] = None
        try:
            yield
        finally:
            del self._homes[request_id]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample on the conversation's server, and on another where that is lost; see `Engine.generate`."""
        while True:
            server = self._server_for(request_id)
            self._load[server] += 1
            try:
                return await server.generate(prompt_ids, sampling, request_id)
            except ServerLostError as error:
                self._exclude(server, error)
            finally:
                self._load[server] -= 1

    async def generate_on_each(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> list[Completion]:
        """Return what each server samples that is not left out; see `ReplicatedEngine`."""

        async def one(server: VLLMServer) -> list[Completion]:
            try:
                return [await server.generate(prompt_ids, sampling, request_id)]
            except ServerLostError as error:
                self._exclude(server, error)
                return []

        found = await asyncio.gather(*map(one, self._up()))
        self._check_some_left()
        return [completion for of_server in found for completion in of_server]

    async def pause(self) -> None:
        """Return running requests as they stand; hold those of which no token was sampled yet."""
        await self._call_all(VLLMServer.pause)

    async def resume(self) -> None:
        """Sample again."""
        await self._call_all(VLLMServer.resume)

    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights of all servers, also of those that were left out.

        Raises:
            EngineError: as `VLLMServer.load_weights`; also when no server takes them.
        """
        await self._sync_weights(named_tensors, None, version)

    async def kept_base(self) -> KeptBase:
        """Tell what the next push of adapters must bring to one of the servers at least; see `AdapterEngine`.

        One that was lost and answers again has nothing; one that does not will get nothing either.
        """
        for server in self._lost:
            server.base = None
        return min([await server.kept_base() for server in await self._reachable()], default=KeptBase.THERE)

    async def load_adapters(
        self, changes: Changes, base: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Replace the weights by those of the model plus changes; see `AdapterEngine`."""
        await self._sync_weights(base, changes, version)

    async def _sync_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]] | None, changes: Changes | None, version: int
    ) -> None:
        for server in self._up():
            server.check_idle()
        servers = await self._reachable()
        failed = await sync_weights(servers, named_tensors, version, changes=changes)
        for server in servers:
            if server in failed:
                self._exclude(server, failed[server])
            elif self._lost.pop(server, None):
                log.warning("%s is back, with the weights of version %d", server.url, version)
        self._check_some_left()

    async def close(self) -> None:
        """Stop all requests, and let go of the servers, which run on."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def _up(self) -> list[VLLMServer]:
        """Return those that are not left out."""
        return [server for server in self._servers if server not in self._lost]

    async def _reachable(self) -> list[VLLMServer]:
        """Return all but those of the lost that do not answer, for which a push would wait until its deadlines."""
        lost = list(self._lost)
        answers = await asyncio.gather(*(server.is_answering() for server in lost))
        return [server for server in self._servers if server not in lost or answers[lost.index(server)]]

    def _server_for(self, request_id: str) -> VLLMServer:
        """Return the server of a conversation: its own, else the one that has least to do."""
        self._check_some_left()
        home = self._homes.get(request_id)
        if home is None or home in self._lost:
            of_server = Counter(self._homes.values())
            home = min(self._up(), key=lambda server: (of_server[server], self._load[server]))
            if request_id in self._homes:
                self._homes[request_id] = home
        return home

    async def _call_all(self, tell: Callable[[VLLMServer], Awaitable[None]]) -> None:
        """Tell them, and let those that are left out note it."""

        async def one(server: VLLMServer) -> None:
            try:
                await tell(server)
            except ServerLostError as error:
                self._exclude(server, error)

        await asyncio.gather(*map(one, self._servers))
        self._check_some_left()

    def _exclude(self, server: VLLMServer, error: ServerLostError) -> None:
        if server not in self._lost:
            log.warning("%s is left out, and its conversations go on elsewhere: %s", server.url, error)
        self._lost[server] = error
        server.exclude(error)

    def _check_some_left(self) -> None:
        """Refuse to go on without any server.

        Raises:
            EngineError: with the words of the last one that was lost.
        """
        if len(self._lost) == len(self._servers):
            *_, error = self._lost.values()
            raise EngineError(f"none of {len(self._servers)} vLLM servers is left; the last: {error}") from error


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

    def for_process(self, index: int) -> Self:
        """Return the fields with one server's address."""
        return self.model_copy(update={"server": self.server.model_copy(update={"url": self.server.urls[index]})})

    def build(self, context: EngineContext) -> "Engine":
        """Return a client of the process's server, or of all of its servers.

        Raises:
            ConfigError: for a model whose weights it could not replace.
        """
        from agentrl.engine.vllm.experts import VLLMExperts
        from agentrl.engine.vllm.server import VLLMServer

        check_reloadable(context.model.config)
        folder, shard = self.server.folder or context.handover, context.shard
        urls = self.server.urls[shard.process :: shard.num_processes]
        experts = VLLMExperts.for_model(context.model) if context.returns_experts else None
        servers = [
            VLLMServer(
                self.server.model_copy(update={"url": url}), folder=folder, device=context.device, experts=experts
            )
            for url in urls
        ]
        return servers[0] if len(servers) == 1 else VLLMServers(servers)
