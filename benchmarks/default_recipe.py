"""The two built-in recipes over several seeds: what evaluation finds before and after, and how long it takes.

python benchmarks/default_recipe.py [--seeds 0 1 2] [--recipes examples/calculator.yaml examples/service_desk.yaml]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from agentrl.recipe.config import load_recipe
from agentrl.run import loop
from agentrl.run.build import build


def train(recipe: Path, seed: int) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as folder,
        build(load_recipe(recipe, ["--seed", str(seed), "--run_dir", f"{folder}/run"])) as parts,
    ):
        begin = time.perf_counter()
        _, rows = loop.train(parts)
    return {
        "seed": seed,
        "score_before": rows[0]["eval/score"],
        "score_after": rows[-1]["eval/score"],
        "success_before": rows[0].get("eval/success", 0.0),
        "success_after": rows[-1].get("eval/success", 0.0),
        "minutes": (time.perf_counter() - begin) / 60,
        "first_ratio_deviation": max(
            row["first/ratio_deviation"] for row in rows[1:] if "first/ratio_deviation" in row
        ),
        "skipped_minibatches": sum(row["skipped_minibatches"] for row in rows[1:]),
        "first_clipped_tokens": max(row["first/clipped_tokens"] for row in rows[1:] if "first/clipped_tokens" in row),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--recipes",
        type=Path,
        nargs="+",
        default=[Path("examples/calculator.yaml"), Path("examples/service_desk.yaml")],
    )
    options = parser.parse_args()
    figures: dict[str, object] = {"threads": torch.get_num_threads()}
    for recipe in options.recipes:
        print(
            f"{recipe.stem:14} {'seed':>4} {'score':>16} {'success':>16} {'minutes':>8} {'skipped':>8} "
            f"{'first ratio off by':>19}"
        )
        results = []
        for seed in options.seeds:
            found = train(recipe, seed)
            results.append(found)
            print(
                f"{'':14} {seed:>4} {found['score_before']:>7.1%} ->{found['score_after']:>6.1%} "
                f"{found['success_before']:>7.1%} ->{found['success_after']:>6.1%} {found['minutes']:>8.1f} "
                f"{found['skipped_minibatches']:>8.0f} {found['first_ratio_deviation']:>19.1e}",
                flush=True,
            )
        figures[recipe.stem] = results
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
