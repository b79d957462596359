"""What engines share that decode all running requests together, one token at a time."""

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
    """A request on its way; grows as it is sampled."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    arrived: int
    """Number of the decoding step before which it came."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    experts: bytes = b""

    @property
    def num_routed_tokens(self) -> int:
        """Number of tokens whose experts are to be told: all that were computed, from `Sampling.experts_from` on."""
        return len(self.prompt_ids) + len(self.token_ids) - 1 - self.sampling.experts_from

    def finish(self, reason: FinishReason) -> None:
        """Hand what was sampled to the caller, if there still is one."""
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
    """Refuse a weight that the model has not, or not in this shape.

    Raises:
        EngineError: with the name and both shapes.
    """
    if name not in own or own[name].shape != tensor.shape:
        expected = tuple(own[name].shape) if name in own else "no such weight"
        raise EngineError(f"weight {name!r} of shape {tuple(tensor.shape)}: the engine has {expected}")


class BatchedConfig(EngineConfig):
    """Fields of an engine that decodes requests together in this process."""

    max_batch_size: Count = 64
    """Largest number of requests decoded together; each holds one row of the key-value cache."""
    max_prefill_tokens: Amount = 8192
    """Largest number of prompt tokens, padding included, computed at once; a longer prompt is computed alone."""
    lockstep: bool | None = None
    """Decode only when every live episode waits for tokens, so that batches do not depend on the timing of environments
    and a run repeats bit for bit. None: where `rollout.mode` is sync, the only one that can repeat. Set to false where
    environments take longer than a decoding step (milliseconds)."""

    @property
    def is_deterministic(self) -> bool:
        """True unless batches depend on the timing of environments."""
        return self.lockstep is not False

    def with_lockstep(self, context: EngineContext) -> Self:
        """Return the fields with `lockstep` as the run wants it, where the recipe does not say."""
        return self if self.lockstep is not None else self.model_copy(update={"lockstep": context.repeats_exactly})


class BatchedEngine(ABC):
    """Takes requests, and steps while there are any; with `lockstep`, only while every conversation waits for tokens."""

    def __init__(self, config: BatchedConfig, *, vocab_size: int) -> None:
        """Begin idle."""
        self._config = config
        self._vocab_size = vocab_size
        self._version = 0
        self._waiting: list[Request] = []
        """Requests whose decoding has not started."""
        self._inside: dict[str, Request] = {}
        """All requests without an answer, by id."""
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
        """Keep what was computed for this id between its requests; with `lockstep`, decode only while it waits for tokens."""
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
        if (worst := max(prompt_ids)) >= self._vocab_size:  # it would fail all requests of a step
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
        """Refuse a push of weights where a request is being decoded, or is handed over to be."""
        if self._is_closed:
            raise EngineError("load_weights: the engine is closed")
        if len(self._inside) > len(self._waiting):
            raise EngineError("load_weights needs a paused or idle engine: call pause() first")

    @abstractmethod
    async def pause(self) -> None:
        """Return running requests as they stand; hold waiting ones."""

    async def resume(self) -> None:
        """Sample again."""
        self._is_paused = False
        self._kick()

    @abstractmethod
    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Replace the weights; see `Engine.load_weights`."""

    async def close(self) -> None:
        """Release what the engine holds; requests that still wait, and later ones, get an EngineError."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail(EngineError("the engine was closed while the request waited"))

    @abstractmethod
    async def _advance(self, waiting: list[Request]) -> None:
        """Admit as many of the waiting requests as there is room for, in order, and decode one token of each running one.

        What was admitted leaves `self._waiting`, what is answered leaves `self._inside`.
        """

    @abstractmethod
    def _withdraw(self, request: Request) -> None:
        """Stop decoding a request whose caller has gone."""

    @abstractmethod
    def _end_conversation(self, request_id: str) -> None:
        """Release what was kept for a conversation."""

    def _kick(self) -> None:
        """Start decoding where there is something to do and no reason to wait."""
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
            # The order within a step is a matter of timing.
            await self._advance(sorted(self._waiting, key=lambda r: (r.arrived, r.request_id)))
            self._busy_s += time.perf_counter() - begin
            await asyncio.sleep(0)

    def _on_driver_done(self, driver: asyncio.Task[None]) -> None:
        """Hand an error of the model to everyone who waits for it."""
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            words = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            failure = EngineError(f"{self._name} failed: {words}")
            failure.__cause__ = error
            self._fail(failure)

    @property
    @abstractmethod
    def _name(self) -> str:
        """What to call the engine in an error."""

    def _fail(self, failure: EngineError) -> None:
        """Let every request fail."""
        for request in self._inside.values():
            if not request.future.done():
                request.future.set_exception(failure)
        self._inside.clear()
        self._waiting.clear()

    def _answered(self, request: Request, reason: FinishReason) -> None:
        self._inside.pop(request.request_id, None)
        request.finish(reason)

    def _drop(self, request: Request) -> None:
        """Forget a request, wherever it is: its caller has gone."""
        if self._inside.get(request.request_id) is request:
            del self._inside[request.request_id]
        if request in self._waiting:
            self._waiting.remove(request)
        elif not request.future.done() or request.future.cancelled():
            self._withdraw(request)
