"""What partial and async rollouts cost in learning: the default recipe in each mode, with equal numbers of trajectories.

    python -m benchmarks.partial_learning [--seeds 0 1 2 3 4] [--modes sync partial async] [--train.steps 80]

Warm-up, tasks, steps and trajectories for each step are the same; modes other than sync train on episodes that were
sampled under up to `max_staleness` earlier versions of the weights. Prints the share of held-out tasks solved before and
after, and each mode's difference from sync over the same seeds with its standard error.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from agentrl.recipe.config import load_recipe
from agentrl.run import loop
from agentrl.run.build import build

# Ratios are against the policy before the update, and what sampled enters as a truncated weight: else staleness itself
# would be clipped away.
STALE = ["--loss.anchor", "recomputed", "--loss.mismatch", "truncate"]


def train(recipe: Path, seed: int, mode: str, options: list[str]) -> dict[str, float]:
    settings = ["--seed", str(seed), "--rollout.mode", mode, *(STALE if mode != "sync" else []), *options]
    with (
        tempfile.TemporaryDirectory() as folder,
        build(load_recipe(recipe, [*settings, "--run_dir", f"{folder}/run"])) as parts,
    ):
        _, rows = loop.train(parts)
    steps = rows[1:]
    trained = [row for row in steps if "staleness/mean" in row]  # a step of which no token was computed has no means
    return {
        "before": rows[0]["eval/score"],
        "after": rows[-1]["eval/score"],
        "staleness": statistics.fmean(row["staleness/mean"] for row in trained),
        "oldest": max(row["staleness/max"] for row in trained),
        "clipped": statistics.fmean(row["clip/tokens"] for row in trained),
        "steps_per_s": len(steps) / sum(row["time/step_s"] for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("examples/calculator.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--modes", nargs="+", default=["sync", "partial", "async"])
    options, rest = parser.parse_known_args()
    figures: dict[str, dict[int, dict[str, float]]] = {mode: {} for mode in options.modes}
    print(
        f"{'seed':>4} {'mode':8} {'before':>7} {'after':>7} {'staleness':>10} {'oldest':>7} {'clipped':>8} {'steps/s':>8}"
    )
    for seed in options.seeds:
        for mode in options.modes:
            found = figures[mode][seed] = train(options.recipe, seed, mode, rest)
            print(
                f"{seed:>4} {mode:8} {found['before']:>7.1%} {found['after']:>7.1%} {found['staleness']:>10.2f} "
                f"{found['oldest']:>7.0f} {found['clipped']:>8.1%} {found['steps_per_s']:>8.2f}",
                flush=True,
            )
    for mode in options.modes[1:]:
        differences = [
            figures[mode][seed]["after"] - figures[options.modes[0]][seed]["after"] for seed in options.seeds
        ]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        print(f"{mode} against {options.modes[0]}: {statistics.fmean(differences):+.1%} +- {error:.1%}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
