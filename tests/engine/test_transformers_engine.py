import asyncio
import math
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.engine.base import KeptBase
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine, sample, uniforms
from agentrl.errors import ConfigError, EngineError
from agentrl.models.moe import experts_of, recording
from agentrl.policy.config import LoraSettings
from agentrl.policy.lora import add_lora, base_weights, merged_weights, round_frozen, weight_changes
from agentrl.testing import check_engine
from agentrl.types import Completion, FinishReason, Sampling
from tests.support.each import each
from tests.support.tiers import first_quick

VOCAB = 61
T = TypeVar("T")


def make_model(seed: int = 0, *, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=True,
        attn_implementation=attention,  # type: ignore[call-arg]  # a keyword of every configuration
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.to(dtype).eval()


def make_engine(model: Any = None, **config: Any) -> TransformersEngine:
    return TransformersEngine(make_model() if model is None else model, TransformersConfig(**config))


def reference(model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> list[float]:
    """One plain pass over prompt and completion."""
    with torch.inference_mode():
        logits_LV = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    logprobs_LV = (logits_LV / temperature).log_softmax(-1)
    picked: list[float] = logprobs_LV.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    return picked


def prompt(number: int, length: int = 9) -> list[int]:
    return [(number * 11 + i * (i + number)) % VOCAB for i in range(length)]


def sampling(max_tokens: int = 8, *, seed: int = 0, temperature: float = 1.0, stops: Sequence[int] = ()) -> Sampling:
    return Sampling(max_tokens=max_tokens, stop_token_ids=tuple(stops), temperature=temperature, seed=seed)


def run(main: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(200):
            return await main

    return asyncio.run(bounded())


async def spin(rounds: int) -> None:
    """Go round the event loop: about one decoding step each time."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def counted_tokens(model: Any) -> list[int]:
    """Return a list that grows by the number of positions of each forward pass, padding included."""
    counts: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: counts.append(args[0].numel()))
    return counts


@pytest.mark.parametrize("attention", first_quick(["sdpa", "eager"]))
@pytest.mark.parametrize("rows", first_quick([3, 1, 64]))
def test_it_keeps_to_the_contract_of_engines(attention: str, rows: int) -> None:
    model, plain = make_model(attention=attention), make_model()
    first, second = ({k: v.clone() for k, v in make_model(seed).state_dict().items()} for seed in (0, 1))
    engine = make_engine(model, max_batch_size=rows, max_prefill_tokens=32)
    run(check_engine(engine, lambda p, t, z: reference(plain, p, t, z), vocab_size=VOCAB, weights=(first, second)))


@each(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@each("temperature", [0.6, 1.0, 1.5])
def test_logprobs_over_four_turns_are_those_of_one_plain_pass(
    dtype: torch.dtype, bound: float, temperature: float
) -> None:
    model = make_model(dtype=dtype)
    engine = make_engine(model, max_batch_size=3)

    async def episode(number: int) -> list[tuple[list[int], Completion]]:
        turns, context = [], prompt(number, length=4 + 9 * number)
        with engine.conversation(f"e{number}"):
            for turn in range(4):
                length = 5 + (3 * number + turn) % 7
                request = sampling(length, seed=10 * number + turn, temperature=temperature)
                done = await engine.generate(context, request, f"e{number}")
                turns.append((context, done))
                context = [*context, *done.token_ids, *prompt(turn, length=2 + number)]
        return turns

    async def play() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*map(episode, range(5)))

    for turns in run(play()):
        for context, done in turns:
            expected = reference(model, context, done.token_ids, temperature)
            assert done.logprobs == pytest.approx(expected, rel=0, abs=bound)


def test_sampling_follows_the_exact_probabilities() -> None:
    num, logits_V = 20_000, torch.tensor([2.0, 0.0, -1.0, 1.0, -6.0])
    numbers = [uniforms(seed, 0, 1)[0] for seed in range(num)]
    for temperature in (0.6, 1.0, 1.5):
        tokens, logprobs = sample(logits_V.expand(num, -1), temperatures=[temperature] * num, uniforms=numbers)
        probs_V = (logits_V.double() / temperature).softmax(0)
        counts_V = torch.bincount(torch.tensor(tokens), minlength=5)
        # Of the statistic with 4 degrees of freedom, 18.5 is exceeded once in a thousand times; the seeds are fixed.
        assert ((counts_V - num * probs_V) ** 2 / (num * probs_V)).sum() < 18.5
        exact = probs_V.log()[tokens].tolist()
        assert logprobs == pytest.approx(exact, rel=1e-5, abs=1e-6)


def test_sampling_inverts_the_cumulative_distribution_over_the_full_support() -> None:
    logits_V = torch.tensor([0.0, 0.1, 0.2, 0.0, 0.7]).log()  # the first and the fourth are impossible
    for uniform, token in [(0.0, 1), (0.0999, 1), (0.1001, 2), (0.2999, 2), (0.3001, 4), (1 - 2**-53, 4)]:
        tokens, logprobs = sample(logits_V[None], temperatures=[1.0], uniforms=[uniform])
        assert tokens == [token]
        assert logprobs == pytest.approx([logits_V[token].item()], rel=1e-6)


def test_a_rare_token_of_a_large_vocabulary_is_sampled_in_its_place() -> None:
    logits_V = torch.zeros(150_000)
    wanted = [0, 1, 74_999, 149_998, 149_999]
    numbers = [(token + 0.5) / 150_000 for token in wanted]
    tokens, logprobs = sample(logits_V.expand(5, -1), temperatures=[1.0] * 5, uniforms=numbers)
    assert tokens == wanted
    assert logprobs == pytest.approx([-math.log(150_000)] * 5, rel=1e-6)


def test_temperature_zero_takes_the_most_probable_token_beside_others_that_are_sampled() -> None:
    logits_V = torch.tensor([0.0, 3.0, 1.0])
    tokens, logprobs = sample(logits_V.expand(2, -1), temperatures=[0, 2.0], uniforms=[0.999, 0.999])
    assert tokens == [1, 2]
    assert logprobs[0] == 0.0
    assert logprobs[1] == pytest.approx((logits_V / 2).log_softmax(0)[2].item(), rel=1e-6)


def test_random_numbers_depend_on_seed_and_position_alone() -> None:
    whole = uniforms(5, 0, 100)
    for start in (0, 1, 2, 3, 4, 5, 17, 99):
        assert uniforms(5, start, 100 - start) == whole[start:]
    assert len({*whole, *uniforms(6, 0, 100)}) == 200
    assert all(0 <= number < 1 for number in whole)


def test_more_requests_than_rows_are_all_answered_as_alone() -> None:
    async def play(rows: int, *, together: bool) -> list[Completion]:
        engine = make_engine(max_batch_size=rows, max_prefill_tokens=24)
        calls = [
            engine.generate(prompt(n, length=1 + 7 * n % 40), sampling(3 + n % 9, seed=n), f"r{n}") for n in range(20)
        ]
        return list(await asyncio.gather(*calls)) if together else [await call for call in calls]

    alone = run(play(1, together=False))
    for rows in (1, 3, 20):
        found = run(play(rows, together=True))
        assert [done.token_ids for done in found] == [done.token_ids for done in alone]
        for done, expected in zip(found, alone, strict=True):
            assert done.logprobs == pytest.approx(expected.logprobs, abs=5e-6)


def test_a_row_is_refilled_as_soon_as_it_is_free() -> None:
    model = make_model()
    counts = counted_tokens(model)
    engine = make_engine(model, max_batch_size=2)

    async def play() -> None:
        lengths = [2, 12, 4, 4]
        await asyncio.gather(*(engine.generate([n], sampling(m), f"r{n}") for n, m in enumerate(lengths)))

    run(play())
    # r1 decodes 12 tokens; beside it r0, r2 and r3 take turns in the other row, 2 + 4 + 4 tokens.
    assert sum(counts) == sum([2, 12, 4, 4])


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    engine = make_engine(max_batch_size=1)
    order: list[str] = []

    async def ask(name: str, *, turns: int = 1) -> None:
        for _ in range(turns):
            await engine.generate([1, 2], sampling(3), name)
            order.append(name)

    async def play() -> None:
        late = asyncio.create_task(ask("z"))
        await asyncio.gather(ask("a", turns=4), ask("b", turns=4), late)

    run(play())
    assert order.index("z") <= 2  # not after all that a and b ask for


def test_a_group_computes_its_prompt_once_and_samples_as_if_alone() -> None:
    model = make_model(dtype=torch.float64)
    counts = counted_tokens(model)
    engine = make_engine(model)

    async def ask(numbers: Sequence[int]) -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(prompt(n % 2, length=50), sampling(3, seed=n), f"e{n}") for n in numbers)
        )

    together = run(ask(range(8)))
    assert counts == [100, 6, 8, 8]
    assert [done.num_cached_tokens for done in together] == [0, 0] + [49] * 6
    alone = [run(ask([number]))[0] for number in range(8)]
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    ours, others = ([done.logprobs for done in each] for each in (together, alone))
    np.testing.assert_allclose(ours, others, rtol=0, atol=1e-12)


def test_a_later_turn_computes_only_what_is_new() -> None:
    model = make_model()
    counts = counted_tokens(model)
    engine = make_engine(model)

    async def play() -> list[list[int]]:
        found, context = [], prompt(1, length=50)
        with engine.conversation("a"):
            for turn in range(3):
                counts.clear()
                done = await engine.generate(context, sampling(4, seed=turn), "a")
                found.append(list(counts))
                assert done.num_cached_tokens == len(context) - counts[0]
                context = [*context, *done.token_ids, 1, 2, 3, 4, 5]
        counts.clear()
        await engine.generate(context[:40], sampling(1), "a")
        return [*found, list(counts)]

    # The last sampled token has not been computed when the turn ends: 1 + 5 tokens are new. After the conversation all is.
    assert run(play()) == [[50, 1, 1, 1], [6, 1, 1, 1], [6, 1, 1, 1], [40]]


def test_a_changed_history_is_computed_from_where_it_changed() -> None:
    model = make_model()
    counts = counted_tokens(model)
    engine = make_engine(model)

    async def play() -> None:
        context = prompt(1, length=30)
        with engine.conversation("a"):
            await engine.generate(context, sampling(1), "a")
            counts.clear()
            context[20] = (context[20] + 1) % VOCAB
            done = await engine.generate(context, sampling(5, seed=3), "a")
            again = await engine.generate(context, sampling(5, seed=3), "a")
        assert counts == [10, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        assert again.token_ids == done.token_ids
        assert again.logprobs == pytest.approx(done.logprobs, abs=5e-6)
        assert done.logprobs == pytest.approx(reference(make_model(), context, done.token_ids, 1.0), abs=5e-6)

    run(play())


def test_prompts_are_computed_together_within_the_budget_longest_first() -> None:
    model = make_model()
    counts = counted_tokens(model)
    engine = make_engine(model, max_prefill_tokens=40)

    async def play() -> None:
        lengths = (3, 50, 20, 17, 2)
        await asyncio.gather(*(engine.generate(prompt(n, m), sampling(1), f"r{n}") for n, m in enumerate(lengths)))

    run(play())
    # 50 is beyond the budget and goes alone; 20 and 17 share a pass of 2 x 20; 3 and 2 one of 2 x 3.
    assert counts == [50, 40, 6]


class Largest(TorchDispatchMode):
    """Measures the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        self.entries = max([self.entries, *(tensor.numel() for tensor in made)])
        return out


def test_a_long_prompt_is_computed_in_chunks_whose_mask_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.transformers.engine.MAX_MASK", 2**14)
    model = make_model()
    counts = counted_tokens(model)

    async def converse() -> None:
        engine, context = make_engine(model, max_batch_size=1), prompt(1, length=600)
        with engine.conversation("a"):
            # 16,384 entries are 27 queries on 600 positions, or 23 on 691; each turn's last token has not been computed.
            for added, expected in ((0, [27] * 22 + [6]), (90, [23] * 3 + [22])):
                counts.clear()
                context += prompt(2, length=added)
                with Largest() as largest:
                    done = await engine.generate(context, sampling(1), "a")
                assert counts == expected
                assert largest.entries <= 2**14
                assert done.logprobs == pytest.approx(reference(make_model(), context, done.token_ids, 1.0), abs=5e-6)
                context += done.token_ids

    async def together() -> None:
        engine = make_engine(model, max_batch_size=3)
        await asyncio.gather(*(engine.generate(prompt(n, 80), sampling(1), f"r{n}") for n in range(3)))

    run(converse())
    counts.clear()
    run(together())
    assert counts == [160, 80]  # all three would need a mask of 3 x 80 x 80 entries


def test_in_lockstep_nothing_is_decoded_while_a_live_episode_is_elsewhere() -> None:
    model = make_model()
    counts = counted_tokens(model)
    engine = make_engine(model)

    async def play() -> None:
        with engine.conversation("a"):
            with engine.conversation("b"):
                task = asyncio.create_task(engine.generate([1, 2], sampling(2), "a"))
                await spin(20)
                assert counts == []
                assert not task.done()
            await task  # b has left
        assert counts == [2, 1]

    run(play())


def test_without_lockstep_an_episode_that_is_elsewhere_holds_no_one() -> None:
    engine = make_engine(lockstep=False)

    async def play() -> Completion:
        with engine.conversation("a"), engine.conversation("b"):
            return await engine.generate([1, 2], sampling(2), "a")

    assert len(run(play()).token_ids) == 2


def test_a_run_in_lockstep_repeats_bit_for_bit_whatever_the_timing() -> None:
    async def episode(engine: TransformersEngine, number: int, delays: Iterator[float]) -> list[Completion]:
        found, context, name = [], prompt(number, length=5 + number), f"e{number}"
        with engine.conversation(name):
            for turn in range(3):
                await asyncio.sleep(next(delays))
                found.append(await engine.generate(context, sampling(3 + number % 3, seed=turn), name))
                context = [*context, *found[-1].token_ids, number]
        return found

    async def play(step: float) -> list[list[Completion]]:
        engine = make_engine(max_batch_size=3)
        delays = iter([(i * 7 % 5) * step for i in range(100)])
        with ExitStack() as stack:  # all are live before the first asks
            for number in range(5):
                stack.enter_context(engine.conversation(f"e{number}"))
            episodes = [asyncio.create_task(episode(engine, number, delays)) for number in range(5)]
            await asyncio.sleep(0)
            return list(await asyncio.gather(*episodes))

    assert run(play(0.0)) == run(play(0.004))


def test_a_cancelled_request_frees_its_row() -> None:
    engine = make_engine(max_batch_size=1)

    async def play() -> None:
        with engine.conversation("a"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.generate([1, 2], sampling(10**5), "a")
            expected = await make_engine().generate([3, 4], sampling(4), "b")
        assert await engine.generate([3, 4], sampling(4), "b") == expected
        waiting = asyncio.create_task(engine.generate([1], sampling(10**5), "c"))
        held = asyncio.create_task(engine.generate([1], sampling(1), "d"))
        await spin(3)
        held.cancel()
        waiting.cancel()
        await asyncio.gather(held, waiting, return_exceptions=True)
        assert await engine.generate([3, 4], sampling(4), "d") == expected

    run(play())


def test_a_conversation_may_end_while_its_request_runs() -> None:
    model = make_model()
    engine = make_engine(model)

    async def play() -> None:
        with engine.conversation("a"):
            task = asyncio.create_task(engine.generate(prompt(1), sampling(6), "a"))
            await spin(4)
        done = await task
        assert len(done.token_ids) == 6
        counts = counted_tokens(model)
        await engine.generate(prompt(1), sampling(1), "a")
        assert counts == [len(prompt(1))]  # nothing was kept

    run(play())


def test_one_conversation_asks_one_question_at_a_time() -> None:
    engine = make_engine()

    async def play() -> None:
        task = asyncio.create_task(engine.generate([1], sampling(5), "a"))
        await spin(2)
        with pytest.raises(EngineError, match="request a: the conversation already waits"):
            await engine.generate([1], sampling(5), "a")
        assert len((await task).token_ids) == 5

    run(play())


def test_a_request_continues_after_each_of_many_pauses() -> None:
    engine = make_engine()

    async def play() -> None:
        with engine.conversation("a"):
            expected = await engine.generate(prompt(2), sampling(30, seed=4), "a")
            tokens: tuple[int, ...] = ()
            logprobs: tuple[float, ...] = ()
            num_aborted = 0
            while len(tokens) < 30:
                request = sampling(30 - len(tokens), seed=4)
                task = asyncio.create_task(engine.generate([*prompt(2), *tokens], request, "a"))
                await spin(6)
                await engine.pause()
                await spin(3)
                await engine.resume()
                part = await task
                num_aborted += part.finish_reason is FinishReason.ABORTED
                tokens, logprobs = tokens + part.token_ids, logprobs + part.logprobs
        assert num_aborted >= 3
        assert tokens == expected.token_ids
        assert logprobs == pytest.approx(expected.logprobs, abs=5e-6)

    run(play())


@each("fails_at", [1, 2, 4])
def test_an_error_of_the_model_reaches_all_who_wait_and_the_engine_works_again(fails_at: int) -> None:
    model = make_model()
    engine = make_engine(model, max_batch_size=2, lockstep=False)
    passes = 0

    def fail(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == fails_at:
            raise RuntimeError("the second layer broke")

    async def play() -> None:
        expected = [await make_engine().generate(prompt(n), sampling(6, seed=n), f"r{n}") for n in range(4)]
        model.base_model.layers[1].register_forward_hook(fail)
        with ExitStack() as stack:
            for n in range(4):  # more than there are rows
                stack.enter_context(engine.conversation(f"r{n}"))
            calls = [engine.generate(prompt(n), sampling(6, seed=n), f"r{n}") for n in range(4)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [str(error) for error in found if isinstance(error, EngineError)] == [
                "the transformers engine failed: RuntimeError: the second layer broke"
            ] * 4
            calls = [engine.generate(prompt(n), sampling(6, seed=n), f"r{n}") for n in range(4)]
            again = await asyncio.gather(*calls)
        for done, wanted in zip(again, expected, strict=True):
            assert done.token_ids == wanted.token_ids
            assert done.logprobs == pytest.approx(wanted.logprobs, abs=5e-6)

    run(play())


def test_numbers_that_are_not_finite_do_not_outlive_the_weights_that_made_them() -> None:
    good = {name: tensor.clone() for name, tensor in make_model().state_dict().items()}
    engine = make_engine(max_batch_size=1)

    async def play() -> None:
        expected = await engine.generate([1, 2], sampling(4), "a")
        await engine.load_weights([(name, torch.full_like(tensor, torch.nan)) for name, tensor in good.items()], 1)
        for temperature in (1.0, 0.0):
            with pytest.raises(
                EngineError, match=r"^the transformers engine failed: it sampled from .* are not finite$"
            ):
                await engine.generate(prompt(1, length=40), sampling(4, temperature=temperature), "a")
        await engine.load_weights(good.items(), 2)
        assert (await engine.generate([1, 2], sampling(4), "a")).logprobs == expected.logprobs

    run(play())


def test_weights_are_refused_by_name_and_shape_and_while_requests_run() -> None:
    model = make_model()
    engine = make_engine(model)
    name, tensor = next(iter(model.state_dict().items()))

    async def play() -> None:
        with pytest.raises(EngineError, match=r"weight 'no\.weight' of shape \(2,\): the engine has no such weight"):
            await engine.load_weights([("no.weight", torch.zeros(2))], 1)
        with pytest.raises(EngineError, match=rf"weight '{name}' of shape \(1, 61, 32\): the engine has \(61, 32\)"):
            await engine.load_weights([(name, tensor[None])], 1)
        assert engine.version == 0
        task = asyncio.create_task(engine.generate([1], sampling(9), "a"))
        await spin(4)
        with pytest.raises(EngineError, match=r"call pause\(\) first"):
            await engine.load_weights([(name, tensor)], 1)
        await engine.pause()
        await engine.load_weights([(name, tensor)], 1)
        await engine.resume()
        assert set((await task).versions) == {0}
        assert engine.version == 1

    run(play())


def test_weights_that_are_refused_half_way_leave_nothing_cached() -> None:
    model, other = make_model(), {k: v.clone() for k, v in make_model(1).state_dict().items()}
    engine = make_engine(model)

    async def play() -> None:
        with engine.conversation("a"):
            await engine.generate(prompt(1), sampling(4), "a")
            with pytest.raises(EngineError):
                await engine.load_weights([*other.items(), ("no.weight", torch.zeros(2))], 1)
            done = await engine.generate(prompt(1), sampling(4), "a")
        assert done.logprobs == pytest.approx(reference(model, prompt(1), done.token_ids, 1.0), abs=5e-6)

    run(play())


def test_a_closed_engine_answers_with_an_error_at_once() -> None:
    engine = make_engine(max_batch_size=1)

    async def play() -> None:
        tasks = [asyncio.create_task(engine.generate([1], sampling(10**5), name)) for name in "ab"]
        await spin(4)
        await engine.close()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineError)
            assert "closed" in str(error)
        with pytest.raises(EngineError, match="request c: the engine is closed"):
            await engine.generate([1], sampling(), "c")
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.load_weights([], 1)
        await engine.close()

    run(play())


@pytest.mark.parametrize("wrong", [([], sampling()), ([1], sampling(0))])
def test_a_request_without_prompt_or_budget_is_refused(wrong: tuple[list[int], Sampling]) -> None:
    with pytest.raises(EngineError, match="request a: needs a prompt and max_tokens of at least 1"):
        run(make_engine().generate(*wrong, "a"))


def test_a_token_beyond_the_vocabulary_fails_its_own_request_alone() -> None:
    engine = make_engine()

    async def play() -> None:
        asked = (engine.generate(ids, sampling(4), name) for name, ids in (("a", [1, 2]), ("b", [1, VOCAB])))
        right, wrong = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(right, Completion)
        assert str(wrong) == f"request b: token {VOCAB} is outside the vocabulary of {VOCAB}"

    run(play())


def test_rows_near_the_last_position_are_computed_beside_longer_prompts() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    engine = TransformersEngine(model, max_context_tokens=64)

    async def play() -> None:
        with engine.conversation("a"):
            first = await engine.generate(prompt(1, length=53), sampling(3), "a")
            later = [*prompt(1, length=53), *first.token_ids, 1, 2]
            asked = [(later, "a"), (prompt(2, length=40), "b")]
            done = await asyncio.gather(*(engine.generate(ids, sampling(4), name) for ids, name in asked))
        for (ids, _), completion in zip(asked, done, strict=True):
            expected = reference(model, ids, completion.token_ids, 1.0)
            assert completion.logprobs == pytest.approx(expected, abs=5e-6)

    run(play())


def test_layers_that_it_does_not_know_are_refused() -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, **heads, layer_types=["chunked_attention"])
    with pytest.raises(ConfigError, match="knows no layers of kind chunked_attention, which qwen3 has"):
        make_engine(Qwen3ForCausalLM(config))


def make_mixture() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()


async def two_turns(engine: TransformersEngine, number: int) -> tuple[list[int], bytes]:
    """Ask twice in a conversation, however often the engine is paused; return its tokens, and what was told of experts."""
    ids, told = prompt(number, 5 + number), b""
    with engine.conversation(str(number)):
        for _ in range(2):
            left = 9
            while left:
                request = replace(sampling(left, seed=number), experts_from=len(told) // 4)  # of two routers two
                part = await engine.generate(ids, request, str(number))
                ids, told, left = [*ids, *part.token_ids], told + part.experts, left - len(part.token_ids)
            ids += prompt(number + 1, 4)
    return ids[:-4], told


def test_experts_of_every_token_are_told_once_as_a_plain_pass_chooses_them() -> None:
    """In batches of rows at different turns, through pauses, with fewer rows than conversations."""
    plain = make_mixture()
    config = TransformersConfig(max_batch_size=2, max_prefill_tokens=16, lockstep=False)
    engine = TransformersEngine(make_mixture(), config, returns_experts=True)

    async def play() -> list[tuple[list[int], bytes]]:
        tasks = [asyncio.create_task(two_turns(engine, number)) for number in range(4)]
        while not all(task.done() for task in tasks):
            await spin(5)
            await engine.pause()
            await spin(2)
            await engine.resume()
        return [await task for task in tasks]

    experts = experts_of(plain)
    assert experts is not None
    for ids, told in run(play()):
        with recording(plain) as passes, torch.no_grad():
            plain(torch.tensor([ids[:-1]]))
        found, expected = (
            torch.as_tensor(each).sort(-1)[0] for each in (experts.unpack(told), passes[0].transpose(0, 1))
        )
        assert torch.equal(found, expected)
    run(engine.close())


def test_experts_are_told_to_whom_they_were_promised_alone() -> None:
    async def play(engine: TransformersEngine) -> bytes:
        return (await engine.generate(prompt(1), sampling(4), "a")).experts

    assert run(play(TransformersEngine(make_mixture()))) == b""
    assert run(play(TransformersEngine(make_model(), returns_experts=True))) == b""  # a dense model has none


def low_rank_changes(model: Any, *, scale: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Changes of all weights of the layers."""
    generator = torch.Generator().manual_seed(1)

    def matrix(*sizes: int) -> torch.Tensor:
        return scale * torch.randn(sizes, generator=generator)

    return {
        name: (matrix(len(weight), 2), matrix(2, weight.shape[1]))
        for name, weight in model.state_dict().items()
        if name.endswith("_proj.weight")
    }


def test_a_young_adapter_changes_what_the_engine_computes_as_it_changes_the_trainer() -> None:
    trainer = make_model()
    add_lora(trainer, LoraSettings(rank=2, alpha=4))
    round_frozen(trainer)
    for name, parameter in trainer.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=1e-3)
    engine = TransformersEngine(make_model(dtype=torch.bfloat16), keeps_adapters=True)
    run(engine.load_adapters(weight_changes(trainer), base_weights(trainer), 1))
    merged = dict(merged_weights(trainer))
    for name, _ in weight_changes(trainer):
        layer_name = name.removesuffix(".weight")
        inputs_RI = torch.randn(500, merged[name].shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
        layer, own = trainer.get_submodule(layer_name), engine._model.get_submodule(layer_name)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected_RO, before_RO = layer(inputs_RI), layer.base_layer(inputs_RI)
        assert not torch.equal(expected_RO, before_RO)
        assert torch.equal(own(inputs_RI), expected_RO)
        assert not torch.equal(torch.nn.functional.linear(inputs_RI, merged[name]), expected_RO)


def test_adapters_are_of_the_weights_that_came_with_them_and_go_with_the_next_ones() -> None:
    engine = TransformersEngine(make_model(1, dtype=torch.bfloat16), keeps_adapters=True)
    plain = make_model(dtype=torch.bfloat16)
    changes = low_rank_changes(plain, scale=0.3)
    adapted = make_model(dtype=torch.bfloat16)
    for name, (left, right) in changes.items():
        adapted.get_parameter(name).data += left @ right

    async def main() -> None:
        async def distance(model: Any, version: int) -> float:
            done = await engine.generate(prompt(3), sampling(20), "a")
            assert set(done.versions) == {version}
            expected = reference(model, prompt(3), done.token_ids, 1.0)
            return float(np.abs(np.subtract(done.logprobs, expected)).mean())

        assert await engine.kept_base() is KeptBase.MISSING
        await engine.load_adapters(changes.items(), plain.state_dict().items(), 1)
        assert await engine.kept_base() is KeptBase.THERE
        assert await distance(adapted, 1) < 0.03
        half = {name: (left / 2, right) for name, (left, right) in changes.items()}
        await engine.load_adapters(half.items(), None, 2)
        assert await distance(adapted, 2) > 0.2
        await engine.load_adapters(changes.items(), None, 3)
        assert await distance(adapted, 3) < 0.03
        await engine.load_weights(plain.state_dict().items(), 4)
        assert await engine.kept_base() is KeptBase.MISSING
        assert await distance(plain, 4) < 0.03
        wrong = (torch.zeros(3, 1), torch.zeros(1, 3))
        with pytest.raises(
            EngineError, match=r"weight 'model\.layers\.0\.self_attn\.q_proj\.weight' of shape \(3, 3\)"
        ):
            await engine.load_adapters([("model.layers.0.self_attn.q_proj.weight", wrong)], None, 5)

    run(main())


def test_adapters_of_weights_that_are_transposed() -> None:
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2)).bfloat16().eval()
    layer = model.get_submodule("transformer.h.0.attn.c_attn")
    left, right = torch.randn(32, 2), torch.randn(2, 96)
    inputs_RI = torch.randn(50, 32).bfloat16()
    plain_RO = layer(inputs_RI)
    engine = TransformersEngine(model, keeps_adapters=True)
    run(engine.load_adapters([("transformer.h.0.attn.c_attn.weight", (left, right))], None, 1))
    expected_RO = plain_RO.float() + inputs_RI.float() @ left @ right
    assert torch.allclose(layer(inputs_RI).float(), expected_RO, rtol=0.05, atol=0.3)


def test_in_float32_adapters_are_merged() -> None:
    assert run(TransformersEngine(make_model(), keeps_adapters=True).kept_base()) is KeptBase.IMPOSSIBLE
    assert run(TransformersEngine(make_model(dtype=torch.bfloat16)).kept_base()) is KeptBase.IMPOSSIBLE
