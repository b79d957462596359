"""An engine."""

import asyncio
import copy
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from agentrl.engine import Engine, EngineConfig, EngineContext
from agentrl.errors import EngineError
from agentrl.types import Completion, FinishReason, Sampling


class PlainConfig(EngineConfig):
    """One request after the other, without a cache: slow, and short enough to read."""

    name: str = "plain"
    delay_s: float = 0.0

    def build(self, context: EngineContext) -> Engine:
        return PlainEngine(copy.deepcopy(context.model).to(context.device, context.dtype), self.delay_s)


class PlainEngine:
    """Computes the whole context for each token."""

    def __init__(self, model: Any, delay_s: float) -> None:
        self.version, self.busy_s = 0, 0.0
        self._model, self._delay_s = model.eval(), delay_s
        self._num_running, self._is_closed = 0, False
        self._may_run = asyncio.Event()
        self._may_run.set()

    def conversation(self, request_id: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        reason = FinishReason.ABORTED
        await self._held()
        self._num_running += 1
        try:
            while self._may_run.is_set() or not ids:
                token, logprob = self._sample([*prompt_ids, *ids], sampling, position=sampling.drawn + len(ids))
                ids, logprobs = [*ids, token], [*logprobs, logprob]
                if token in sampling.stop_token_ids or len(ids) == sampling.max_tokens:
                    reason = FinishReason.STOP if token in sampling.stop_token_ids else FinishReason.LENGTH
                    break
                await asyncio.sleep(self._delay_s)
        finally:
            self._num_running -= 1
        versions = (self.version,) * len(ids)
        return Completion(token_ids=tuple(ids), logprobs=tuple(logprobs), versions=versions, finish_reason=reason)

    async def pause(self) -> None:
        self._may_run.clear()
        while self._num_running:
            await asyncio.sleep(0)

    async def resume(self) -> None:
        self._may_run.set()

    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self._num_running:
            raise EngineError(f"{self._num_running} requests are running: pause first")
        own = self._model.state_dict()
        for name, tensor in named_tensors:
            if name not in own or own[name].shape != tensor.shape:
                raise EngineError(f"no weight {name} of shape {tuple(tensor.shape)}")
            own[name].copy_(tensor)
        self.version = version

    async def close(self) -> None:
        self._is_closed = True
        self._may_run.set()

    async def _held(self) -> None:
        await self._may_run.wait()
        if self._is_closed:
            raise EngineError("the engine is closed")

    @torch.no_grad()
    def _sample(self, ids: list[int], sampling: Sampling, *, position: int) -> tuple[int, float]:
        begin = time.perf_counter()
        logits_V = self._model(torch.tensor([ids], device=self._model.device)).logits[0, -1].float()
        self.busy_s += time.perf_counter() - begin
        if sampling.temperature == 0:
            return int(logits_V.argmax()), 0.0
        logprobs_V = (logits_V / sampling.temperature).log_softmax(0)
        cumulative_V = logprobs_V.double().exp().cumsum(0)
        uniform = np.random.default_rng([sampling.seed, position]).random() * float(cumulative_V[-1])
        token = int((cumulative_V <= uniform).sum())
        return token, float(logprobs_V[token])
