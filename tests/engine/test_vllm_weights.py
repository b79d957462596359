"""What the client of a vLLM server knows of the server's model, without a server."""

from pathlib import Path
from typing import Any

import torch

from agentrl.engine.vllm.common import BACKEND, EXTENSION
from agentrl.engine.vllm.weights import ServerInfo, load_served_model, parse_server_info
from tests.support.architectures import tiny_model
from tests.support.each import each


@each("name", ["Qwen3", "Gemma 3 with images", "Mistral 3"])
def test_weights_are_those_of_the_family_s_own_class(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, vocab_size=97)
    model.save_pretrained(tmp_path)
    answer = ServerInfo(
        name=str(tmp_path),
        dtype=torch.bfloat16,
        logprobs_mode="processed_logprobs",
        num_workers=1,
        is_gpu=False,
        adapter_rank=0,
    )
    served = load_served_model(answer)
    assert {name: weight.shape for name, weight in served.shapes.items()} == {
        name: weight.shape for name, weight in model.state_dict().items()
    }
    assert served.vocab_size == 97


@each(
    ("extension", "transfer", "num_replicas", "expected"),
    [
        (EXTENSION, {"backend": BACKEND}, 1, 4),
        (EXTENSION, {"backend": "nccl"}, 1, 0),
        (EXTENSION, None, 1, 0),
        ("", {"backend": BACKEND}, 1, 0),
        (EXTENSION, {"backend": BACKEND}, 2, 0),
    ],
)
def test_weights_go_directly_to_servers_that_were_started_for_it(
    extension: str, transfer: Any, num_replicas: int, expected: int
) -> None:
    config = {
        "model_config": {"model": "m", "dtype": "torch.float32", "logprobs_mode": "processed_logprobs"},
        "parallel_config": {"worker_extension_cls": extension, "data_parallel_size": num_replicas, "world_size": 4},
        "device_config": {"device": "cpu"},
        "weight_transfer_config": transfer,
    }
    assert parse_server_info({"vllm_config": config}).num_workers == expected
