"""Distance of an engine's log-probabilities to the trainer's, on text of the model's own, and the trainer's rounding error.

    python -m benchmarks.agreement MODEL [--engine transformers] [--precision bfloat16] [--copy] [--seeds 8]

MODEL is the name or folder of a Hugging Face model. `train.agreement` follows from it (docs/engines.md).
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from agentrl.recipe.config import Recipe
from agentrl.run.build import build
from agentrl.run.weight_sync import WeightSync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--copy", action="store_true", help="train.bfloat16_copy")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    rows = [{"prompt": f"{a} + {a} = ?", "answer": 2 * a} for a in range(8)]
    table = {"tasks": rows, "answer": "answer", "rewards": ["exact_match"]}
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe.model_validate(
            {
                "run_dir": Path(folder) / "run",
                "env": {"id": "agentrl.env.task_env:TaskEnv", "options": table},
                "model": {"name_or_path": options.model},
                "engine": {"name": options.engine},
                "credit": {"scheme": "uniform"},
                "rollout": {"max_turns": 1, "max_context_tokens": 512, "temperature": options.temperature},
                "train": {"precision": options.precision, "bfloat16_copy": options.copy},
            }
        )
        print("| seed | engine to trainer, nats | trainer to float32, nats | bound |\n|---|---|---|---|")
        found = []
        with build(recipe) as parts:
            for seed in range(options.seeds):
                sync = WeightSync(parts.pool, parts.learner, runner=parts.runner, seed=seed, config=recipe.train)
                distance = sync.verify_and_push(0)
                error = parts.learner.rounding_error(*sync.samples()[0][:2])
                found.append((distance, error))
                print(f"| {seed} | {distance:.4f} | {error:.4f} | {sync.bound:.3f} |", flush=True)
    distances, errors = np.array(found).T
    print(json.dumps({"distance_max": round(distances.max(), 4), "rounding_error_max": round(errors.max(), 4)}))


if __name__ == "__main__":
    main()
