"""What vLLM tells of experts, as it writes it: it tells any on a GPU alone."""

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentrl.engine.vllm.experts import VLLMExperts
from agentrl.errors import EngineError
from agentrl.models.moe import Experts
from tests.support.each import each
from tests.support.models import SIZES

TOLD_NLX = np.random.default_rng(0).integers(8, size=(5, 3, 2), dtype=np.uint8)
"""Of 5 tokens and 3 layers, of which the first has no experts."""


@pytest.fixture(scope="module")
def reader() -> VLLMExperts:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, "head_dim": 8, "pad_token_id": 0}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Glm4MoeConfig(**sizes))
    found = VLLMExperts.for_model(model)
    assert found is not None
    return found


def sent(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_layers_without_experts_are_left_out(reader: VLLMExperts) -> None:
    assert reader == (Experts(2, 2, 8), [1, 2])
    packed = reader.pack(TOLD_NLX, num_tokens=5)
    assert np.array_equal(reader.experts.unpack(packed), TOLD_NLX[:, 1:])
    assert reader.pack_npy(sent(TOLD_NLX), num_tokens=5) == packed


def test_a_dense_model_has_nothing_to_tell() -> None:
    sizes: dict[str, Any] = SIZES
    assert VLLMExperts.for_model(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))) is None


@each(
    ("told", "num_tokens", "words"),
    [
        (None, 5, "vLLM does not return the experts that it chose, which loss.routing_replay: engine needs"),
        (TOLD_NLX, 6, r"it returned experts \(tokens, layers, chosen\) \(5, 3, 2\) for 6 tokens"),
        (TOLD_NLX[:, 1:], 5, r"another mixture of experts than the trainer: it returned .* \(5, 2, 2\) for 5 tokens"),
        (TOLD_NLX[:, :, 1:], 5, r"it returned experts \(tokens, routers, chosen\) \(5, 2, 1\), expected"),
        (TOLD_NLX + 1, 5, "it returned experts from 1 to 8, expected from 0 to 7"),
        (TOLD_NLX[0], 3, r"it returned experts \(tokens, layers, chosen\) \(3, 2\)"),
    ],
)
def test_what_is_not_told_or_of_another_model_is_refused(
    told: Any, num_tokens: int, words: str, reader: VLLMExperts
) -> None:
    with pytest.raises(EngineError, match=words):
        reader.pack(told, num_tokens=num_tokens)
