"""Several vLLM servers as one engine, and the recipe's section about them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
from pydantic import Field

from agentrl.data.files import absolute
from agentrl.engine.base import CopyState, Engine, EngineConfig, EngineContext, KeptBase
from agentrl.engine.vllm.common import ServerConfig, check_reloadable
from agentrl.engine.vllm.http import ServerLostError
from agentrl.engine.vllm.server import VLLMServer, sync_weights
from agentrl.engine.vllm.weights import Changes
from agentrl.errors import EngineError
from agentrl.types import Amount, Completion, Count, Sampling

log = logging.getLogger(__name__)


class VLLMServers:
    """Engine on several servers: each conversation stays on the server that caches its prefix; see `VLLMServer`.

    A server that is down or misses its deadline is excluded, and its conversations continue on the others. If it answers
    again, it returns with the next weight sync. Several ranks may share the servers (`SharedEngine`).
    """

    def __init__(self, servers: Sequence[VLLMServer], *, syncs: bool = True) -> None:
        """Take servers of the same model.

        Args:
            servers: all of them.
            syncs: this rank replaces their weights. False: another does.
        """
        self._servers = tuple(servers)
        self.syncs = syncs
        self._lost: dict[VLLMServer, ServerLostError] = {}
        """Excluded servers, with the reason."""
        self._homes: dict[str, VLLMServer | None] = {}
        """Server of each conversation. None: not chosen yet."""
        self._load: Counter[VLLMServer] = Counter()
        """Number of unanswered requests per server."""

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request, as a mean over servers."""
        return sum(server.busy_s for server in self._servers) / len(self._servers)

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return max(server.version for server in self._up() or self._servers)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype in which all servers compute. None: they differ, or it is not known yet."""
        dtypes = {server.dtype for server in self._servers}
        return dtypes.pop() if len(dtypes) == 1 else None

    @contextmanager
    def conversation(self, request_id: str) -> Iterator[None]:
        """Keep a conversation on one server."""
        self._homes[request_id] = None
        try:
            yield
        finally:
            del self._homes[request_id]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample on the conversation's server, or on another if that is lost; see `Engine.generate`."""
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
        """Return a completion from each server that is not excluded; see `ReplicatedEngine`."""

        async def one(server: VLLMServer) -> list[Completion]:
            try:
                return [await server.generate(prompt_ids, sampling, request_id)]
            except ServerLostError as error:
                self._exclude(server, error)
                return []

        found = await asyncio.gather(*map(one, self._up()))
        self._check_some_left()
        return [completion for completions in found for completion in completions]

    async def pause(self) -> None:
        """Return running requests with what they have; hold those without a sampled token."""
        await self._call_all(VLLMServer.pause)

    async def freeze(self) -> None:
        """Stop sampling, and let running requests wait at their servers; see `FreezableEngine`."""
        await self._call_all(VLLMServer.freeze)

    async def resume(self) -> None:
        """Sample again."""
        await self._call_all(VLLMServer.resume)

    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights of all servers, including excluded ones that answer again.

        Raises:
            EngineError: see `VLLMServer.load_weights`; also if no server takes them.
        """
        await self._sync_weights(named_tensors, None, version)

    async def kept_base(self) -> KeptBase:
        """Return the least state of all reachable servers; see `AdapterEngine`.

        A server that was lost and answers again has nothing.
        """
        if not self.syncs:
            return KeptBase.THERE
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
        if not self.syncs:
            for _ in chain(changes or (), named_tensors or ()):  # gathering them may take every rank
                pass
            return
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

    def copies(self) -> dict[str, CopyState]:
        """Return the state of each server, by address."""
        return {
            server.url: CopyState(str(self._lost[server]) if server in self._lost else None, server.has_adapter)
            for server in self._servers
        }

    async def follow(self, copies: Mapping[str, CopyState], version: int) -> None:
        """Take over the states of all servers; see `SharedEngine`."""
        for server in self._servers:
            state = copies[server.url]
            if state.lost is None:
                self._lost.pop(server, None)
                server.follow(version, has_adapter=state.has_adapter)
            else:
                self._exclude(server, ServerLostError(state.lost))

    async def close(self) -> None:
        """Stop all requests and disconnect; the servers keep running."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def _up(self) -> list[VLLMServer]:
        """Return the servers that are not excluded."""
        return [server for server in self._servers if server not in self._lost]

    async def _reachable(self) -> list[VLLMServer]:
        """Return all servers except lost ones that do not answer, on which a weight sync would wait until its deadline."""
        lost = list(self._lost)
        answers = await asyncio.gather(*(server.is_answering() for server in lost))
        return [server for server in self._servers if server not in lost or answers[lost.index(server)]]

    def _server_for(self, request_id: str) -> VLLMServer:
        """Return the server of a conversation: its own, else the least loaded one."""
        self._check_some_left()
        home = self._homes.get(request_id)
        if home is None or home in self._lost:
            num_conversations = Counter(self._homes.values())
            home = min(self._up(), key=lambda server: (num_conversations[server], self._load[server]))
            if request_id in self._homes:
                self._homes[request_id] = home
        return home

    async def _call_all(self, call: Callable[[VLLMServer], Awaitable[None]]) -> None:
        """Call a method of every server, and exclude those that do not answer."""

        async def one(server: VLLMServer) -> None:
            try:
                await call(server)
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
        """Raise if no server is left.

        Raises:
            EngineError: with the message of the last one that was lost.
        """
        if len(self._lost) == len(self._servers):
            *_, error = self._lost.values()
            raise EngineError(f"none of {len(self._servers)} vLLM servers is left; the last: {error}") from error


class VLLMServerConfig(EngineConfig):
    """Sampling by vLLM servers over HTTP; `agentrl serve RECIPE` starts one."""

    name: str = "vllm_server"
    server: ServerConfig = ServerConfig()
    max_batch_size: Count | None = None
    """Largest number of requests that a server started by `agentrl serve` decodes together. Null: those of all live episodes,
    as many as its key-value cache holds."""
    max_prefill_tokens: Amount = 8192
    """Largest number of prompt tokens that such a server computes at once."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs` for such a server, such as gpu_memory_utilization."""

    def num_sampling(self, num_processes: int, *, num_groups: int) -> int:
        """Return the largest number of ranks that can sample the same number of groups each."""
        return max(count for count in range(1, num_processes + 1) if num_groups % count == 0)

    def for_process(self, index: int) -> Self:
        """Return the fields with one server's address."""
        return self.model_copy(update={"server": self.server.model_copy(update={"url": self.server.urls[index]})})

    def build(self, context: EngineContext) -> "Engine":
        """Return a client of the servers, which all ranks share.

        Raises:
            ConfigError: for a model whose weights vLLM cannot replace.
        """
        from agentrl.engine.vllm.experts import VLLMExperts
        from agentrl.engine.vllm.server import VLLMServer

        check_reloadable(context.model.config)
        shard = context.shard
        folder = context.handover if self.server.folder is None else absolute(self.server.folder)
        is_shared = shard.num_processes > 1
        first = shard.process % len(self.server.urls)  # ranks begin at different ones
        urls = self.server.urls[first:] + self.server.urls[:first]
        experts = VLLMExperts.for_model(context.model) if context.returns_experts else None
        servers = [
            VLLMServer(
                self.server.model_copy(update={"url": url}),
                folder=folder,
                device=context.device,
                experts=experts,
                adapters=context.adapters,
                keeps_cache=context.keeps_cache,
                is_shared=is_shared,
            )
            for url in urls
        ]
        return VLLMServers(servers, syncs=shard.process == 0) if is_shared or len(servers) > 1 else servers[0]
