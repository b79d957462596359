"""A push of weights to vLLM's servers: through a channel to each where they can, else through a folder that all see."""

import asyncio
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from safetensors import SafetensorError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.engine.vllm_http import Fault, ServerLostError
from agentrl.engine.vllm_weights import ServedModel, changes_in_buckets, in_buckets, write_weights
from agentrl.engine.weight_channel import Bucket, Channel, address_towards, pack
from agentrl.errors import EngineError

if TYPE_CHECKING:
    from agentrl.engine.vllm_server import VLLMServer

_JOIN_S = 60.0
"""How long a server may take to reach this process."""
_POLL_S = 0.005
_WORDS_S = 10.0
"""How long one may take to say why it takes no more."""
R = TypeVar("R")

Changes: TypeAlias = Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]]
"""By a weight's name, two matrices whose product is added to it."""

log = logging.getLogger(__name__)


async def push(
    servers: Sequence["VLLMServer"],
    named_tensors: Iterable[tuple[str, torch.Tensor]] | None,
    version: int,
    *,
    changes: Changes | None = None,
) -> dict["VLLMServer", ServerLostError]:
    """Replace the weights of servers of one model; return those that did not take them, and why.

    Args:
        servers: to push to, none of which samples now.
        named_tensors: every weight of the model, by the names of transformers' `state_dict`; all are taken from it. None, with
            changes: those that the servers keep.
        version: of the policy.
        changes: what is added to some of these weights, which the servers then keep; see `AdapterEngine.load_adapters`.

    Raises:
        EngineError: where weights are not the model's, or the folder cannot be written.
    """
    receivers = [
        _Receiver(server, version, has_changes=changes is not None, has_weights=named_tensors is not None)
        for server in servers
    ]
    lost: dict[VLLMServer, ServerLostError] = {}

    async def each(step: Callable[[_Receiver], Awaitable[None]]) -> None:
        async def one(receiver: _Receiver) -> None:
            try:
                async with receiver.server.deadline("load_weights"):
                    await step(receiver)
            except ServerLostError as error:
                lost[receiver.server] = error
                receivers.remove(receiver)
                receiver.close()

        await asyncio.gather(*map(one, tuple(receivers)))

    async def send(buckets: list[Bucket]) -> None:
        for bucket in buckets:
            await each(lambda receiver, bucket=bucket: receiver.send(bucket))  # type: ignore[misc]

    with ExitStack() as stack:
        for receiver in receivers:
            stack.callback(receiver.close)
            stack.enter_context(receiver.server.loading())
        await each(_Receiver.ask)
        if not receivers:
            for _ in chain(changes or (), named_tensors or ()):  # all training processes may have a part in it
                pass
            return lost
        model = receivers[0].model
        buckets = chain(
            () if changes is None else changes_in_buckets(changes, model),
            () if named_tensors is None else in_buckets(named_tensors, model, is_exact=changes is not None),
        )
        buckets = chain([next(buckets)], buckets)  # what is wrong with the first the servers need not hear of
        device = servers[0].device
        if not all(receiver.model.is_gpu for receiver in receivers):
            device = torch.device("cpu")
        if all(receiver.server.takes_channel and receiver.model.num_workers for receiver in receivers):
            await each(lambda receiver: receiver.join(device))
        if all(receiver.channel for receiver in receivers):
            packed: list[Bucket] = []
            for weights in buckets:
                following, _ = await asyncio.gather(asyncio.to_thread(pack, weights, device), send(packed))
                packed = [following]
            await send(packed)
            await each(_Receiver.end)
        else:
            for receiver in receivers:
                receiver.close()
            knows_ties = all(receiver.model.num_workers for receiver in receivers)
            with _written(servers[0].folder, version) as place:
                await write_weights(place, buckets, has_ties=not knows_ties)
                await each(lambda receiver: receiver.read(place, knows_ties=knows_ties))
        await each(_Receiver.finish)
    return lost


async def _beside(function: Callable[[], R]) -> R:
    """Call on a thread that nobody waits for after an interrupt: gloo returns late where the other end hangs."""
    called: Future[R] = Future()

    def call() -> None:
        called.set_running_or_notify_cancel()
        try:
            called.set_result(function())
        except Exception as error:  # noqa: BLE001 - carried over
            called.set_exception(error)

    threading.Thread(target=call, name="agentrl-push", daemon=True).start()
    return await asyncio.wrap_future(called)


def _listen(address: str, timeout_s: float) -> tuple[Any, int]:
    """Return where a server's workers are to meet this process, and its port."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, store.port


@contextmanager
def _written(folder: Path, version: int) -> Iterator[Path]:
    """Make a folder for weights, which is there until the context ends."""
    place = (folder / f"version-{version}-{uuid4().hex[:8]}").resolve()
    try:
        place.mkdir(parents=True)
        yield place
    except (OSError, SafetensorError) as error:
        raise EngineError(f"load_weights: cannot write to engine.server.folder: {error}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


class _Receiver:
    """A server that gets new weights."""

    def __init__(self, server: "VLLMServer", version: int, *, has_changes: bool, has_weights: bool) -> None:
        self.server, self._version = server, version
        self._has_changes, self._has_weights = has_changes, has_weights
        self._base = (uuid4().hex if has_weights else server.base) if has_changes else None
        """By what name it is to keep, or keeps, weights to which changes are added. None: it gets merged ones."""
        self.channel: Channel | None = None
        self._taking: asyncio.Task[None] | None = None
        """The server's answer, which comes when it has joined or, after that, when it has all weights."""

    @property
    def model(self) -> ServedModel:
        """What it runs."""
        assert self.server.model is not None, "see `begin`"
        return self.server.model

    async def ask(self) -> None:
        """Find out what it runs, and whether it can take what there is."""
        model = await self.server.served_model()
        if self._has_changes and not (self.server.takes_channel and model.num_workers and self._base):
            raise ServerLostError(
                f"vLLM's server at {self.server.url} has come back, and has no weights yet to which adapters could be added"
            )

    async def join(self, device: torch.device) -> None:
        """Connect its workers with this process; where they cannot reach it, the server gets files from now on."""
        url, num_workers = urlsplit(self.server.url), self.model.num_workers
        timeout_s = self.server.timeout_s
        join_s = min(_JOIN_S, timeout_s)
        await self.server.begin_replacing()
        self.server.base = None
        try:
            address = await asyncio.to_thread(address_towards, str(url.hostname), url.port or 80)
            store, port = _listen(address, join_s)
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
            self.channel = await _beside(
                lambda: Channel(store, rank=0, size=size, device=device, address=address, timeout_s=timeout_s)
            )
            await self._taking
            await self.server.call("/collective_rpc", {"method": "end_open_update"})
            await self.server.call("/start_weight_update")
            update = {"base": self._base, "brings_base": self._has_weights}
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
        """Hand over some weights."""
        assert self.channel is not None
        try:
            await _beside(partial(self.channel.send, bucket))
        except RuntimeError as error:
            raise await self._why(error) from error

    async def end(self) -> None:
        """Hand over no more, and wait until the server has loaded all."""
        assert self.channel is not None
        assert self._taking is not None
        try:
            await _beside(self.channel.end)
            await self._taking
            await self.server.call("/finish_weight_update")
        except (RuntimeError, Fault) as error:
            raise await self._why(error) from error

    async def read(self, place: Path, *, knows_ties: bool) -> None:
        """Let the server read files, with or without those of tied weights."""
        await self.server.begin_replacing()
        await self.server.read_files(place, ties=self.model.ties if knows_ties else None)

    async def finish(self) -> None:
        """Let the server sample from the new weights."""
        await self.server.end_replacing(self._version)
        self.server.base = self._base

    def close(self) -> None:
        """Let go of the channel; a server that still waits for weights is told so by that."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._taking is not None and not self._taking.cancel() and not self._taking.cancelled():
            self._taking.exception()  # has been told

    async def _why(self, error: Exception) -> ServerLostError:
        """Return what the server says of it, where it still can."""
        if self._taking is not None:
            try:
                await asyncio.wait_for(self._taking, _WORDS_S)
            except (Fault, EngineError) as said:
                error = said
            except TimeoutError:
                pass
        return self._lost("the weights", error)

    def _lost(self, what: str, error: Exception) -> ServerLostError:
        words = f"vLLM's server at {self.server.url} did not take {what}: {error}"
        return ServerLostError(f"{words}. {error.fix}" if isinstance(error, Fault) else words)
