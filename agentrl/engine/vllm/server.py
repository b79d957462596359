"""Client of one vLLM server, and the weight sync to several. Names and paths are those of vLLM 0.32.

`VLLMServer` is an engine that asks a server for completions over HTTP. `sync_weights` replaces the weights of several servers
at once: through a channel to each server if all can receive from one, else through files in a folder that all see.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

import torch

from agentrl.engine.base import Adapters, KeptBase, is_half, merging_refused
from agentrl.engine.vllm.common import (
    ADAPTER,
    MIN_TEMPERATURE,
    ServerConfig,
    abort_body,
    check_success,
    parse_choice,
    sampled_logprobs,
    sampling_fields,
)
from agentrl.engine.vllm.experts import VLLMExperts
from agentrl.engine.vllm.http import Fault, Http, PendingRequests, ServerLostError
from agentrl.engine.vllm.weights import (
    Bucket,
    Changes,
    Channel,
    ServedModel,
    Weight,
    address_towards,
    listen,
    load_served_model,
    on_daemon_thread,
    pack,
    parse_server_info,
    sync_buckets,
    weights_folder,
    write_weights,
)
from agentrl.errors import EngineError
from agentrl.types import Completion, Sampling

log = logging.getLogger(__name__)

_GENERATE = "/inference/v1/generate"
_SERVER_INFO = "/server_info?config_format=json"
_SIGN_OF_LIFE = "/weight_info"
"""Health check that the sampling process answers between two tokens."""
_CPU = torch.device("cpu")
_ABORT_S = _BACK_S = 10.0
"""Deadline of an abort request, and for a lost server to answer again."""


class VLLMServer:
    """Engine on one vLLM server; weights go there directly, or through a folder that both see (`sync_weights`).

    The server caches prefixes of conversations by itself. A weight sync affects every client of a server, so let it serve one
    engine at a time.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        folder: Path,
        device: torch.device = _CPU,
        experts: VLLMExperts | None = None,
        adapters: Adapters | None = None,
        keeps_cache: bool = False,
        is_shared: bool = False,
    ) -> None:
        """Create a client; nothing is sent before the first request.

        Args:
            config: address, deadlines and retries.
            folder: folder for weights that cannot go to the server directly, with the same path on both sides.
            device: device of the weights.
            experts: packs the experts that the server chose. None: they are not requested.
            adapters: adapters to keep apart from weights in half precision.
            keeps_cache: running requests keep their cache over weight syncs (`freeze`); later ones find none of it.
            is_shared: other ranks sample from the server too: only a weight sync stops it, a pause only this rank's requests.
        """
        self.adapters = adapters
        self._keeps_cache, self._is_shared = keeps_cache, is_shared
        self._experts = experts
        self._config = config
        self.url, self.timeout_s = config.urls[0], config.timeout_s
        self._http = Http(config)
        self.folder, self.device = folder, device
        self.takes_channel = True
        """Weights can go there directly, as far as is known."""
        self.base: str | None = None
        """Name of the kept weights to which adapters are added. None: the server keeps none."""
        self.has_adapter = False
        """The server samples with an adapter beside its weights."""
        self._version = 0
        self.model: ServedModel | None = None
        """Model that the server runs. None: not asked yet."""
        self._asking: asyncio.Task[ServedModel] | None = None
        self._inside: dict[str, asyncio.Task[Completion]] = {}
        """All unanswered requests, by id."""
        self._out = PendingRequests(self.check_alive)
        """Requests that the server has."""
        self._lines = asyncio.Semaphore(config.max_connections)
        self._aborts: set[asyncio.Task[None]] = set()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._is_paused = False
        self._is_frozen = False
        """Paused with its requests inside."""
        self._is_loading = False
        self._is_half_loaded = False
        self._is_closed = False
        self._lost: ServerLostError | None = None
        """Reason why the server is excluded."""

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was out."""
        return self._out.busy_s

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version

    @contextmanager
    def conversation(self, request_id: str) -> Iterator[None]:  # noqa: ARG002
        """Do nothing: the server's cache evicts what was used longest ago."""
        yield

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample after `prompt_ids`; see `Engine.generate`. The caller sets the deadline."""
        if self._is_closed:
            raise EngineError(f"request {request_id}: the engine is closed")
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError(f"request {request_id}: needs a prompt and max_tokens of at least 1, got {sampling}")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"request {request_id}: vLLM samples at no temperature between 0 and {MIN_TEMPERATURE}, "
                f"got {sampling.temperature}"
            )
        if request_id in self._inside:
            raise EngineError(f"request {request_id}: the conversation already waits for a completion")
        task = asyncio.create_task(self._sample(list(prompt_ids), sampling, request_id))
        self._inside[request_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed:
                raise EngineError("the engine was closed while the request waited") from None
            raise
        finally:
            del self._inside[request_id]

    async def pause(self) -> None:
        """Return running requests with what they have; hold those without a sampled token."""
        self._is_paused, self._is_frozen = True, False
        self._set_gate()
        if self._lost is not None:
            return
        async with self.deadline("pause"):
            if not self._is_shared:
                await self._pause_server()
            while self._out:
                # By name, what that does not end: requests that arrive after the pause, or all of them at a shared server.
                await self._http.request("an abort", "POST", "/abort_requests", abort_body(self._out))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._out.wait_until_none(), 0.1)

    async def freeze(self) -> None:
        """Stop sampling, and let running requests wait at the server with their cache; see `FreezableEngine`."""
        assert self._keeps_cache, "a cache that is found again would be used for other requests too"
        self._is_paused = self._is_frozen = True
        self._set_gate()
        if self._lost is None and not self._is_shared:
            async with self.deadline("pause"):
                await self._pause_server()

    async def _pause_server(self) -> None:
        mode = "keep" if self._is_frozen else "abort"
        await self._http.request("a pause", "POST", f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        """Sample again."""
        if self._lost is None and not self._is_shared:
            async with self.deadline("resume"):
                await self._http.request("an end of the pause", "POST", "/resume")
        self._is_paused = self._is_frozen = False
        self._set_gate()

    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights, by the names of transformers' `state_dict`, and drop every cached key and value."""
        self.check_idle()
        for error in (await sync_weights([self], named_tensors, version)).values():
            raise error

    async def kept_base(self) -> KeptBase:
        """Return whether the next sync of adapters must send the model's weights too; see `AdapterEngine`."""
        model = self.model if self.adapters is None else await self.served_model()
        is_direct = self.takes_channel and (model is None or model.num_workers > 0)
        if self.adapters is not None and model is not None and is_half(model.dtype):
            if model.adapter_rank < self.adapters.rank:
                words = f"was not started to keep adapters of rank {self.adapters.rank} apart from weights (docs/engines.md)"
                raise merging_refused(f"vLLM's server at {self.url} {words}")
            if not is_direct:
                raise merging_refused(f"vLLM's server at {self.url} takes weights in files alone")
        if not is_direct:
            return KeptBase.IMPOSSIBLE
        return KeptBase.MISSING if self.base is None else KeptBase.THERE

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype in which the server computes. None: not known yet."""
        return None if self.model is None else self.model.dtype

    async def load_adapters(
        self, changes: Changes, base: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Replace the weights by those of the model plus changes; see `AdapterEngine`."""
        self.check_idle()
        for error in (await sync_weights([self], base, version, changes=changes)).values():
            raise error

    def check_idle(self) -> None:
        """Raise EngineError if the engine is closed or requests are running."""
        if self._is_closed:
            raise EngineError("load_weights: the engine is closed")
        if self._out and not self._is_frozen:
            raise EngineError("load_weights needs a paused or idle engine: call pause() first")

    async def close(self) -> None:
        """Stop all requests and disconnect; the server keeps running."""
        self._is_closed = True
        tasks = list(self._inside.values())
        if self._asking is not None:
            tasks.append(self._asking)  # type: ignore[arg-type]  # its result does not matter here
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._aborts)
        await self._http.close()

    def exclude(self, error: ServerLostError) -> None:
        """Fail all requests until the server has weights again."""
        self._lost = error
        self._set_gate()
        self._out.fail(error)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Hold requests until the context ends."""
        before, self._is_loading = self._is_loading, True
        self._set_gate()
        try:
            yield
        finally:
            self._is_loading = before
            self._set_gate()

    def _set_gate(self) -> None:
        if (self._is_paused or self._is_loading) and self._lost is None:
            self._may_send.clear()
        else:
            self._may_send.set()

    @asynccontextmanager
    async def deadline(self, what: str) -> AsyncIterator[None]:
        """Limit the context to `timeout_s`.

        Raises:
            ServerLostError: at the deadline: a server that hangs is lost like one that is down.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except TimeoutError:
            raise ServerLostError(
                f"vLLM's server at {self.url} did not finish {what} within engine.server.timeout_s: "
                f"{self.timeout_s:g}. Start it again if it hangs; if it is slow, raise that"
            ) from None

    async def served_model(self) -> ServedModel:
        """Return the server's model; concurrent callers share one request."""
        if self.model is None:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_model())
                # Retrieve the exception even if no caller waits any more.
                self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.model = await asyncio.shield(self._asking)
        return self.model

    async def _ask_model(self) -> ServedModel:
        async with self.deadline("its first answers"):
            config = await self._http.request("its configuration", "GET", _SERVER_INFO, parse=parse_server_info)
            if config.logprobs_mode != "processed_logprobs":
                raise EngineError(
                    f"vLLM's server at {self.url} reports {config.logprobs_mode}: training needs the "
                    "log-probabilities of what is sampled; start it with --logprobs-mode processed_logprobs"
                )
            model = await asyncio.to_thread(load_served_model, config)
            if not model.num_workers:
                log.warning(
                    "%s takes weights in files alone; see docs/engines.md for how to start it otherwise", self.url
                )
            if self._is_shared:  # the first weight sync does the rest
                return model
            known = await self._http.request("its version", "GET", _SIGN_OF_LIFE, parse=lambda a: a["weight_version"])
            if str(known).isdecimal():
                self._version = int(known)
            else:  # not used yet
                await self._extend("continue_random_numbers")
                await self._set_version(self._version)
            if not self._is_paused:  # it may have been left paused
                await self._http.request("an end of the pause", "POST", "/resume")
        return model

    async def _extend(self, method: str) -> None:
        """Call a method of our extension of its workers, if the server was started with it."""

        async def call() -> None:
            try:
                await self._http.request_once("POST", "/collective_rpc", {"method": method})
            except Fault as fault:
                if "no attribute" not in str(fault):
                    raise

        await self._http.with_retries(f"{method} of its workers", call)

    async def _set_version(self, version: int) -> None:
        """Set the version that the server reports with each token; a restarted server has none."""
        await self._http.request("a version", "POST", "/update_weight_version", {"new_version": str(version)})

    async def _sample(self, prompt_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        what = f"request {request_id}"
        while True:
            done = await self._http.with_retries(what, lambda: self._send(prompt_ids, sampling, request_id))
            if done.token_ids:  # interrupted before its first token: wait for the end of the pause
                return done

    async def _send(self, prompt_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        """Make a request once, under a new id, as soon as fewer than `max_connections` are pending."""
        model = await self.served_model()
        if (worst := max(prompt_ids)) >= model.vocab_size:  # would end a server without a tokenizer
            raise EngineError(f"request {request_id}: token {worst} is outside the vocabulary of {model.vocab_size}")
        async with self._lines:
            while not self._may_send.is_set():
                await self._may_send.wait()
            if self._lost is not None:
                raise ServerLostError(str(self._lost)) from self._lost
            if self._is_half_loaded:
                raise EngineError(f"request {request_id}: the last weight sync failed half-way: sync again")
            server_id = f"{request_id}.{uuid4().hex}"
            body = {"token_ids": prompt_ids, "request_id": server_id, "sampling_params": sampling_fields(sampling)}
            body |= {"model": ADAPTER} if self.has_adapter else {}
            body |= {"cache_salt": str(self._version)} if self._keeps_cache else {}
            try:
                async with self._out.waiting(server_id):
                    return await self._http.request_once(
                        "POST", _GENERATE, body, parse=lambda answer: self._read(answer, sampling, len(prompt_ids))
                    )
            except EngineError as error:
                if self.has_adapter and f"`{ADAPTER}` does not exist" in str(error):
                    raise self._restarted("weights without adapters") from error
                raise
            except (asyncio.CancelledError, Fault):
                task = asyncio.create_task(self._abort(server_id))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
                raise

    async def _abort(self, server_id: str) -> None:
        """Abort a request at the server; a server that cannot be reached samples nothing."""
        with suppress(Fault, EngineError, TimeoutError):
            await asyncio.wait_for(
                self._http.request_once("POST", "/abort_requests", abort_body([server_id])), _ABORT_S
            )

    def _read(self, answer: Any, sampling: Sampling, num_prompt_tokens: int) -> Completion:
        (choice,) = answer["choices"]
        token_ids, logprobs, reason = parse_choice(choice)
        experts = b""
        if self._experts is not None and token_ids:
            num_tokens = num_prompt_tokens + len(token_ids) - 1 - sampling.experts_from
            experts = self._experts.pack_npy(choice.get("routed_experts"), num_tokens=num_tokens)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=tuple(sampled_logprobs(logprobs, sampling)),
            versions=self._versions(choice.get("weight_versions") or [], len(token_ids)),
            finish_reason=reason,
            num_cached_tokens=details.get("cached_tokens") or 0,
            experts=experts,
        )

    def _versions(self, spans: list[dict[str, Any]], num_tokens: int) -> tuple[int, ...]:
        versions = [self._version] * num_tokens
        for span in spans:
            if not (name := str(span["version"])).isdecimal():
                raise self._restarted(f"weights of version {name!r}")
            begin, end = int(span["start"]), int(span["end"])
            versions[begin:end] = [int(name)] * (end - begin)
        if len(versions) != num_tokens:
            raise ValueError(f"versions of {len(versions)} tokens, not {num_tokens}")
        return tuple(versions)

    def _restarted(self, found: str) -> ServerLostError:
        return ServerLostError(
            f"vLLM's server at {self.url} samples with {found} and not with those of the last weight sync: it was started "
            "again. Start the run again too; it resumes where it was"
        )

    async def begin_replacing(self) -> None:
        """Pause the server; until its weights are replaced, every request is refused."""
        self._is_half_loaded = True
        self.has_adapter = False
        await self._pause_server()
        await self._extend("continue_random_numbers")  # a restarted server lacks it

    async def read_files(self, folder: Path, *, ties: Mapping[str, str] | None) -> None:
        """Make the server read weights: by our extension, which handles ties, or (None) by its own loader."""
        if ties is None:
            await self._extend("forget_kernels")
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        else:
            paths = [str(path) for path in sorted(folder.iterdir())]
            reload = {"method": "read_weights", "kwargs": {"paths": paths, "ties": dict(ties)}}
        await self._http.request(f"reading the weights in {folder}", "POST", "/collective_rpc", reload)

    async def load_adapter(self, path: str) -> None:
        """Make the server load the adapter that its workers keep by this path."""
        body = {"lora_name": ADAPTER, "lora_path": path, "load_inplace": True}
        await self._http.request_once("POST", "/v1/load_lora_adapter", body, is_text=True)
        self.has_adapter = True

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Make a request once."""
        await self._http.request_once("POST", path, body)

    async def is_answering(self) -> bool:
        """Return whether the server answers one health check."""
        with suppress(Fault, EngineError, TimeoutError):
            await asyncio.wait_for(self._http.request_once("GET", _SIGN_OF_LIFE), _BACK_S)
            return True
        return False

    async def check_alive(self) -> None:
        """Raise ServerLostError if the server does not answer."""
        async with self.deadline("telling that it is alive"):
            await self._http.request("a sign of life", "GET", _SIGN_OF_LIFE)

    async def end_replacing(self, version: int) -> None:
        """Let the server sample with its new weights."""
        if not self._is_frozen:
            reset = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            await self._http.request("forgetting its cache", "POST", reset, parse=check_success)
        await self._set_version(version)
        if self._is_shared or not self._is_paused:
            await self._http.request("an end of the pause", "POST", "/resume")
        self.follow(version, has_adapter=self.has_adapter)

    def follow(self, version: int, *, has_adapter: bool) -> None:
        """Note a weight sync: the server samples with the weights of a version, with or without an adapter beside them."""
        self._version, self.has_adapter = version, has_adapter
        self._is_half_loaded, self._lost = False, None
        self._set_gate()


_JOIN_S = 60.0
"""Deadline for a server to connect with this process."""
_POLL_S = 0.005
_WORDS_S = 10.0
"""Deadline for a server to report why it failed."""


async def sync_weights(
    servers: Sequence["VLLMServer"],
    named_tensors: Iterable[tuple[str, torch.Tensor]] | None,
    version: int,
    *,
    changes: Changes | None = None,
) -> dict["VLLMServer", ServerLostError]:
    """Replace the weights of servers of one model; return the servers that failed, with the reason.

    Args:
        servers: receivers, none of which samples now.
        named_tensors: every weight of the model, by the names of transformers' `state_dict`; always consumed in full. None,
            with changes: the weights that the servers keep.
        version: policy version.
        changes: low-rank changes of these weights, which the servers then keep; see `AdapterEngine.load_adapters`.

    Raises:
        EngineError: if weights are not the model's, or the folder cannot be written.
    """
    receivers = [
        _Receiver(server, version, has_changes=changes is not None, has_weights=named_tensors is not None)
        for server in servers
    ]
    lost: dict[VLLMServer, ServerLostError] = {}

    each = partial(_for_each, receivers, lost)
    with ExitStack() as stack:
        for receiver in receivers:
            stack.callback(receiver.close)
            stack.enter_context(receiver.server.loading())
        await each(_Receiver.check_model)
        if not receivers:
            for _ in chain(changes or (), named_tensors or ()):  # gathering them may take every rank
                pass
            return lost
        buckets = sync_buckets(receivers[0].model, named_tensors, changes)
        device = servers[0].device
        if not all(receiver.model.is_gpu for receiver in receivers):
            device = torch.device("cpu")
        if all(receiver.server.takes_channel and receiver.model.num_workers for receiver in receivers):
            await each(lambda receiver: receiver.connect(device))
        if all(receiver.channel for receiver in receivers):
            await _send_buckets(buckets, device, each)
            await each(_Receiver.end)
        else:
            for receiver in receivers:
                receiver.close()
            knows_ties = all(receiver.model.num_workers for receiver in receivers)
            with weights_folder(servers[0].folder, version) as place:
                await write_weights(place, buckets, has_ties=not knows_ties)
                await each(lambda receiver: receiver.load_files(place, knows_ties=knows_ties))
        await each(_Receiver.finish)
    return lost


async def _for_each(receivers: list["_Receiver"], lost: dict["VLLMServer", ServerLostError], step: "_Step", /) -> None:
    """Take a step with all receivers at once; move those that fail from `receivers` to `lost`."""

    async def one(receiver: _Receiver) -> None:
        try:
            async with receiver.server.deadline("load_weights"):
                await step(receiver)
        except ServerLostError as error:
            lost[receiver.server] = error
            receivers.remove(receiver)
            receiver.close()

    await asyncio.gather(*map(one, tuple(receivers)))


async def _send_buckets(
    buckets: Iterable[list[Weight]], device: torch.device, each: "Callable[[_Step], Awaitable[None]]"
) -> None:
    """Send buckets to all receivers, packing the next one meanwhile."""

    async def send(packed: Bucket | None) -> None:
        if packed is not None:
            await each(lambda receiver: receiver.send(packed))

    packed: Bucket | None = None
    for weights in buckets:
        packed, _ = await asyncio.gather(asyncio.to_thread(pack, weights, device), send(packed))
    await send(packed)


class _Receiver:
    """A server that receives weights in one sync."""

    def __init__(self, server: "VLLMServer", version: int, *, has_changes: bool, has_weights: bool) -> None:
        self.server = server
        self._version = version
        self._has_changes = has_changes
        self._has_weights = has_weights
        self._base = (uuid4().hex if has_weights else server.base) if has_changes else None
        """Name of the kept weights to which changes are added. None: the server gets merged weights."""
        self._adapter: str | None = None
        """Path of the adapter that the changes are for the server. None: it adds them to weights."""
        self.channel: Channel | None = None
        self._taking: asyncio.Task[None] | None = None
        """Pending request to the server: first to join the channel, then to receive all weights."""

    @property
    def model(self) -> ServedModel:
        """Model that the server runs."""
        assert self.server.model is not None, "see `check_model`"
        return self.server.model

    async def check_model(self) -> None:
        """Ask for the server's model; raise ServerLostError if it lacks the weights that changes need."""
        model = await self.server.served_model()
        if self._has_changes and not (self.server.takes_channel and model.num_workers and self._base):
            raise ServerLostError(
                f"vLLM's server at {self.server.url} has come back, and has no weights yet to which adapters could be added"
            )

    async def connect(self, device: torch.device) -> None:
        """Connect the server's workers with this process; if that fails, the server gets files from now on."""
        url, num_workers = urlsplit(self.server.url), self.model.num_workers
        timeout_s = self.server.timeout_s
        join_s = min(_JOIN_S, timeout_s)
        await self.server.begin_replacing()
        self.server.base = None
        try:
            address = await asyncio.to_thread(address_towards, str(url.hostname), url.port or 80)
            store, port = listen(address, join_s)
            fields = {"host": address, "port": port, "num_workers": num_workers, "is_gpu": device.type == "cuda"}
            # While another server hangs, until its deadline, this one waits for the next bucket: longer than that.
            fields |= {"join_s": join_s, "timeout_s": 2 * timeout_s}
            self._taking = asyncio.create_task(self.server.call("/init_weight_transfer_engine", {"init_info": fields}))
            async with asyncio.timeout(join_s):
                while not store.check([str(rank) for rank in range(1, num_workers + 1)]):
                    if self._taking.done():
                        await self._taking
                    await asyncio.sleep(_POLL_S)
            size = 1 + num_workers
            self.channel = await on_daemon_thread(
                lambda: Channel(store, rank=0, size=size, device=device, address=address, timeout_s=timeout_s)
            )
            await self._taking
            await self.server.call("/collective_rpc", {"method": "end_open_update"})
            await self.server.call("/start_weight_update")
            if self._has_changes and self.server.adapters is not None and is_half(self.model.dtype):
                self._adapter = f"agentrl:{self._version}-{uuid4().hex}"
            update = {"base": self._base, "brings_base": self._has_weights, "adapter": self._adapter}
            self._taking = asyncio.create_task(self.server.call("/update_weights", {"update_info": update}))
        except (RuntimeError, OSError, EngineError, Fault) as error:
            self.close()
            await self.server.check_alive()
            if self._has_changes:
                raise self._lost("adapters", error) from error
            self.server.takes_channel = False
            log.warning(
                "%s cannot take weights from this process directly, so they go there in files: %s",
                self.server.url,
                error or "it does not reach this process",
            )

    async def send(self, bucket: Bucket) -> None:
        """Send a bucket."""
        assert self.channel is not None
        try:
            await on_daemon_thread(partial(self.channel.send, bucket))
        except RuntimeError as error:
            raise await self._failure_cause(error) from error

    async def end(self) -> None:
        """Mark the end of the weights, and wait until the server has loaded all."""
        assert self.channel is not None
        assert self._taking is not None
        try:
            await on_daemon_thread(self.channel.end)
            await self._taking
            await self.server.call("/finish_weight_update")
            if self._adapter is not None:
                await self.server.load_adapter(self._adapter)
        except (RuntimeError, Fault) as error:
            raise await self._failure_cause(error) from error

    async def load_files(self, place: Path, *, knows_ties: bool) -> None:
        """Make the server read files, with or without those of tied weights."""
        await self.server.begin_replacing()
        await self.server.read_files(place, ties=self.model.ties if knows_ties else None)

    async def finish(self) -> None:
        """Let the server sample with the new weights."""
        await self.server.end_replacing(self._version)
        self.server.base = self._base

    def close(self) -> None:
        """Close the channel, which also ends the wait of the server."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._taking is not None and not self._taking.cancel() and not self._taking.cancelled():
            self._taking.exception()  # retrieved, or asyncio would log it

    async def _failure_cause(self, error: Exception) -> ServerLostError:
        """Return the failure as the server reports it, if it still can."""
        if self._taking is not None:
            try:
                await asyncio.wait_for(self._taking, _WORDS_S)
            except (Fault, EngineError) as reported:
                error = reported
            except TimeoutError:
                pass
        return self._lost("the weights", error)

    def _lost(self, what: str, error: Exception) -> ServerLostError:
        words = f"vLLM's server at {self.server.url} did not take {what}: {error}"
        return ServerLostError(f"{words}. {error.fix}" if isinstance(error, Fault) else words)


_Step: TypeAlias = Callable[[_Receiver], Awaitable[None]]
