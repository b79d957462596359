"""An engine without a model, for tests of environments, rollouts and whatever else stands on an engine."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentrl.errors import EngineError
from agentrl.types import Completion, FinishReason, Sampling

if TYPE_CHECKING:
    import torch

Script = Callable[[str, int], Sequence[int]] | Sequence[Sequence[int]]


class ScriptedEngine:
    """Answers with the tokens of a script, whatever it is asked; every token has the same log-probability.

    An answer is cut after the first stop token and at the budget; one that reaches neither is an error of the script. An
    answer that `pause` interrupted continues at the next request of the same conversation.
    """

    def __init__(self, script: Script, *, logprob: float = -1.0, version: int = 0, token_s: float = 0.0) -> None:
        """Take what to say.

        Args:
            script: the answers of each conversation in their order, or a function of request id and number of the answer
                in its conversation, from 0.
            logprob: natural-log probability given to every token.
            version: policy version to begin with.
            token_s: seconds that each token takes.
        """
        self._script = script
        self._logprob = logprob
        self._version = version
        self._token_s = token_s
        self._num_answers: defaultdict[str, int] = defaultdict(int)
        self._interrupted: dict[str, list[int]] = {}
        self._running: set[str] = set()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._is_closed = False
        self.prompts: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        """Every prompt so far, by request id."""

    @property
    def version(self) -> int:
        """Policy version of the weights last loaded."""
        return self._version

    @property
    def busy_s(self) -> float:
        """Seconds spent computing: none."""
        return 0.0

    @contextmanager
    def conversation(self, request_id: str) -> Iterator[None]:
        """Count the answers of this id; afterwards its script starts over."""
        try:
            yield
        finally:
            self._num_answers.pop(request_id, None)
            self._interrupted.pop(request_id, None)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Give the next answer of the script, one token each time round the event loop."""
        if request_id in self._running:
            raise EngineError(f"request {request_id}: the conversation already waits for a completion")
        self.prompts[request_id].append(tuple(prompt_ids))
        self._running.add(request_id)
        try:
            return await self._answer(sampling, request_id)
        finally:
            self._running.discard(request_id)

    async def pause(self) -> None:
        """Interrupt answers, and hold requests that come."""
        self._may_run.clear()

    async def resume(self) -> None:
        """Answer again."""
        self._may_run.set()

    async def load_weights(
        self,
        named_tensors: "Iterable[tuple[str, torch.Tensor]]",  # noqa: ARG002 - there is no model
        version: int,
    ) -> None:
        """Take over the version; it is recorded with the tokens that follow."""
        if self._running and self._may_run.is_set():
            raise EngineError("load_weights needs a paused or idle engine: call pause() first")
        self._version = version

    async def close(self) -> None:
        """Refuse requests from now on."""
        self._is_closed = True
        self._may_run.set()

    async def _answer(self, sampling: Sampling, request_id: str) -> Completion:
        await self._may_run.wait()
        answer = self._interrupted.pop(request_id, None) or self._next(request_id)
        version = self._version
        sampled: list[int] = []
        reason = None
        while reason is None:
            if self._is_closed:
                raise EngineError(f"request {request_id}: the engine is closed")
            if len(sampled) == len(answer):
                raise EngineError(
                    f"request {request_id}: the script's answer of {len(answer)} tokens has no stop token; end it with one"
                )
            sampled.append(answer[len(sampled)])
            if sampled[-1] in sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif len(sampled) == sampling.max_tokens:
                reason = FinishReason.LENGTH
            else:
                await asyncio.sleep(self._token_s)
                if not self._may_run.is_set():
                    reason = FinishReason.ABORTED
                    self._interrupted[request_id] = answer[len(sampled) :]
        return Completion(
            token_ids=tuple(sampled),
            logprobs=(self._logprob,) * len(sampled),
            versions=(version,) * len(sampled),
            finish_reason=reason,
        )

    def _next(self, request_id: str) -> list[int]:
        number = self._num_answers[request_id]
        if not callable(self._script) and number >= len(self._script):
            raise EngineError(f"request {request_id}: the script ends after {len(self._script)} answers")
        answer = self._script(request_id, number) if callable(self._script) else self._script[number]
        self._num_answers[request_id] += 1
        return list(answer)
