"""Two processes on one GPU by NCCL: gradients, shards, checkpoints, and weights on their way to a server."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.engine.vllm.weights import Channel, Weight, pack
from agentrl.learn.learner import Learner
from tests.gpu.test_updates import gradient, learner_on
from tests.learn.test_learner import CREDITS, GROUPS
from tests.support.gpu import NEEDS_GPU, share_one_gpu
from tests.support.ports import free_port
from tests.support.several import together

pytestmark = NEEDS_GPU
Floats = npt.NDArray[np.float64]
"""Tensors would have to be fetched while the process that made them lives."""


def steps(sharding: str, precision: str, folder: Path | None) -> tuple[str, Floats, Floats]:
    """The backend, a gradient (of what is shared out: none), and weights after two steps, the second from a checkpoint."""
    if "RANK" in os.environ:
        share_one_gpu()

    def made() -> Learner:
        options: dict[str, Any] = {"sharding": sharding, "precision": precision, "learning_rate": 1e-4}
        return learner_on("cuda", "qwen3", layout="packed", max_tokens_per_micro_batch=100, **options)

    found = gradient(made()) if sharding == "none" else torch.zeros(0)
    learner = made()
    learner.update(GROUPS, CREDITS, version=1)
    if folder is not None:
        learner.state.save(folder)
        PartialState().wait_for_everyone()
        learner = made()
        learner.state.load(folder)
    learner.update(GROUPS, CREDITS, version=2)
    weights = torch.cat([tensor.flatten().double().cpu() for _, tensor in learner.state.weights()])
    return dist.get_backend() if dist.is_initialized() else "", found.numpy(), weights.numpy()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_make_the_steps_of_one(sharding: str, precision: str, tmp_path: Path) -> None:
    _, expected_gradient, expected = steps("none", precision, None)
    for backend, found_gradient, found in together(2, steps, sharding, precision, tmp_path / "saved"):
        assert "nccl" in backend
        if sharding == "none":
            difference = np.linalg.norm(found_gradient - expected_gradient)
            assert difference / np.linalg.norm(expected_gradient) < (1e-5 if precision == "float32" else 1e-2)
        # Adam turns a gradient of rounding into a whole step: of 1e-4.
        assert (abs(found - expected) < 1e-5).mean() > (0.99 if precision == "float32" else 0.9)


def hand_over(port: int) -> dict[str, Floats]:
    """Rank 0 sends weights, the other returns what it got."""
    share_one_gpu()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", 0)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    channel = Channel(store, rank=rank, size=2, device=device, address="127.0.0.1", timeout_s=60)
    taken: dict[str, Floats] = {}
    if rank == 0:
        sent = torch.arange(1000, dtype=torch.float32, device=device)
        channel.send(pack([Weight(("a", "b"), sent, torch.float32)], device))
        channel.send(pack([Weight(("c",), sent, torch.bfloat16), Weight(("d",), sent[:7], torch.float32)], device))
        channel.end()
    else:
        taken = {name: tensor.double().cpu().numpy() for name, tensor in channel.receive()}
    torch.cuda.synchronize()
    channel.close()
    return taken


def test_weights_arrive_as_they_were_sent() -> None:
    (taken,) = filter(None, together(2, hand_over, free_port()))
    sent = torch.arange(1000, dtype=torch.float32)
    expected = {"a": sent, "b": sent, "c": sent.bfloat16(), "d": sent[:7]}
    assert taken.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(taken[name], weight.double().numpy())


def hand_over_late(port: int) -> list[bool]:
    """Rank 0 sends weights whose bytes are a second behind; the other reads them on a stream of its own at once."""
    share_one_gpu()
    rank, device, size = int(os.environ["RANK"]), torch.device("cuda", 0), 2**20
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    channel = Channel(store, rank=rank, size=2, device=device, address="127.0.0.1", timeout_s=60)
    is_right: list[bool] = []
    if rank == 0:
        for number in range(4):
            sent = torch.full((size,), 1.0 + number, device=device)
            bucket = pack([Weight((str(number),), sent, torch.float32)], device)
            channel._send_sizes(len(bucket.header), len(bucket.payload))
            channel._broadcast(bucket.header)
            torch.cuda._sleep(2 * 10**9)  # cycles
            channel._broadcast(bucket.payload)
        channel.end()
    else:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            copies = [(float(name), weight.clone()) for name, weight in channel.receive()]
            is_right = [bool((copy == 1.0 + number).all()) for number, copy in copies]
    torch.cuda.synchronize()
    channel.close()
    return is_right


def test_weights_are_read_only_when_they_are_there() -> None:
    (is_right,) = filter(None, together(2, hand_over_late, free_port()))
    assert is_right == [True] * 4
