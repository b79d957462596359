import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.errors import CheckError, EngineError
from agentrl.testing import ScriptedEngine, check_engine
from agentrl.types import Completion, FinishReason, Sampling
from tests.support.each import each

VOCAB = 61
STOP = 7


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=512,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
    ).eval()


MODEL = make_model()
WEIGHTS = tuple({k: v.clone() for k, v in make_model(seed).state_dict().items()} for seed in (0, 1))


def reference(prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> list[float]:
    with torch.inference_mode():
        logits_LV = MODEL(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    logprobs_LV = (logits_LV / temperature).log_softmax(-1)
    picked: list[float] = logprobs_LV.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    return picked


async def lines(engine: Any) -> list[str]:
    timeout_s = 3 if isinstance(engine, Hangs) else 60  # which a busy machine needs
    with pytest.raises(CheckError) as caught:
        await check_engine(engine, reference, vocab_size=VOCAB, weights=(WEIGHTS[0], WEIGHTS[1]), timeout_s=timeout_s)
    return str(caught.value).split("\n- ")[1:]


@pytest.mark.slow
def test_the_transformers_engine_passes() -> None:
    for config in (TransformersConfig(), TransformersConfig(max_batch_size=2, max_prefill_tokens=16, lockstep=False)):
        engine = TransformersEngine(make_model(), config)
        asyncio.run(check_engine(engine, reference, vocab_size=VOCAB, weights=(WEIGHTS[0], WEIGHTS[1])))


class WrongTemperature(TransformersEngine):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        done = await super().generate(prompt_ids, sampling, request_id)
        return replace(done, logprobs=tuple(p * (sampling.temperature or 1.0) for p in done.logprobs))


class OneStopToken(TransformersEngine):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        return await super().generate(
            prompt_ids, replace(sampling, stop_token_ids=sampling.stop_token_ids[:1]), request_id
        )


class DropsStopToken(TransformersEngine):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        done = await super().generate(prompt_ids, sampling, request_id)
        if done.finish_reason is not FinishReason.STOP:
            return done
        return replace(done, token_ids=done.token_ids[:-1], logprobs=done.logprobs[:-1], versions=done.versions[:-1])


class OneSeed(TransformersEngine):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        return await super().generate(prompt_ids, replace(sampling, seed=0), request_id)


class SeedsByArrival(TransformersEngine):
    count = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        self.count += 1
        return await super().generate(prompt_ids, replace(sampling, seed=self.count), request_id)


class SeedsByCompany(TransformersEngine):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        return await super().generate(
            prompt_ids, replace(sampling, seed=sampling.seed + 100 * len(self._inside)), request_id
        )


class DrawsByLength(TransformersEngine):
    """Its random numbers start over with each request, not where the context stands."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        return await super().generate(prompt_ids, replace(sampling, seed=sampling.max_tokens), request_id)


class DropsThePartial(TransformersEngine):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        while True:
            done = await super().generate(prompt_ids, sampling, request_id)
            if done.finish_reason is not FinishReason.ABORTED:
                return done


class DeafToPause(TransformersEngine):
    async def pause(self) -> None:
        pass


class KeepsTheCache(TransformersEngine):
    def _forget(self) -> None:
        if not hasattr(self, "_cache"):  # the first, empty one
            super()._forget()


class KeepsTheVersion(TransformersEngine):
    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        await super().load_weights(named_tensors, min(version, self.version))


class TakesAnyWeight(TransformersEngine):
    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        own = self._model.state_dict()
        known = {name: tensor for name, tensor in named_tensors if name in own and tensor.shape == own[name].shape}
        await super().load_weights(known.items(), version)


class LoadsWhileBusy(TransformersEngine):
    def _check_loadable(self) -> None:
        pass


class MisplacesTurns(TransformersEngine):
    """A conversation's cached tokens are taken to be one longer than they are."""

    def _find_row(self, request: Any) -> Any:
        row = super()._find_row(request)
        if row is not None and row.owner == request.request_id and len(row.cached_ids) < len(request.prompt_ids):
            row.cached_ids.append(request.prompt_ids[len(row.cached_ids)])
        return row


class Hangs(TransformersEngine):
    async def resume(self) -> None:
        pass


@pytest.mark.slow
@each(
    ("broken", "line"),
    [
        (WrongTemperature, "at temperature 0.6 log-probabilities differ from the reference"),
        (OneStopToken, "with 3 stop token(s)"),
        (DropsStopToken, "it must end the completion and be its last token"),
        (OneSeed, "different seeds give the same tokens"),
        (SeedsByArrival, "the same prompt, weights and seed give different tokens"),
        (SeedsByCompany, "a request gives other tokens in company than alone"),
        (DrawsByLength, "a request that was paused and resumed differs from the uninterrupted one"),
        (DropsThePartial, "pause() never returned a running request"),
        (DeafToPause, "a request that comes while the engine is paused is not held until resume()"),
        (KeepsTheCache, "a prompt that is repeated after a push answers otherwise than a fresh one"),
        (KeepsTheVersion, "the engine reports version 0"),
        (TakesAnyWeight, "load_weights takes a weight with another shape"),
        (LoadsWhileBusy, "load_weights replaces the weights under a running request"),
        (MisplacesTurns, "answers otherwise than the same tokens as a fresh prompt"),
        (Hangs, "did not return within 3 s"),
    ],
)
def test_a_broken_engine_is_told_apart(broken: type[TransformersEngine], line: str) -> None:
    found = asyncio.run(lines(broken(make_model(), TransformersConfig(lockstep=False))))
    assert any(line in each for each in found), found


def sampling(max_tokens: int = 10) -> Sampling:
    return Sampling(max_tokens=max_tokens, stop_token_ids=(STOP, 8))


def test_a_scripted_engine_stops_at_stop_tokens_and_at_the_budget() -> None:
    async def play() -> list[Completion]:
        engine = ScriptedEngine([[1, 2, 8, 3, STOP], [4, 5, 6], [STOP]], logprob=-0.5, version=3)
        with engine.conversation("a"):
            found = [await engine.generate([0, n], sampling(budget), "a") for n, budget in enumerate((10, 2, 1))]
        assert engine.prompts == {"a": [(0, 0), (0, 1), (0, 2)]}
        return found

    first, second, third = asyncio.run(play())
    assert first == Completion(
        token_ids=(1, 2, 8), logprobs=(-0.5,) * 3, versions=(3,) * 3, finish_reason=FinishReason.STOP
    )
    assert (second.token_ids, second.finish_reason) == ((4, 5), FinishReason.LENGTH)
    assert (third.token_ids, third.finish_reason) == ((STOP,), FinishReason.STOP)


def test_each_conversation_of_a_scripted_engine_has_its_own_place_and_starts_over() -> None:
    async def play() -> list[tuple[int, ...]]:
        engine = ScriptedEngine(lambda name, number: [ord(name), number, STOP])
        found = []
        for _ in range(2):
            with engine.conversation("a"):
                for name in ("a", "b", "a"):
                    found.append((await engine.generate([0], sampling(), name)).token_ids)  # noqa: PERF401
        return found

    a, b = ord("a"), ord("b")
    places = [(a, 0), (b, 0), (a, 1), (a, 0), (b, 1), (a, 1)]
    assert asyncio.run(play()) == [(*place, STOP) for place in places]


def test_a_scripted_answer_that_was_interrupted_continues_under_the_new_version() -> None:
    async def play() -> tuple[Completion, Completion]:
        engine = ScriptedEngine([[1, 2, 3, STOP], [9, STOP]])
        task = asyncio.create_task(engine.generate([0], sampling(), "a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="pause"):
            await engine.load_weights([], 1)
        await engine.pause()
        first = await task
        await engine.load_weights([], 1)
        task = asyncio.create_task(engine.generate([0, *first.token_ids], sampling(), "a"))
        await asyncio.sleep(0.01)
        assert not task.done()
        await engine.resume()
        return first, await task

    first, second = asyncio.run(play())
    assert first.finish_reason is FinishReason.ABORTED
    assert first.token_ids
    assert first.token_ids + second.token_ids == (1, 2, 3, STOP)
    assert set(first.versions) == {0}
    assert set(second.versions) == {1}


def test_a_script_that_ends_or_does_not_stop_is_an_error() -> None:
    engine = ScriptedEngine([[1, 2]])
    with pytest.raises(EngineError, match="answer of 2 tokens has no stop token"):
        asyncio.run(engine.generate([0], sampling(), "a"))
    with pytest.raises(EngineError, match="request a: the script ends after 1 answers"):
        asyncio.run(engine.generate([0], sampling(), "a"))


def test_check_engine_lists_every_problem_of_an_engine_that_raises() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
            done = await super().generate(prompt_ids, sampling, request_id)
            return replace(done, logprobs=(math.nan,) * len(done.logprobs))

    with pytest.raises(CheckError) as caught:
        asyncio.run(check_engine(Broken(lambda _, n: [n % 5] * 200), vocab_size=VOCAB))
    assert "engine Broken:\n- a log-probability is above 0 or not finite" in str(caught.value)
    assert "different seeds" not in str(caught.value)
