"""A push of weights to vLLM's server: through files, directly through a process group, and of adapters alone.

    python -m benchmarks.pushes [--hidden 1024] [--layers 8] [--repeats 3] [--dtype float32] [--servers 1]

A random Qwen3 with the vocabulary of the real ones, and real servers of it, on this machine. The ways in turn, each from a new
process of its own; the first push of each process is left out of the times. Then the same into vLLM within the process, of
weights that are perturbed as they are pushed. `adapters`: of rank 16 for all linear layers, to be added to weights that the
server keeps from the first push; `merged`: the same in the trainer, as a run does whose engine keeps none.

A client lets the first server sample all the time and notes when each token comes. `push` is the push alone; `without tokens`
is from the last token before the pause to the first one after it: pause, push, end of the pause, and the first token itself. A
run that proves its engine after a push does so after that. `sent` is what goes to a server, of files their sizes.
`memory` is by how much the peak of the process that pushes, or of a server's, rose above what it held before; `copy` is a plain
copy of as many bytes within one process, which no push can beat.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx2
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.vllm.common import ServerConfig, sampling_fields
from agentrl.engine.vllm.launch import Server, start_server
from agentrl.engine.vllm.server import VLLMServer, sync_weights
from agentrl.engine.vllm.weights import Weight, changes_in_buckets, in_buckets
from agentrl.types import Sampling
from tests.support.ports import free_port

WAYS = ("files", "directly", "merged", "adapters")
RANK = 16
SAMPLING = Sampling(max_tokens=1, stop_token_ids=(), temperature=1.0)


class Found(NamedTuple):
    """What pushes took."""

    seconds: list[float]
    without_tokens: list[float]
    sent_bytes: int
    peak_bytes: int
    server_bytes: int


def new_model(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=3 * hidden,
            vocab_size=151_936,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            max_position_embeddings=512,
        )
    )


def peak(process: psutil.Process) -> int:
    """Return the largest resident memory of a process since `forget_peak`, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def forget_peak(process: psutil.Process) -> int:
    """Begin to measure; return what it holds now."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="utf-8")
    return int(process.memory_info().rss)


def make_changes(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        name: (torch.randn(weight.shape[0], RANK) / 100, torch.randn(RANK, weight.shape[1]) / 100)
        for name, weight in state.items()
        if name.endswith("_proj.weight")
    }


def num_bytes(buckets: Iterable[list[Weight]]) -> int:
    return sum(weight.num_bytes for bucket in buckets for weight in bucket)


class Pushed(VLLMServer):
    """Counts what is in the files that it lets the server read."""

    file_bytes = 0

    async def read_files(self, folder: Path, *, ties: Mapping[str, str] | None) -> None:
        self.file_bytes = sum(path.stat().st_size for path in folder.iterdir())
        await super().read_files(folder, ties=ties)


class Tokens:
    """Lets a server sample all the time, but while it is held; a request that a pause ends is followed by another."""

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        """When each token came."""
        self.may_ask = threading.Event()
        self._url, self._is_done = url, False
        self._thread = threading.Thread(target=self._ask_on)

    def __enter__(self) -> Self:
        self.may_ask.set()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done = True
        self.may_ask.set()
        self._thread.join()

    async def more(self) -> None:
        """Wait for two more tokens."""
        goal = len(self.times) + 2
        while len(self.times) < goal:
            assert self._thread.is_alive()
            await asyncio.sleep(0.002)

    def _ask_on(self) -> None:
        fields = sampling_fields(replace(SAMPLING, max_tokens=200))
        body = {"token_ids": [1, 2, 3], "sampling_params": fields, "stream": True}
        with httpx2.Client(timeout=None, trust_env=False) as http:
            while not self._is_done:
                self.may_ask.wait()
                with http.stream("POST", f"{self._url}/inference/v1/generate", json=body) as response:
                    response.raise_for_status()
                    for line in response.iter_lines():
                        now = time.perf_counter()
                        if line.startswith("data: {"):
                            choices = json.loads(line.removeprefix("data: "))["choices"]
                            self.times += [now for choice in choices for _ in choice["token_ids"]]
                        if self._is_done:
                            break


def measure(urls: Sequence[str], pids: Sequence[int], model: Path, way: str, repeats: int) -> Found:
    """Push in this process."""
    read = Qwen3ForCausalLM.from_pretrained(model).state_dict()
    state = {name: tensor.clone() for name, tensor in read.items()}  # of files it would count when it is first touched
    del read
    changes = make_changes(state) if way in ("merged", "adapters") else {}
    me, workers = psutil.Process(), [psutil.Process(pid) for pid in pids]
    seconds, without_tokens = [], []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            if way == "merged" and name in changes:
                left, right = changes[name]
                yield name, tensor + left @ right
            else:
                yield name, tensor

    async def main(folder: Path) -> tuple[int, int, int]:
        servers = [Pushed(ServerConfig(url=url), folder=folder) for url in urls]
        for server in servers:
            server.takes_channel = way != "files"
            await server.generate([1, 2, 3], SAMPLING, "first")  # so that all is up
        served = await servers[0].served_model()
        buckets = changes_in_buckets(changes.items(), served) if way == "adapters" else in_buckets(weights(), served)
        sent = num_bytes(buckets)
        held, held_there = forget_peak(me), [forget_peak(worker) for worker in workers]
        with Tokens(urls[0]) as tokens:
            for version in range(repeats + 1):
                await tokens.more()
                tokens.may_ask.clear()
                for server in servers:
                    await server.pause()
                num_before, begin = len(tokens.times), time.perf_counter()
                pushed = changes.items() if way == "adapters" else None
                lost = await sync_weights(servers, None if pushed and version else weights(), version, changes=pushed)
                assert not lost
                seconds.append(time.perf_counter() - begin)
                for server in servers:
                    await server.resume()
                tokens.may_ask.set()
                await tokens.more()
                without_tokens.append(max(b - a for a, b in pairwise(tokens.times[num_before - 1 :])))
                assert all(server.takes_channel == (way != "files") for server in servers)
        above = [peak(worker) - before for worker, before in zip(workers, held_there, strict=True)]
        found = servers[0].file_bytes or sent, peak(me) - held, max(above)
        for server in servers:
            await server.close()
        return found

    with tempfile.TemporaryDirectory() as folder:
        sent, mine, theirs = asyncio.run(main(Path(folder)))
    return Found(seconds[1:], without_tokens[1:], sent, mine, theirs)


def measure_inside(model: Path, dtype: str, repeats: int) -> Found:
    """Push perturbed weights, as a run does when it begins, to vLLM in this process."""
    from agentrl.engine.vllm.engine import VLLMConfig, VLLMEngine

    trained = Qwen3ForCausalLM.from_pretrained(model)
    state = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    me, seconds = psutil.Process(), []

    async def main() -> int:
        engine = VLLMEngine(trained, VLLMConfig(), max_tokens=256, dtype=getattr(torch, dtype))
        held = forget_peak(me)
        for version in range(repeats + 1):
            begin = time.perf_counter()
            await engine.load_weights(((name, tensor * 1.1) for name, tensor in state.items()), version)
            seconds.append(time.perf_counter() - begin)
        await engine.close()
        return peak(me) - held

    above = asyncio.run(main())
    return Found(seconds[1:], [], 0, above, 0)


def engine_process(server: Server) -> int:
    """Return the process of a server that holds the model."""
    found = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    return int(max(found, key=lambda process: process.memory_info().rss).pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--servers", type=int, default=1)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = new_model(options.hidden, options.layers)
        model_bytes = sum(tensor.numel() for tensor in model.parameters()) * getattr(torch, options.dtype).itemsize
        model.save_pretrained(folder / "model")
        del model
        arguments = {"max_model_len": 256, "max_num_seqs": 8, "dtype": options.dtype}

        def start(number: int) -> Server:
            log = folder / f"{number}.log"
            return start_server(folder / "model", port=free_port(), log=log, options=arguments, timeout_s=600)

        with ThreadPoolExecutor(options.servers) as threads:
            servers = [stack.enter_context(server) for server in threads.map(start, range(options.servers))]
        urls, pids = [server.url for server in servers], [engine_process(server) for server in servers]
        found: dict[str, list[Found]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                with context.Pool(1) as pool:
                    arguments_ = (urls, pids, folder / "model", way, options.repeats)
                    found[way].append(pool.apply(measure, arguments_))
        with context.Pool(1) as pool:
            found["in process"] = [pool.apply(measure_inside, (folder / "model", options.dtype, options.repeats))]
        source, target = torch.zeros(model_bytes, dtype=torch.uint8), torch.ones(model_bytes, dtype=torch.uint8)
        begin = time.perf_counter()
        target.copy_(source)
        copy_s = time.perf_counter() - begin
    print(f"{model_bytes / 1e6:.0f} MB to {options.servers} server(s) in {options.dtype}; copy: {copy_s:.2f} s\n")
    print(
        "| way | push, s | least | without tokens, s | least | sent, MB | memory of the trainer, MB | of a server, MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for way, rounds in found.items():
        columns = [[second for one in rounds for second in getattr(one, name)] for name in Found._fields[:2]]
        cells = [f"{take(column):.2f}" if column else "-" for column in columns for take in (statistics.median, min)]
        cells += [f"{max(getattr(one, name) for one in rounds) / 1e6:.0f}" for name in Found._fields[2:]]
        print(f"| {' | '.join([way, *cells])} |")


if __name__ == "__main__":
    main()
