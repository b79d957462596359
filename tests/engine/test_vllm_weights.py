"""What the client of a vLLM server knows of the server's model, without a server."""

from pathlib import Path

import pytest
import torch

from agentrl.engine.vllm_weights import Answer, read_model
from benchmarks.architectures import tiny_model


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3 with images", "Mistral 3"])
def test_weights_are_those_of_the_family_s_own_class(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, vocab_size=97)
    model.save_pretrained(tmp_path)
    answer = Answer(
        name=str(tmp_path), dtype=torch.bfloat16, logprobs_mode="processed_logprobs", num_workers=1, is_gpu=False
    )
    served = read_model(answer)
    assert {name: weight.shape for name, weight in served.shapes.items()} == {
        name: weight.shape for name, weight in model.state_dict().items()
    }
    assert served.vocab_size == 97
