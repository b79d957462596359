"""Both ends of a channel in one process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.engine.vllm import weights as vllm_weights
from agentrl.engine.vllm.weights import (
    Bucket,
    Channel,
    ServedModel,
    Weight,
    in_buckets,
    listen,
    on_daemon_thread,
    pack,
    unpack,
)

CPU = torch.device("cpu")


class Receiver:
    """The other end, which takes nothing until it is told to."""

    def __init__(self, port: int) -> None:
        self.may_take = threading.Event()
        self.taken: dict[str, torch.Tensor] = {}
        self._port = port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self.may_take.set()
        self._thread.join(60)

    def _run(self) -> None:
        store = TCPStore("127.0.0.1", self._port, is_master=False, timeout=timedelta(seconds=60))
        channel = Channel(store, rank=1, size=2, device=CPU, address="127.0.0.1", timeout_s=60)
        self.may_take.wait(60)
        with suppress(RuntimeError):  # the sender has gone
            self.taken.update(channel.receive())
        channel.close()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Receiver]]:
    store, port = listen("127.0.0.1", 60)
    receiver = Receiver(port)
    channel = Channel(store, rank=0, size=2, device=CPU, address="127.0.0.1", timeout_s=60)
    yield channel, receiver
    receiver.close()


def bucket(size: int) -> tuple[torch.Tensor, Bucket]:
    tensor = torch.arange(size, dtype=torch.float32)
    return tensor, pack([Weight(("a", "b"), tensor, torch.float32)], CPU)


def test_weights_arrive_as_they_were_sent(ends: tuple[Channel, Receiver]) -> None:
    channel, receiver = ends
    tensor, packed = bucket(1000)
    receiver.may_take.set()
    channel.send(packed)
    channel.end()
    receiver.close()
    assert receiver.taken.keys() == {"a", "b"}
    assert torch.equal(receiver.taken["b"], tensor)


def test_a_weight_that_is_alone_in_its_bucket_is_copied_only_to_be_rounded() -> None:
    tensor, packed = bucket(1000)
    assert packed.payload.data_ptr() == tensor.data_ptr()
    rounded = pack([Weight(("a",), tensor, torch.bfloat16)], CPU)
    ((_, found),) = unpack(rounded)
    assert torch.equal(found, tensor.bfloat16())


@pytest.mark.parametrize(("is_gpu", "bound"), [(False, 1000), (True, 1500)])
def test_no_bucket_of_several_weights_is_larger_than_the_bound(
    is_gpu: bool, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "_BUCKET_BYTES", 1000)
    monkeypatch.setattr(vllm_weights, "_GPU_BUCKET_BYTES", 1500)
    state = {f"{n}": torch.full((1 + n % 20,), float(n)) for n in range(100)}  # each begins at a multiple of 64 bytes
    served = ServedModel(shapes=state, vocab_size=1, dtype=torch.float32, is_gpu=is_gpu)
    packed = [pack(weights, CPU) for weights in in_buckets(state.items(), served)]
    assert 0.8 * bound < max(len(one.payload) for one in packed) <= bound
    found = {name: tensor for one in packed for name, tensor in unpack(one)}
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_an_interrupt_waits_for_no_server_that_hangs(ends: tuple[Channel, Receiver]) -> None:
    channel, receiver = ends
    begun, ended = threading.Event(), threading.Event()

    def send() -> None:
        begun.set()
        try:
            channel.send(bucket(10_000_000)[1])  # more than any buffer on the way holds
        finally:
            ended.set()

    async def interrupted() -> None:
        sending = asyncio.create_task(on_daemon_thread(send))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(interrupted())
    assert not ended.is_set()
    receiver.may_take.set()
    assert ended.wait(60)
    channel.end()


def test_what_a_call_beside_raises_comes_back() -> None:
    def fail() -> None:
        raise RuntimeError("connection reset")

    with pytest.raises(RuntimeError, match="connection reset"):
        asyncio.run(on_daemon_thread(fail))
