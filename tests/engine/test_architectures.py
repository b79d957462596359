"""The transformers engine on what models have beyond plain attention: windows, sinks, experts, recurrent layers."""

import asyncio
import copy
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest
import torch

from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.engine.vllm.common import check_reloadable
from agentrl.errors import ConfigError
from agentrl.testing import check_engine
from agentrl.types import Completion, Sampling
from tests.support.architectures import ARCHITECTURES, tiny_model
from tests.support.tiers import first_quick

VOCAB = 61
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(200):
            return await main

    return asyncio.run(bounded())


def make(name: str, **changes: Any) -> Any:
    return tiny_model(name, vocab_size=VOCAB, initializer_range=0.3, **changes).eval()


def plain_logprobs(model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> list[float]:
    """One pass over prompt and completion, without a cache."""
    with torch.inference_mode():
        logits_LV = model(torch.tensor([[*prompt_ids, *token_ids]]), use_cache=False).logits[
            0, len(prompt_ids) - 1 : -1
        ]
    logprobs_LV = (logits_LV / temperature).log_softmax(-1)
    picked: list[float] = logprobs_LV.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    return picked


@pytest.mark.parametrize("attention", first_quick([None, "eager"]))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_over_four_turns_are_those_of_one_plain_pass(
    name: str, attention: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "agentrl.engine.transformers.engine.MAX_MASK", 2000
    )  # prompts of 60 tokens are computed in chunks
    model = make(name, attn_implementation=attention)
    engine = TransformersEngine(copy.deepcopy(model), TransformersConfig(max_batch_size=4))

    async def episode(number: int) -> list[tuple[list[int], Completion]]:
        turns, context = [], [(number * 7 + i * i) % VOCAB for i in range(4 + 23 * number)]
        with engine.conversation(f"e{number}"):
            for turn in range(4):
                request = Sampling(max_tokens=3 + (number + turn) % 3, stop_token_ids=(), temperature=1.0, seed=turn)
                done = await engine.generate(context, request, f"e{number}")
                turns.append((context, done))
                context = [*context, *done.token_ids, *[(turn + i) % VOCAB for i in range(3 + number * turn)]]
        return turns

    async def play() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*map(episode, range(4)))

    for turns in run(play()):
        for turn, (context, done) in enumerate(turns):
            expected = plain_logprobs(model, context, done.token_ids, 1.0)
            assert done.logprobs == pytest.approx(expected, rel=0, abs=5e-5)  # gated delta rules add up more in float32
            assert (done.num_cached_tokens > 0) == (turn > 0)


@pytest.mark.slow
def test_a_recurrent_model_keeps_to_the_contract_of_engines() -> None:
    model = make("Qwen3.5")
    first = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    second = {key: tensor * 0.8 if tensor.is_floating_point() else tensor for key, tensor in first.items()}
    engine = TransformersEngine(copy.deepcopy(model), TransformersConfig(max_batch_size=3, max_prefill_tokens=32))
    plain = copy.deepcopy(model)
    run(check_engine(engine, lambda p, t, z: plain_logprobs(plain, p, t, z), vocab_size=VOCAB, weights=(first, second)))


def test_a_state_that_went_past_a_prompt_begins_again() -> None:
    model = make("Qwen3.5")
    engine = TransformersEngine(copy.deepcopy(model))
    prompt = [(3 * i) % VOCAB for i in range(20)]

    async def play() -> list[Completion]:
        with engine.conversation("a"):
            return [
                await engine.generate(ids, Sampling(max_tokens=6, stop_token_ids=(), temperature=1.0, seed=0), "a")
                for ids in (prompt, prompt, prompt[:15])
            ]

    for ids, done in zip((prompt, prompt, prompt[:15]), run(play()), strict=True):
        assert done.num_cached_tokens == 0
        assert done.logprobs == pytest.approx(plain_logprobs(model, ids, done.token_ids, 1.0), rel=0, abs=5e-5)


def test_vllm_is_refused_where_it_drops_weights_that_are_pushed() -> None:
    with pytest.raises(ConfigError, match=r"drops the experts and sinks of gpt_oss .* set engine\.name: transformers"):
        check_reloadable(make("gpt-oss").config)
    for name in ARCHITECTURES.keys() - {"gpt-oss"}:
        check_reloadable(make(name).config)
