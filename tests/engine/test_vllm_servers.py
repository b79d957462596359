"""Several servers as one engine: vLLM's own, started once, and such as misbehave; one dies or hangs, and comes back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engine.base import KeptBase
from agentrl.engine.vllm import http as vllm_outstanding
from agentrl.engine.vllm import server as vllm_server
from agentrl.engine.vllm import weights as vllm_weights
from agentrl.engine.vllm.common import ServerConfig, is_installed
from agentrl.engine.vllm.http import ServerLostError
from agentrl.engine.vllm.launch import Server, start_server
from agentrl.engine.vllm.server import VLLMServer
from agentrl.engine.vllm.servers import VLLMServers
from agentrl.errors import EngineError
from agentrl.testing import check_engine
from agentrl.types import Completion, FinishReason
from tests.engine.test_vllm_server import (
    BOUND,
    GENERATE,
    LONG,
    NEVER,
    RESET,
    FakeServer,
    adapted,
    changes,
    check_logprobs,
    fake,
    needs_vllm,
    prompt,
    run,
    sampling,
    weights,
)
from tests.support.ports import free_port
from tests.support.tiers import first_quick
from tests.support.vllm_forks import VLLMForks
from tests.support.vllm_models import VOCAB, make_model, plain_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.process]

NUM = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(max_position_embeddings=LONG + 100).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    """Start them fast."""
    with VLLMForks().used() if is_installed() else nullcontext():
        yield


def start(folder: Path, port: int) -> Server:
    options = {"max_model_len": LONG + 100, "max_num_seqs": 32}
    return start_server(folder, port=port, log=folder / f"{port}.log", options=options, timeout_s=600)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Server]]:
    with ThreadPoolExecutor(NUM) as pool:
        found = list(pool.map(lambda port: start(folder, port), [free_port() for _ in range(NUM)]))
    yield found
    for server in found:
        server.close()


@asynccontextmanager
async def client(
    servers: list[Server], folder: Path, *, is_shared: bool = False, syncs: bool = True, **config: Any
) -> AsyncIterator[tuple[VLLMServers, list[VLLMServer]]]:
    each = [
        VLLMServer(ServerConfig(url=server.url, **config), folder=folder, is_shared=is_shared) for server in servers
    ]
    engine = VLLMServers(each, syncs=syncs)
    try:
        yield engine, each
    finally:
        await engine.close()


@pytest.mark.slow
@needs_vllm
def test_they_keep_to_the_contract_of_engines(servers: list[Server], tmp_path: Path) -> None:
    plain = make_model()

    async def main() -> None:
        async with client(servers, tmp_path, timeout_s=100) as (engine, _):
            await check_engine(
                engine,
                lambda p, t, z: plain_logprobs(plain, p, t, z),
                vocab_size=VOCAB,
                weights=(dict(weights(0)), dict(weights(1))),
            )

    run(main())


@pytest.mark.slow
@needs_vllm
def test_conversations_are_spread_and_stay_where_their_prefix_is(servers: list[Server], tmp_path: Path) -> None:
    async def main() -> None:
        async with client(servers, tmp_path, timeout_s=100) as (engine, each):
            await engine.load_weights(weights(0), 3)
            assert not list(tmp_path.iterdir())

            async def converse(number: int) -> int:
                context = prompt(number, 70)
                with engine.conversation(f"e{number}"):
                    first = await engine.generate(context, sampling(8), f"e{number}")
                    second = await engine.generate([*context, *first.token_ids], sampling(8), f"e{number}")
                    assert {*first.versions, *second.versions} == {3}
                    return second.num_cached_tokens

            cached = await asyncio.gather(*map(converse, range(8)))
            assert min(cached) >= 64  # which no server has of another's conversation
            assert all(server.busy_s > 0 for server in each)
            assert not engine._homes
            before = [server.busy_s for server in each]
            proven = await engine.generate_on_each(prompt(0, 40), sampling(8), "proof")
            assert len(proven) == NUM
            assert {version for completion in proven for version in completion.versions} == {3}
            assert all(server.busy_s > was for server, was in zip(each, before, strict=True))

    run(main())


@pytest.mark.slow
@needs_vllm
def test_a_rank_that_shares_servers_is_stopped_by_a_weight_sync_alone_and_leaves_out_the_same_ones(
    servers: list[Server], tmp_path: Path
) -> None:
    plain = {seed: make_model(seed) for seed in (0, 1)}

    async def main() -> None:
        shared: dict[str, Any] = {"is_shared": True, "timeout_s": 100, "max_retries": 1}
        async with (
            client(servers, tmp_path, **shared) as (first, leading),
            client(servers, tmp_path, syncs=False, **shared) as (other, each),
        ):

            async def begun(engine: VLLMServers, tokens: int) -> list[asyncio.Task[Completion]]:
                """Requests that are sampled at both servers."""
                tasks = [
                    asyncio.create_task(engine.generate(prompt(number), sampling(tokens), f"{id(engine)}.{number}"))
                    for number in range(NUM)
                ]
                while not all(server._out for server in engine._servers):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)
                return tasks

            async def synced(seed: int, version: int) -> None:
                await first.load_weights(weights(seed), version)
                await other.load_weights(weights(seed), version)
                await other.follow(first.copies(), version)

            await synced(0, 0)
            mine, others = await begun(first, LONG), await begun(other, 600)
            await first.pause()
            assert {(await task).finish_reason for task in mine} == {FinishReason.ABORTED}
            assert {(await task).finish_reason for task in others} == {FinishReason.LENGTH}
            others = await begun(other, LONG)
            await first.load_weights(weights(1), 1)
            for task in others:
                done = await task
                assert done.finish_reason is FinishReason.ABORTED
                assert set(done.versions) == {0}
            await other.follow(first.copies(), 1)
            for server in (*leading, *each):
                await server.resume()
                await check_logprobs(server, plain[1], 1)
            first._exclude(leading[0], ServerLostError("it is slow today"))
            await other.follow(first.copies(), 1)
            assert list(other._lost) == [each[0]]
            await synced(0, 2)
            assert not other._lost
            for server in each:
                await check_logprobs(server, plain[0], 2)

    run(main())


@pytest.mark.slow
@needs_vllm
def test_a_server_that_dies_is_left_out_and_comes_back_with_a_push(
    servers: list[Server], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {seed: make_model(seed) for seed in (0, 1)}

    async def main() -> None:
        async with client(servers, tmp_path, timeout_s=100, max_retries=1) as (engine, each):
            await engine.load_weights(weights(0), 0)

            async def converse(number: int, *, seed: int, tokens: int) -> None:
                with engine.conversation(f"e{number}"):
                    done = await engine.generate(prompt(number, 40), sampling(tokens), f"e{number}")
                    assert set(done.versions) == {seed}
                    expected = plain_logprobs(plain[seed], prompt(number, 40), done.token_ids, 1.0)
                    assert done.logprobs == pytest.approx(expected, abs=BOUND)

            tasks = [asyncio.create_task(converse(number, seed=0, tokens=600)) for number in range(6)]
            while not all(server._out for server in each):
                await asyncio.sleep(0.01)
            os.kill(servers[0].process.pid, signal.SIGKILL)
            await asyncio.gather(*tasks)  # on the other one
            assert f"{servers[0].url} is left out" in caplog.text
            await engine.pause()
            await engine.load_weights(weights(1), 1)
            await engine.resume()
            await asyncio.gather(*(converse(number, seed=1, tokens=20) for number in range(4)))
            assert list(engine._lost) == [each[0]]
            assert len(await engine.generate_on_each(prompt(0, 40), sampling(8), "proof")) == NUM - 1
            # Started again it has the weights of its folder, which are not those in use.
            servers[0].close()
            servers[0] = await asyncio.to_thread(start, folder, int(servers[0].url.rpartition(":")[2]))
            await engine.pause()
            await engine.load_weights(weights(0), 2)
            await engine.resume()
            assert not engine._lost
            assert f"{servers[0].url} is back, with the weights of version 2" in caplog.text
            before = each[0].busy_s
            plain[2] = plain[0]
            await asyncio.gather(*(converse(number, seed=2, tokens=20) for number in range(4)))
            assert each[0].busy_s > before

    run(main())


@pytest.mark.slow
def test_whoever_waits_at_a_server_that_dies_as_it_is_paused_goes_on_elsewhere(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake(folder) as first, fake(folder) as second:
            each = [VLLMServer(ServerConfig(url=one.url, max_retries=1), folder=tmp_path) for one in (first, second)]
            engine = VLLMServers(each)
            with engine.conversation("e"):
                first.script[GENERATE], first.script["/pause"] = [RESET], [RESET] * 2
                waiting = asyncio.create_task(engine.generate(prompt(0, 4), sampling(2), "e"))
                await first.until_seen(GENERATE)
                await engine.pause()
                await engine.resume()
                assert len((await asyncio.wait_for(waiting, 10)).token_ids) == 2
            assert list(engine._lost) == [each[0]]
            assert not first.bodies("/resume")[1:]  # but for that with which it was first asked
            await engine.pause()
            await engine.load_weights(weights(0), 1)
            assert not engine._lost
            held = asyncio.create_task(each[0].generate(prompt(0, 4), sampling(2), "f"))
            await asyncio.sleep(0.1)
            assert not held.done()  # it is paused with the others
            await engine.resume()
            await asyncio.wait_for(held, 10)
            await engine.close()

    run(main())


@asynccontextmanager
async def two_fakes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[VLLMServers, list[FakeServer]]]:
    """Two servers, of which one is to hang, with weights of version 0."""
    monkeypatch.setattr(vllm_outstanding, "_WATCH_S", 0.05)
    monkeypatch.setattr(vllm_server, "_BACK_S", 5.0)
    async with fake(folder) as first, fake(folder) as second:
        each = [VLLMServer(ServerConfig(url=one.url, timeout_s=5), folder=tmp_path) for one in (first, second)]
        engine = VLLMServers(each)
        await engine.load_weights(weights(0), 0)
        yield engine, [first, second]
        for server in (first, second):
            server.awake.set()
        await engine.close()


async def check_back(engine: VLLMServers, servers: list[FakeServer]) -> None:
    """Check that the first one, which hangs, gets weights and requests again after it answers."""
    await engine.pause()
    await engine.load_weights(weights(1), 1)
    assert [server.url for server in engine._lost] == [servers[0].url]
    assert servers[1].version == "1"
    servers[0].awake.set()
    await engine.load_weights(weights(0), 2)
    assert not engine._lost
    num = len(servers[0].bodies(GENERATE))
    waiting = [asyncio.create_task(server.generate(prompt(1), sampling(2), "f")) for server in engine._servers]
    await asyncio.sleep(0.1)
    assert len(servers[0].bodies(GENERATE)) == num  # it is paused with the other one
    await engine.resume()
    assert [set((await task).versions) for task in waiting] == [{2}, {2}]


@pytest.mark.slow
def test_a_server_that_hangs_as_it_samples_is_left_out_and_comes_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with two_fakes(folder, tmp_path, monkeypatch) as (engine, servers):
            servers[0].awake.clear()

            async def converse(number: int) -> None:
                with engine.conversation(f"e{number}"):
                    for _ in range(2):
                        done = await engine.generate(prompt(number), sampling(2), f"e{number}")
                        assert done.versions == (0, 0)

            await asyncio.gather(*map(converse, range(6)))
            assert len(servers[0].bodies(GENERATE)) == 3
            assert f"{servers[0].url} is left out" in caplog.text
            assert "did not finish telling that it is alive within engine.server.timeout_s: 5" in caplog.text
            await check_back(engine, servers)

    run(main())


@pytest.mark.slow
def test_a_server_that_hangs_as_it_is_paused_is_left_out_and_comes_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with two_fakes(folder, tmp_path, monkeypatch) as (engine, servers):
            monkeypatch.setattr(vllm_outstanding, "_WATCH_S", 100.0)
            with engine.conversation("e"):
                servers[0].awake.clear()
                waiting = asyncio.create_task(engine.generate(prompt(0), sampling(2), "e"))
                await servers[0].until_seen(GENERATE)
                await engine.pause()
                assert "did not finish pause within engine.server.timeout_s: 5" in caplog.text
                assert not waiting.done()
                await engine.resume()
                assert (await waiting).versions == (0, 0)
                assert len(servers[1].bodies(GENERATE)) == 1
            await check_back(engine, servers)

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("path", first_quick(["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]))
def test_a_server_that_hangs_as_it_takes_weights_or_is_resumed_is_left_out(
    path: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with two_fakes(folder, tmp_path, monkeypatch) as (engine, servers):
            await engine.pause()
            servers[0].script[path] = [NEVER]
            await engine.load_weights(weights(1), 1)
            await engine.resume()
            assert [server.url for server in engine._lost] == [servers[0].url]
            for number in range(4):
                assert (await engine.generate(prompt(number), sampling(2), f"e{number}")).versions == (1, 1)
            assert not servers[0].bodies(GENERATE)
            await engine.load_weights(weights(0), 2)
            assert not engine._lost

    run(main())


@pytest.mark.slow
def test_a_server_that_hangs_from_the_first_is_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fake(folder) as first, fake(folder) as second:
            first.awake.clear()
            each = [VLLMServer(ServerConfig(url=one.url, timeout_s=5), folder=tmp_path) for one in (first, second)]
            engine = VLLMServers(each)
            await engine.load_weights(weights(0), 0)
            assert list(engine._lost) == [each[0]]
            assert (await engine.generate(prompt(1), sampling(2), "e")).versions == (0, 0)
            assert caplog.text.count(f"{second.url} takes weights in files alone") == 1
            first.awake.set()
            await engine.close()

    run(main())


@pytest.mark.slow
@needs_vllm
def test_a_server_that_dies_as_it_takes_weights_keeps_them_from_no_other(
    servers: list[Server], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_model(1)
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)

    def killing(number: int) -> Iterator[tuple[str, torch.Tensor]]:
        for place, pair in enumerate(weights(1)):
            if place == number:
                os.kill(servers[0].process.pid, signal.SIGKILL)
            yield pair

    async def main() -> None:
        async with client(servers, tmp_path / "weights", timeout_s=100, max_retries=1) as (engine, each):
            await engine.load_weights(weights(0), 0)
            await engine.load_weights(killing(6), 1)
            assert list(engine._lost) == [each[0]]
            assert "did not take the weights" in str(engine._lost[each[0]])
            assert "Is it running? `agentrl serve RECIPE` starts it" in str(engine._lost[each[0]])
            for number in range(4):
                with engine.conversation(f"e{number}"):
                    done = await engine.generate(prompt(number, 40), sampling(20), f"e{number}")
                    expected = plain_logprobs(plain, prompt(number, 40), done.token_ids, 1.0)
                    assert done.logprobs == pytest.approx(expected, abs=BOUND)
                    assert set(done.versions) == {1}
            servers[0].close()
            servers[0] = await asyncio.to_thread(start, folder, int(servers[0].url.rpartition(":")[2]))
            await engine.load_weights(weights(1), 2)
            assert not engine._lost
            assert all(server.takes_channel for server in each)

    run(main())
    assert not (tmp_path / "weights").exists()


@pytest.mark.slow
@needs_vllm
def test_a_server_that_hangs_as_it_takes_weights_keeps_them_from_no_other(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 5_000)

    def stopping(number: int) -> Iterator[tuple[str, torch.Tensor]]:
        for place, pair in enumerate(weights(1)):
            if place == number:
                os.killpg(servers[0].process.pid, signal.SIGSTOP)
            yield pair

    async def main() -> None:
        async with client(servers, tmp_path, timeout_s=20) as (engine, each):
            await engine.load_weights(weights(0), 0)
            await engine.load_weights(stopping(6), 1)
            assert list(engine._lost) == [each[0]]
            await check_logprobs(engine, make_model(1), 1)
            os.killpg(servers[0].process.pid, signal.SIGCONT)
            version = 1
            while engine._lost:  # it may need a moment
                version += 1
                await engine.load_weights(weights(0), version)
            for server in each:
                await check_logprobs(server, make_model(0), version)
                assert server.takes_channel

    try:
        run(main())
    finally:
        os.killpg(servers[0].process.pid, signal.SIGCONT)


@pytest.mark.slow
@needs_vllm
def test_a_server_that_was_started_again_gets_the_weights_to_which_adapters_are_added(
    servers: list[Server], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with client(servers, tmp_path, timeout_s=100, max_retries=1) as (engine, each):
            assert await engine.kept_base() is KeptBase.MISSING
            await engine.load_adapters(changes(1).items(), weights(0), 0)
            assert await engine.kept_base() is KeptBase.THERE
            servers[0].close()
            servers[0] = await asyncio.to_thread(start, folder, int(servers[0].url.rpartition(":")[2]))
            await engine.load_adapters(changes(2).items(), None, 1)  # nobody knows yet
            assert list(engine._lost) == [each[0]]
            assert "the server was started again" in caplog.text
            await check_logprobs(engine, adapted(2), 1)
            assert await engine.kept_base() is KeptBase.MISSING
            await engine.load_adapters(changes(1).items(), weights(0), 2)
            assert not engine._lost
            for server in each:
                await check_logprobs(server, adapted(1), 2)
            os.kill(servers[0].process.pid, signal.SIGKILL)
            await engine.load_adapters(changes(2).items(), None, 3)
            assert list(engine._lost) == [each[0]]
            assert await engine.kept_base() is KeptBase.THERE  # one that stays away costs the others nothing
            servers[0].close()
            servers[0] = await asyncio.to_thread(start, folder, int(servers[0].url.rpartition(":")[2]))

    run(main())


@pytest.mark.slow
@needs_vllm
def test_where_none_is_left_the_last_one_says_why(servers: list[Server], tmp_path: Path) -> None:
    """The last test that uses the servers."""

    async def main() -> None:
        async with client(servers, tmp_path, timeout_s=10, max_retries=0) as (engine, _):
            await engine.load_weights(weights(0), 0)
            for server in servers:
                os.kill(server.process.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=r"none of 2 vLLM servers is left; the last: .* asked 1 times for"):
                await engine.generate(prompt(1), sampling(), "e")
            with pytest.raises(EngineError, match="none of 2 vLLM servers is left"):
                await engine.pause()

    run(main())
