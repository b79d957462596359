"""Rotary positions whose frequencies transformers chooses for each pass."""

from typing import Any

import torch
from torch import Tensor

from agentrl.models.auto_classes import fix_frequencies
from agentrl.policy.config import Layout
from agentrl.policy.layout import hidden_states, lay_out, probe_layout
from tests.support.each import each
from tests.support.models import SIZES, AllFloat64, branching_rows, made

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 9.0, 16.0, 25.0],
    "original_max_position_embeddings": 40,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "Phi3",
        {
            **SIZES,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 40,
            "pad_token_id": 0,
            "initializer_range": 0.2,
        },
    ),
    "longrope of each layer type": (
        "Gemma3Text",
        {
            **SIZES,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": LONGROPE,
            },
            "initializer_range": 0.2,
        },
    ),
    "dynamic": (
        "Llama",
        {**SIZES, "max_position_embeddings": 40, "rope_parameters": DYNAMIC, "initializer_range": 0.2},
    ),
}
ROWS = [branching_rows()[0], branching_rows()[4]]  # of 90 and 30 tokens, on either side of 40


def states(model: Any, rows: list[Any]) -> Tensor:
    """Hidden states of the last row."""
    inputs, _ = lay_out(rows, "padded")
    with torch.no_grad():
        return hidden_states(model, inputs).view(len(rows), -1, 32)[-1, : len(rows[-1])]


@each("name", MODELS)
@each("max_tokens", [40, 90])
def test_a_row_is_the_same_beside_a_longer_one(name: str, max_tokens: int) -> None:
    family, sizes = MODELS[name]
    model = made(family, **sizes).double().eval()
    assert (states(model, ROWS) - states(model, ROWS[1:])).abs().max() > 1e-3  # what transformers does
    fix_frequencies(model, max_tokens)
    assert (states(model, ROWS) - states(model, ROWS[1:])).abs().max() < 1e-12


@each("layout", ["tree", "packed"])
@each("name", MODELS)
def test_layouts_are_exact_on_either_side_of_the_original_length(name: str, layout: Layout) -> None:
    family, sizes = MODELS[name]
    model = made(family, **sizes).double().eval()
    fix_frequencies(model, 90)
    with AllFloat64():
        gap, why = probe_layout(model, layout, max_tokens=90)
    assert gap < 1e-9, why


@each("name", MODELS)
def test_the_frequencies_are_those_of_the_longest_row(name: str) -> None:
    family, sizes = MODELS[name]
    for max_tokens, row in ((90, ROWS[0]), (30, ROWS[1])):
        model = made(family, **sizes).double().eval()
        expected = states(model, [row])
        fix_frequencies(model, max_tokens)
        torch.testing.assert_close(states(model, [row]), expected, rtol=0, atol=1e-9)
