"""Base of engines that decode all running requests together, one token at a time."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from agentrl.engine.base import EngineConfig, EngineContext
from agentrl.errors import EngineError
from agentrl.types import Amount, Completion, Count, FinishReason, Sampling

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A pending request; grows as it is sampled."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    arrived: int
    """Decoding step before which it arrived."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    experts: bytes = b""

    @property
    def num_routed_tokens(self) -> int:
        """Number of tokens whose experts are returned: all computed ones from `Sampling.experts_from` on."""
        return len(self.prompt_ids) + len(self.token_ids) - 1 - self.sampling.experts_from

    def finish(self, reason: FinishReason) -> None:
        """Return the completion to the caller, if it still waits."""
        if not self.future.done():
            self.future.set_result(
                Completion(
                    token_ids=tuple(self.token_ids),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish_reason=reason,
                    num_cached_tokens=self.num_cached_tokens,
                    experts=self.experts,
                )
            )


def check_weight(name: str, tensor: "torch.Tensor", own: "Mapping[str, torch.Tensor]") -> None:
    """Raise EngineError for a weight that the model does not have, or not in this shape."""
    if name not in own or own[name].shape != tensor.shape:
        expected = tuple(own[name].shape) if name in own else "no such weight"
        raise EngineError(f"weight {name!r} of shape {tuple(tensor.shape)}: the engine has {expected}")


_BATCH_SIZE = 64
"""Largest number of requests decoded together by an engine that is built without a run."""


class BatchedConfig(EngineConfig):
    """Fields of an engine that decodes requests together in this process."""

    max_batch_size: Count | None = None
    """Largest number of requests decoded together. Null: as many as episodes are live; vLLM decodes as many of them as its
    key-value cache holds, `transformers` keeps a row for each."""
    max_prefill_tokens: Amount = 8192
    """Largest number of prompt tokens, including padding, computed at once; a longer prompt is computed alone."""
    lockstep: bool | None = None
    """Decode only when every live episode waits for tokens, so that batches do not depend on the timing of environments
    and a run repeats bit for bit. None: true if `rollout.mode` is sync, the only one that can repeat, and there is no GPU. Set
    it to false if environments take longer than a decoding step (milliseconds)."""

    @property
    def is_deterministic(self) -> bool:
        """True unless batches depend on the timing of environments."""
        return self.lockstep is not False

    def resolved(self, context: EngineContext) -> Self:
        """Return the fields with those resolved for the run that the recipe leaves open."""
        lockstep = context.repeats_exactly if self.lockstep is None else self.lockstep
        size = self.max_batch_size or context.max_live_episodes
        return self.model_copy(update={"lockstep": lockstep, "max_batch_size": size})


class BatchedEngine(ABC):
    """Steps while there are requests; with `lockstep`, only while every conversation waits for tokens."""

    def __init__(self, config: BatchedConfig, *, vocab_size: int) -> None:
        """Create an idle engine."""
        self._config = config
        self._max_batch_size = config.max_batch_size or _BATCH_SIZE
        self._vocab_size = vocab_size
        self._version = 0
        self._waiting: list[Request] = []
        """Requests whose decoding has not started."""
        self._inside: dict[str, Request] = {}
        """All unanswered requests, by id."""
        self._open: set[str] = set()
        self._is_paused = False
        self._is_closed = False
        self._driver: asyncio.Task[None] | None = None
        self._step = 0
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds spent in decoding steps."""
        return self._busy_s

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version

    @contextmanager
    def conversation(self, request_id: str) -> Iterator[None]:
        """Keep the cache of this id between its requests; with `lockstep`, decode only while it waits for tokens."""
        self._open.add(request_id)
        try:
            yield
        finally:
            self._open.discard(request_id)
            self._end_conversation(request_id)
            self._kick()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample after `prompt_ids`; see `Engine.generate`."""
        if self._is_closed:
            raise EngineError(f"request {request_id}: the engine is closed")
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError(f"request {request_id}: needs a prompt and max_tokens of at least 1, got {sampling}")
        if (worst := max(prompt_ids)) >= self._vocab_size:  # would fail all requests of a step
            raise EngineError(f"request {request_id}: token {worst} is outside the vocabulary of {self._vocab_size}")
        if request_id in self._inside:
            raise EngineError(f"request {request_id}: the conversation already waits for a completion")
        request = Request(
            request_id=request_id,
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            arrived=self._step,
        )
        self._waiting.append(request)
        self._inside[request_id] = request
        self._kick()
        try:
            return await request.future
        finally:
            self._drop(request)

    def _check_loadable(self) -> None:
        """Raise EngineError if the engine is closed or a request is being decoded."""
        if self._is_closed:
            raise EngineError("load_weights: the engine is closed")
        if len(self._inside) > len(self._waiting):
            raise EngineError("load_weights needs a paused or idle engine: call pause() first")

    @abstractmethod
    async def pause(self) -> None:
        """Return running requests with what they have; hold waiting ones."""

    async def resume(self) -> None:
        """Sample again."""
        self._is_paused = False
        self._kick()

    @abstractmethod
    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Replace the weights; see `Engine.load_weights`."""

    async def close(self) -> None:
        """Release all resources; pending and later requests get an EngineError."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail(EngineError("the engine was closed while the request waited"))

    @abstractmethod
    async def _advance(self, waiting: list[Request]) -> None:
        """Admit waiting requests in order, as far as there is room, and decode one token of each running request.

        Admitted requests are removed from `self._waiting`, answered ones from `self._inside`.
        """

    @abstractmethod
    def _withdraw(self, request: Request) -> None:
        """Stop decoding a request whose caller was cancelled."""

    @abstractmethod
    def _end_conversation(self, request_id: str) -> None:
        """Release the cache of a conversation."""

    def _kick(self) -> None:
        """Start decoding if there are requests and no reason to wait."""
        if self._can_step() and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._on_driver_done)

    def _can_step(self) -> bool:
        held = self._config.lockstep is not False and any(owner not in self._inside for owner in self._open)
        return bool(self._inside) and not (self._is_paused or self._is_closed or held)

    async def _drive(self) -> None:
        await asyncio.sleep(0)  # episodes that became ready together are admitted together
        while self._can_step():
            begin = time.perf_counter()
            self._step += 1
            # Sorted, because the order within a step depends on timing.
            await self._advance(sorted(self._waiting, key=lambda r: (r.arrived, r.request_id)))
            self._busy_s += time.perf_counter() - begin
            await asyncio.sleep(0)

    def _on_driver_done(self, driver: asyncio.Task[None]) -> None:
        """Fail all pending requests with an error of the model."""
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            words = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            failure = EngineError(f"{self._name} failed: {words}")
            failure.__cause__ = error
            self._fail(failure)

    @property
    @abstractmethod
    def _name(self) -> str:
        """Name of the engine in errors."""

    def _fail(self, failure: EngineError) -> None:
        """Fail every pending request."""
        for request in self._inside.values():
            if not request.future.done():
                request.future.set_exception(failure)
        self._inside.clear()
        self._waiting.clear()

    def _answered(self, request: Request, reason: FinishReason) -> None:
        self._inside.pop(request.request_id, None)
        request.finish(reason)

    def _drop(self, request: Request) -> None:
        """Drop a request whose caller no longer waits."""
        if self._inside.get(request.request_id) is request:
            del self._inside[request.request_id]
        if request in self._waiting:
            self._waiting.remove(request)
        elif not request.future.done() or request.future.cancelled():
            self._withdraw(request)
