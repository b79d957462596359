"""One action, sampled in parts, by an engine that is paused at every chance."""

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.chat import ChatMLRenderer
from agentrl.errors import EngineError
from agentrl.rollout import EpisodeContext, RolloutConfig
from agentrl.rollout.sample_action import Action
from agentrl.testing import ScriptedEngine
from agentrl.types import Completion, FinishReason, Sampling

CONTEXT = (7, 8, 9)


class Halting(ScriptedEngine):
    """Says one token at a time, each under a later version, and the third time it ends."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked: list[tuple[tuple[int, ...], Sampling, str]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        self.asked.append((tuple(prompt_ids), sampling, request_id))
        is_last = sampling.drawn == 2
        return Completion(
            token_ids=(sampling.stop_token_ids[0] if is_last else 40 + sampling.drawn,),
            logprobs=(-float(sampling.drawn),),
            versions=(sampling.drawn,),
            finish_reason=FinishReason.STOP if is_last else FinishReason.ABORTED,
            experts=bytes(len(prompt_ids) - sampling.experts_from),
        )


def context(engine: ScriptedEngine, renderer: ChatMLRenderer, **config: float) -> EpisodeContext[ScriptedEngine]:
    return EpisodeContext(engine=engine, renderer=renderer, config=RolloutConfig.model_validate(config))


def action(completion: Completion | None = None) -> Action:
    new = Action(context_ids=CONTEXT, max_tokens=5, seed=11, experts_from=1)
    if completion is not None:
        new.completion = completion
    return new


def test_an_interrupted_action_is_continued_where_it_stopped(rarely_stopping_renderer: ChatMLRenderer) -> None:
    engine, sampled = Halting(), action()
    done = asyncio.run(sampled.sample(context(engine, rarely_stopping_renderer), name="a/0"))
    assert done == sampled.completion
    assert done.token_ids == (40, 41, rarely_stopping_renderer.stop_token_ids[0])
    assert (done.logprobs, done.versions, done.finish_reason) == ((0.0, -1.0, -2.0), (0, 1, 2), FinishReason.STOP)
    assert [ids for ids, _, _ in engine.asked] == [CONTEXT, (*CONTEXT, 40), (*CONTEXT, 40, 41)]
    assert [(s.max_tokens, s.drawn, s.seed, s.experts_from) for _, s, _ in engine.asked] == [
        (5, 0, 11, 1),
        (4, 1, 11, 3),  # the experts of the last token that was computed are still wanted
        (3, 2, 11, 4),
    ]
    assert {name for _, _, name in engine.asked} == {"a/0"}
    assert len(done.experts) == len(CONTEXT) + 2 - 1


def test_it_is_continued_elsewhere_from_what_was_sampled(rarely_stopping_renderer: ChatMLRenderer) -> None:
    whole = action()
    asyncio.run(whole.sample(context(Halting(), rarely_stopping_renderer), name="a"))
    part = Completion(token_ids=(40,), logprobs=(0.0,), versions=(0,), finish_reason=FinishReason.ABORTED)
    elsewhere = Halting()
    found = asyncio.run(action(part).sample(context(elsewhere, rarely_stopping_renderer), name="b"))
    assert (found.token_ids, found.logprobs, found.versions) == (
        whole.completion.token_ids,
        whole.completion.logprobs,
        whole.completion.versions,
    )
    assert found.experts == b""  # those of the first part are not known
    assert len(elsewhere.asked) == 2
    assert asyncio.run(action(found).sample(context(elsewhere, rarely_stopping_renderer), name="b")) == found
    assert len(elsewhere.asked) == 2  # nothing is left to sample


def test_an_engine_that_does_not_answer_in_time_has_failed(rarely_stopping_renderer: ChatMLRenderer) -> None:
    class Silent(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
            await asyncio.sleep(60)
            raise AssertionError

    sampled = action().sample(context(Silent([]), rarely_stopping_renderer, engine_timeout_s=0.01), name="a")
    with pytest.raises(EngineError, match=r"^no completion within rollout\.engine_timeout_s: 0\.01$"):
        asyncio.run(sampled)
