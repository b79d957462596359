"""One action of the policy, sampled in a given context: whoever plays the episode, and whatever pauses the engine meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl.chat import Renderer
from agentrl.engine import Sampler
from agentrl.errors import EngineError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.faults import EngineClock
from agentrl.types import Completion, FinishReason, Message, Sampling

S_co = TypeVar("S_co", bound=Sampler, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext(Generic[S_co]):
    """Parts that all episodes of a pool share."""

    engine: S_co
    """Samples the actions."""
    renderer: Renderer
    """Converts between messages and tokens."""
    config: RolloutConfig
    """Limits and deadlines."""
    clock: EngineClock = field(default_factory=EngineClock)
    """Engine deadlines; stopped while the engine is paused."""
    decode: Callable[[Sequence[int]], str] = str
    """Return the text of sampled tokens, marks included: stop strings of a program are looked for in it."""

    def cannot_hold(self, messages: Sequence[Message]) -> bool:
        """Return whether no context can hold these messages, whatever their tokens are."""
        texts = (message.get("content") for message in messages)
        num_chars = sum(len(text.strip()) for text in texts if isinstance(text, str))  # some templates strip
        longest = self.renderer.max_token_chars
        return longest is not None and num_chars > longest * self.config.max_context_tokens


NOTHING = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORTED)
"""Completion of which no token is sampled yet."""


@dataclass(slots=True, kw_only=True)
class Action:
    """An action that is sampled, in one part or in several.

    A pause of the engine interrupts it; it is continued with the random numbers that came next, and each token keeps the
    version that sampled it.
    """

    context_ids: tuple[int, ...]
    """Tokens before it."""
    max_tokens: int
    """Largest number of its tokens."""
    seed: int
    """Seed of its random numbers."""
    experts_from: int = 0
    """First token of the context whose experts are wanted (see `Sampling.experts_from`)."""
    completion: Completion = NOTHING
    """Tokens sampled so far: it grows."""

    async def sample(self, context: EpisodeContext[Sampler], *, name: str) -> Completion:
        """Sample the rest of it under this name at the engine, and return all of it.

        Raises:
            EngineError: when the engine cannot sample.
        """
        while (done := self.completion).finish_reason is FinishReason.ABORTED:
            num = len(done.token_ids)
            sampling = Sampling(
                max_tokens=self.max_tokens - num,
                stop_token_ids=context.renderer.stop_token_ids,
                temperature=context.config.temperature,
                seed=self.seed,
                drawn=num,
                experts_from=len(self.context_ids) + num - 1 if num else self.experts_from,
            )
            part = await _generate(context, self.context_ids + done.token_ids, sampling, name=name)
            self.completion = Completion(
                token_ids=done.token_ids + part.token_ids,
                logprobs=done.logprobs + part.logprobs,
                versions=done.versions + part.versions,
                finish_reason=part.finish_reason,
                experts=done.experts + part.experts if done.experts or not num else b"",
            )
        return self.completion


async def _generate(
    context: EpisodeContext[Sampler], prompt_ids: tuple[int, ...], sampling: Sampling, *, name: str
) -> Completion:
    timeout_s = context.config.engine_timeout_s
    try:
        async with context.clock.timeout(timeout_s):
            return await context.engine.generate(prompt_ids, sampling, name)
    except TimeoutError:
        raise EngineError(f"no completion within rollout.engine_timeout_s: {timeout_s:g}") from None
