"""Curves of the tiny policy on built-in environments: success on held-out tasks, over the steps of a recipe, for three seeds.

    OMP_NUM_THREADS=1 python -m benchmarks.learn_environments --out FILE [--recipes corridor ...] [--seeds 0 1 2]
    python -m benchmarks.learn_environments --out FILE --report benchmarks/results/DATE-environments.md

The first trains each recipe of examples/ once for each seed, from random weights through the warm-up on poor demonstrations
to the last step, one run after the other, and appends a line of JSON to FILE; a run of the same recipe that is there already
is not made again. The second writes the table and draws the curves beside it (an SVG; needs matplotlib). The last line
printed is JSON.
"""

import argparse
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml

from agentrl.recipe.config import load_recipe
from agentrl.run import loop
from agentrl.run.build import build

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("corridor", "frozen_lake", "sql_analyst", "tasks")
Result: TypeAlias = dict[str, Any]
"""One line of the results file."""


def train(recipe: str, seed: int) -> Result:
    """Train a recipe of examples/ to its end; return its curve and what it took."""
    begin = os.times()
    with tempfile.TemporaryDirectory() as folder:
        place = ["--seed", str(seed), "--run_dir", f"{folder}/run", "--report.rollouts_every", "0"]
        with build(load_recipe(path_of(recipe), place), tokenizer_folder=None) as parts:
            rows = loop.train(parts)[1]
            num_parameters = sum(p.numel() for p in parts.policy.parameters())
    evaluated = [row for row in rows if "eval/episodes" in row]
    return {
        "recipe": recipe,
        "seed": seed,
        "of": fingerprint(recipe),
        "parameters": num_parameters,
        "tasks": int(evaluated[-1]["eval/episodes"]),
        "steps": [int(row["step"]) for row in evaluated],
        # An evaluation in which no episode came to its end reports no success: there was none.
        "success": [row.get("eval/success", 0.0) for row in evaluated],
        "turns": [row["eval/turns"] for row in evaluated],
        "minutes": sum(b - a for a, b in zip(begin[:2], os.times()[:2], strict=True)) / 60,
    }


def path_of(recipe: str) -> Path:
    return ROOT / "examples" / f"{recipe}.yaml"


def fingerprint(recipe: str) -> str:
    """Name what a recipe says, whatever its comments."""
    said = json.dumps(yaml.safe_load(path_of(recipe).read_bytes()), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def read_results(out: Path) -> dict[tuple[str, int], Result]:
    """Return the runs of today's recipes."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    return {(r["recipe"], r["seed"]): r for r in map(json.loads, lines) if r["of"] == fingerprint(r["recipe"])}


def table(results: Sequence[Result]) -> str:
    """Return one row for each run."""
    lines = [
        "| recipe | seed | success before | success after | turns after | steps | minutes of a core |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| [{r['recipe']}](../../examples/{r['recipe']}.yaml) | {r['seed']} | {r['success'][0]:.1%} | {r['success'][-1]:.1%} "
        f"| {r['turns'][-1]:.1f} | {r['steps'][-1]} | {r['minutes']:.1f} |"
        for r in results
    ]
    return "\n".join(lines) + "\n"


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw success over steps: a panel for each recipe, a line for each seed."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "agentrl", "font.size": 9}
    plt.switch_backend("Agg")
    recipes = list(dict.fromkeys(r["recipe"] for r in results))
    fig, axes = plt.subplots(1, len(recipes), figsize=(3.6 * len(recipes), 2.8), squeeze=False, sharey=True)
    for recipe, axis in zip(recipes, axes[0], strict=True):
        for result in results:
            if result["recipe"] == recipe:
                axis.plot(result["steps"], result["success"], "o-", ms=3, label=f"seed {result['seed']}")
        axis.set(title=recipe, xlabel="step", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("success on held-out tasks")
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def report(results: Sequence[Result], path: Path) -> None:
    """Write the table with the drawing beside it."""
    picture = path.with_suffix(".svg")
    plot(results, picture)
    sizes, episodes = [r["parameters"] for r in results], [r["tasks"] for r in results]
    path.write_text(
        f"# {path.name[:10]}: environments that a tiny policy learns\n\n"
        "`python -m benchmarks.learn_environments`: recipes of examples/, from random weights through a warm-up on poor\n"
        f"demonstrations to the last step; {min(sizes):,} to {max(sizes):,} parameters, {min(episodes)} to {max(episodes)}\n"
        f"episodes of held-out tasks at temperature 1, one thread of a CPU, torch {torch.__version__}. Before: after\n"
        "the warm-up. Minutes are of a core's time, warm-up and evaluations included.\n\n"
        f"{table(results)}\n![curves]({picture.name})\n",
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", type=Path, help="write table and drawing of what FILE has, and train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [(recipe, seed) for recipe in options.recipes for seed in options.seeds]
    for recipe, seed in wanted if options.report is None else ():
        if (recipe, seed) not in read_results(options.out):
            result = train(recipe, seed)
            curve = " ".join(f"{success:.2f}" for success in result["success"])
            print(f"{recipe:12} seed {seed}: {curve}  ({result['minutes']:.1f} min)", flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    known = read_results(options.out)
    results = [known[job] for job in wanted if job in known]
    if options.report is not None:
        report(results, options.report)
    for recipe in options.recipes:
        if of_recipe := [r for r in results if r["recipe"] == recipe]:
            before, after = (statistics.mean(r["success"][k] for r in of_recipe) for k in (0, -1))
            print(f"{recipe:12} {before:.1%} -> {after:.1%}, mean of {len(of_recipe)} seeds")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
