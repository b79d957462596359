from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from agentrl.chat import train_tokenizer
from agentrl.config import load_recipe
from agentrl.errors import ConfigError
from agentrl.learn.model import LocalModelConfig, make_local_model


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
