from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from agentrl.chat import train_tokenizer
from agentrl.config import load_recipe
from agentrl.errors import ConfigError
from agentrl.policy.layout import hidden_states, lay_out
from agentrl.policy.logprobs import fused_logprobs
from agentrl.policy.model import LocalModelConfig, Policy, make_local_model


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            "{hidden_size: 130}",
            "num_heads: 4 does not divide hidden_size: 130; set hidden_size to a multiple of 8",
        ),
        (
            "{hidden_size: 12}",
            "hidden_size: 12 over num_heads: 4 gives heads of odd size 3, which rotary positions cannot turn; "
            "set hidden_size to a multiple of 8",
        ),
        (
            "{num_kv_heads: 3}",
            "num_kv_heads: 3 does not divide num_heads: 4; set num_kv_heads to 1, num_heads, or another divisor of it",
        ),
        (
            "{num_kv_heads: 8}",
            "num_kv_heads: 8 does not divide num_heads: 4; set num_kv_heads to 1, num_heads, or another divisor of it",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_when_the_recipe_is_read(sizes: str, words: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{local: {sizes}}}")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe)
    assert str(caught.value) == f"model.local.{words}"


def test_adapters_need_a_model_to_adapt(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {lora: {rank: 2}}")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe)
    words = "a model with random weights has nothing to adapt; set model.name_or_path, or leave lora out"
    assert str(caught.value) == f"model.lora: {words}"


def test_what_is_accepted_runs() -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    accepted = []
    for hidden in range(1, 17):
        for heads in (1, 2, 3, 4):
            for kv_heads in (1, 2, 3):
                try:
                    config = LocalModelConfig(
                        hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, num_layers=1, intermediate_size=4
                    )
                except ValidationError:
                    continue
                accepted.append((hidden, heads, kv_heads))
                model = make_local_model(config, tokenizer)
                assert torch.isfinite(model(torch.zeros(1, 3, dtype=torch.long)).logits).all()
    # Derived by hand: multiples of 2 * heads up to 16, times the divisors of heads among 1, 2, 3.
    # heads 1: 8 * 1; heads 2: 4 * 2; heads 3: 2 * 2; heads 4: 2 * 2.
    assert len(accepted) == 8 + 8 + 4 + 4


def test_under_autocast_the_head_reads_hidden_states_in_bfloat16_and_its_logits_are_not_rounded() -> None:
    torch.manual_seed(0)
    model = make_local_model(LocalModelConfig(), train_tokenizer([], vocab_size=261))
    inputs, _ = lay_out([np.arange(40)], "padded")
    slot_T, target_T = torch.arange(39), torch.arange(1, 40)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got_T, _ = Policy(model)(inputs, slot_T, target_T, 1.0)
        hidden_TD = hidden_states(model, inputs)[slot_T]
    assert hidden_TD.dtype == torch.float32  # the last norm's weights are
    expected_T, _ = fused_logprobs(hidden_TD.bfloat16().float(), model.lm_head.weight, target_T)
    torch.testing.assert_close(got_T, expected_T.detach(), rtol=1e-6, atol=1e-6)
