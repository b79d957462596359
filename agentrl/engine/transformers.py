"""The embedded engine: a transformers model, continuous batching, a cache that is kept from turn to turn.

`B` requests of a forward pass, `Q` query positions, `V` vocabulary, `D` hidden size.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from agentrl.engine.attention import use_grouped_attention
from agentrl.engine.base import EngineConfig
from agentrl.engine.ragged_cache import RaggedCache
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Completion, FinishReason, Sampling


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """A request on its way; grows as it is sampled."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    uniforms: list[float]
    arrived: int
    """Number of the decoding step before which it came."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """A row of the cache."""

    index: int
    owner: str | None = None
    """The conversation that the cached tokens belong to."""
    cached_ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values the row holds."""
    request: _Request | None = None
    last_used: int = 0


def uniforms(seed: int, start: int, count: int) -> list[float]:
    """Draw one number in [0, 1) for each context position from `start` on.

    The number at a position depends on the seed and the position alone, so a completion that was interrupted and goes
    on draws what it would have drawn.
    """
    blocks = np.random.Generator(np.random.Philox(key=seed, counter=start)).random((count, 4))  # 4 numbers a counter
    drawn: list[float] = blocks[:, 0].tolist()
    return drawn


class TransformersEngine:
    """Decodes all running requests together, one token at a time, and refills a row as soon as it is free.

    Each row of the batch has its own length, so rows at different turns of different episodes decode together. A
    conversation's row is kept between its turns: a later prompt computes only the tokens that are new.
    """

    def __init__(self, model: Any, config: EngineConfig | None = None, *, version: int = 0) -> None:
        """Take a transformers causal language model, which the engine then owns."""
        self._config = config or EngineConfig()
        _check_attention(model.config)
        self._model = model.eval()
        use_grouped_attention(model)
        self._device: torch.device = model.device
        self._version = version
        self._rows = [_Row(index=i) for i in range(self._config.max_batch_size)]
        self._cache = RaggedCache(len(self._rows))
        self._waiting: list[_Request] = []
        self._inside: dict[str, _Request] = {}
        self._open: set[str] = set()
        self._is_paused = False
        self._is_closed = False
        self._driver: asyncio.Task[None] | None = None
        self._step = 0
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds spent in forward passes and sampling."""
        return self._busy_s

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version

    @contextmanager
    def conversation(self, request_id: str) -> Iterator[None]:
        """Keep the row of this id between its requests; with `lockstep`, decode only while it waits for tokens."""
        self._open.add(request_id)
        try:
            yield
        finally:
            self._open.discard(request_id)
            for row in self._rows:
                if row.owner == request_id and row.request is None:
                    self._release(row)
            self._kick()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample after `prompt_ids`; see `Engine.generate`."""
        if self._is_closed:
            raise EngineError(f"request {request_id}: the engine is closed")
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError(f"request {request_id}: needs a prompt and max_tokens of at least 1, got {sampling}")
        if request_id in self._inside:
            raise EngineError(f"request {request_id}: the conversation already waits for a completion")
        request = _Request(
            request_id=request_id,
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            uniforms=uniforms(sampling.seed, len(prompt_ids), sampling.max_tokens),
            arrived=self._step,
        )
        self._waiting.append(request)
        self._inside[request_id] = request
        self._kick()
        try:
            return await request.future
        finally:
            self._remove(request)

    async def pause(self) -> None:
        """Return running requests as they stand; hold waiting ones."""
        self._is_paused = True
        for row in self._rows:
            if row.request is not None:
                self._finish(row, FinishReason.ABORTED)

    async def resume(self) -> None:
        """Sample again."""
        self._is_paused = False
        self._kick()

    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy weights into the model, by the names of its `state_dict`, and forget every cached key and value."""
        if any(row.request for row in self._rows):
            raise EngineError("load_weights needs a paused or idle engine: call pause() first")
        if self._is_closed:
            raise EngineError("load_weights: the engine is closed")
        self._forget()  # first, because weights that are refused half-way have changed the model too
        own: dict[str, torch.Tensor] = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in own or own[name].shape != tensor.shape:
                    expected = tuple(own[name].shape) if name in own else "no such weight"
                    raise EngineError(f"weight {name!r} of shape {tuple(tensor.shape)}: the engine has {expected}")
                own[name].copy_(tensor)
        self._version = version

    async def close(self) -> None:
        """Drop the model and the cache."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail(EngineError("the engine was closed while the request waited"))
        self._model = None

    def _kick(self) -> None:
        """Start decoding where there is something to do and no reason to wait."""
        if self._can_step() and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._on_driver_done)

    def _can_step(self) -> bool:
        held = self._config.lockstep and any(owner not in self._inside for owner in self._open)
        return bool(self._inside) and not (self._is_paused or self._is_closed or held)

    async def _drive(self) -> None:
        await asyncio.sleep(0)  # episodes that became ready together are admitted together
        while self._can_step():
            begin = time.perf_counter()
            self._step += 1
            self._admit()
            self._decode()
            self._busy_s += time.perf_counter() - begin
            await asyncio.sleep(0)

    def _on_driver_done(self, driver: asyncio.Task[None]) -> None:
        """Hand an error of the model to everyone who waits for it."""
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            failure = EngineError(f"the transformers engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, failure: EngineError) -> None:
        """Let every request fail, and begin afresh: a pass that broke off leaves keys and values half written."""
        for request in self._inside.values():
            if not request.future.done():
                request.future.set_exception(failure)
        self._inside.clear()
        self._waiting.clear()
        for row in self._rows:
            row.request = None
        self._forget()

    def _forget(self) -> None:
        """Drop all keys and values, buffers included: in a new cache nothing can shine through."""
        self._cache = RaggedCache(len(self._rows))
        for row in self._rows:
            self._release(row)

    @staticmethod
    def _release(row: _Row) -> None:
        row.owner, row.cached_ids = None, []

    def _admit(self) -> None:
        """Give waiting requests a row and compute their prompts, as many together as fit the prefill budget."""
        admitted: list[tuple[_Row, int]] = []
        self._waiting.sort(key=lambda r: (r.arrived, r.request_id))  # order within a step is a matter of timing
        for request in list(self._waiting):
            row = self._find_row(request)
            if row is None:
                break
            self._waiting.remove(request)
            known = _common_prefix(row.cached_ids, request.prompt_ids) if row.owner == request.request_id else 0
            row.cached_ids = row.cached_ids[: min(known, len(request.prompt_ids) - 1)]
            row.owner, row.request, row.last_used = request.request_id, request, self._step
            admitted.append((row, len(request.prompt_ids) - len(row.cached_ids)))
        admitted.sort(key=lambda pair: (pair[1], pair[0].index))
        while admitted:
            count = max(1, self._config.max_prefill_tokens // admitted[-1][1])
            batch, admitted = [row for row, _ in admitted[-count:]], admitted[:-count]
            self._forward(batch)

    def _find_row(self, request: _Request) -> _Row | None:
        """Return the conversation's own row, else a free one, else the idle one that was used longest ago."""
        idle = [row for row in self._rows if row.request is None]
        for row in idle:
            if row.owner == request.request_id:
                return row
        # Free rows by number alone: what was sampled before must not decide how later requests are batched.
        return min(idle, key=lambda row: (row.last_used if row.owner else -1, row.index), default=None)

    def _decode(self) -> None:
        running = [row for row in self._rows if row.request is not None]
        if running:
            self._forward(running)

    @torch.inference_mode()
    def _forward(self, rows: list[_Row]) -> None:
        """Compute the tokens that each row's request has and its cache lacks, and sample one token for each row."""
        missing = [_missing_ids(row) for row in rows]
        num_queries = max(map(len, missing))
        inputs_BQ = torch.tensor([ids + [0] * (num_queries - len(ids)) for ids in missing], device=self._device)
        selection = self._cache.select(
            [row.index for row in rows],
            [len(row.cached_ids) for row in rows],
            num_queries,
            device=self._device,
            dtype=self._model.dtype,
        )
        hidden_BQD = self._model.base_model(
            input_ids=inputs_BQ, past_key_values=self._cache, use_cache=True, **selection
        ).last_hidden_state
        last_B = torch.tensor([len(ids) - 1 for ids in missing], device=self._device)
        hidden_BD = hidden_BQD[torch.arange(len(rows), device=self._device), last_B]
        logits_BV = self._model.get_output_embeddings()(hidden_BD)
        requests = [row.request for row in rows if row.request is not None]
        tokens, logprobs = sample(
            logits_BV,
            temperatures=[r.sampling.temperature for r in requests],
            uniforms=[r.uniforms[len(r.token_ids)] for r in requests],
        )
        for row, ids, request, token, logprob in zip(rows, missing, requests, tokens, logprobs, strict=True):
            row.cached_ids.extend(ids)
            row.last_used = self._step
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            if token in request.sampling.stop_token_ids:
                self._finish(row, FinishReason.STOP)
            elif len(request.token_ids) == request.sampling.max_tokens:
                self._finish(row, FinishReason.LENGTH)

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        request, row.request = row.request, None
        assert request is not None
        self._inside.pop(request.request_id, None)
        if request.request_id not in self._open:
            self._release(row)
        if not request.future.done():
            request.future.set_result(
                Completion(
                    token_ids=tuple(request.token_ids),
                    logprobs=tuple(request.logprobs),
                    versions=tuple(request.versions),
                    finish_reason=reason,
                )
            )

    def _remove(self, request: _Request) -> None:
        """Forget a request, wherever it is: its caller has gone."""
        if self._inside.get(request.request_id) is request:
            del self._inside[request.request_id]
        if request in self._waiting:
            self._waiting.remove(request)
        for row in self._rows:
            if row.request is request:
                row.request = None
                if request.request_id not in self._open:
                    self._release(row)


def sample(
    logits_BV: torch.Tensor, *, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token a row from the full support by inverting the cumulative distribution.

    Args:
        logits_BV: unscaled scores.
        temperatures: divisor of each row's logits; 0 takes the most probable token, with log-probability 0.
        uniforms: one number in [0, 1) for each row.

    Returns:
        token ids, and their natural-log probabilities under the scaled distribution.
    """
    device = logits_BV.device
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    temperatures_B = torch.tensor(temperatures, device=device, dtype=logits_BV.dtype)
    is_greedy_B = temperatures_B == 0
    scaled_BV = logits_BV / torch.where(is_greedy_B, 1.0, temperatures_B)[:, None]
    logprobs_BV = scaled_BV.log_softmax(-1)
    # In float64, so that the last of 150,000 steps is as exact as the first.
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    targets_B = torch.tensor(uniforms, device=device, dtype=torch.float64) * cumulative_BV[:, -1]
    tokens_B = torch.searchsorted(cumulative_BV, targets_B[:, None], right=True).squeeze(1)
    tokens_B = torch.where(is_greedy_B, scaled_BV.argmax(-1), tokens_B)
    logprobs_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B.tolist(), torch.where(is_greedy_B, 0.0, logprobs_B).tolist()


def _missing_ids(row: _Row) -> list[int]:
    request = row.request
    assert request is not None
    done = len(row.cached_ids) - len(request.prompt_ids)
    return request.token_ids[done:] if done >= 0 else request.prompt_ids[len(row.cached_ids) :] + request.token_ids


def _common_prefix(left: list[int], right: list[int]) -> int:
    num = min(len(left), len(right))
    if left[:num] == right[:num]:
        return num
    return next(i for i in range(num) if left[i] != right[i])


def _check_attention(config: Any) -> None:
    """Refuse models that one causal mask over cached keys does not describe: they would sample silently wrong."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window is not None:
        raise ConfigError(
            f"engine.name: the transformers engine handles full attention only; {config.model_type} has layers of kind "
            f"{', '.join(sorted(kinds))} and a sliding window of {window}. Choose another model"
        )
