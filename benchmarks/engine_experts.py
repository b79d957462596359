"""How far engine and trainer are apart in bfloat16 where a mixture's experts are replayed, and where they are not.

    OMP_NUM_THREADS=1 python -m benchmarks.engine_experts [--seeds 8]

A first step of each run, whose rollouts are fresh: with the same weights, what the trainer says of a token differs from what
the engine `transformers` said by rounding, and by experts that rounding chose.
"""

import argparse
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.chat import train_tokenizer
from agentrl.recipe.config import Recipe
from agentrl.run import loop
from agentrl.run.build import build

SIZES: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "initializer_range": 0.1,
}
SHOWN = ("moe/unlike_engine", "first/engine_difference", "first/ratio_deviation")


def first_step(seed: int, replay: str) -> dict[str, float]:
    """Return the metrics of a run's first step."""
    with TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).save_pretrained(folder)
        train_tokenizer([], vocab_size=261).save_pretrained(folder)
        recipe = Recipe.model_validate(
            {
                "seed": seed,
                "run_dir": Path(folder) / "run",
                "env": {"id": "key_door"},
                "engine": {"name": "transformers"},
                "chat": {"renderer": "chatml"},
                "model": {"name_or_path": folder},
                "rollout": {"num_groups": 2, "group_size": 4, "max_turns": 2, "max_turn_tokens": 16},
                "loss": {"routing_replay": replay},
                "train": {"steps": 1, "precision": "bfloat16", "device": "cpu", "agreement": 1.0},
                "evaluation": {"num_tasks": 1},
            }
        )
        with build(recipe, tokenizer_folder=None) as parts:
            return loop.train(parts)[1][-1]


def cell(found: list[float]) -> str:
    """Return the mean and its standard error."""
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.4f} ± {error:.4f}"


def main() -> None:
    """Print a table of means and standard errors over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    num_seeds = parser.parse_args().seeds
    free, replayed = ([first_step(seed, replay) for seed in range(num_seeds)] for replay in ("none", "engine"))
    print("| `loss.routing_replay` |", " | ".join(f"`{name}`" for name in SHOWN), "|\n|---|" + "---|" * len(SHOWN))
    for words, rows in (("`none`", free), ("`engine`", replayed)):
        cells = [cell([row[name] for row in rows]) if name in rows[0] else "" for name in SHOWN]
        print(f"| {words} |", " | ".join(cells), "|")
    pairs = list(zip(free, replayed, strict=True))
    cells = [cell([new[name] - old[name] for old, new in pairs]) if name in free[0] else "" for name in SHOWN]
    print("| the second less the first, paired |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
