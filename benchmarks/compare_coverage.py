"""How often intervals of `agentrl compare` cover the true difference, and how often a recipe differs from itself.

    python -m benchmarks.compare_coverage [--comparisons 1000] [--runs FOLDER [--train N] [--jobs 2] [--per-arm 3]]

Simulated: pairs of outcomes whose true mean difference is known, of shapes that runs have (success on 64 tasks, near the top,
skewed, seeds that never start). For each shape and number of seeds, the share of 95 % intervals that cover it: of the paired t
interval, which is what `agentrl compare` reports, and beside it of those that it was chosen from (the bootstrap-t, both tails
and symmetric; Hall's transformation of t for skewness), with their median width against it.

Real: `--runs` is a folder of runs of `benchmarks/letters.yaml`, one for each seed (`--train N` makes what is missing of
N). They are dealt out to comparisons of the recipe with itself, each of disjoint seeds; none should be called different, one in
twenty will. A run of a seed compared with itself would be the same bit for bit, so both sides have seeds of their own.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.compare.comparison import compare
from agentrl.compare.curves import curve_of, read_run
from agentrl.compare.runner import Arm, run_missing
from agentrl.errors import ConfigError
from agentrl.recipe.config import load_recipe
from agentrl.report.statistics import t_quantile

RECIPE = Path(__file__).parent / "letters.yaml"
SEEDS = (4, 8, 16)
_COMPARISONS = 40
"""Of the recipe with itself, at most."""
Rng = np.random.Generator
Draws = Any
"""Outcomes or differences: a row for each comparison, a column for each seed."""
Draw = Callable[[Rng, tuple[int, int]], Draws]


def successes(mean: float, sd: float) -> Draw:
    """Success on 64 tasks, of seeds whose log-odds are normal."""
    return lambda rng, size: rng.binomial(64, 1 / (1 + np.exp(-rng.normal(mean, sd, size)))) / 64


def stuck(share: float, *, high: float = 0.9, low: float = 0.3) -> Draw:
    """Success on 64 tasks, of seeds of which a share never starts to learn."""
    return lambda rng, size: rng.binomial(64, np.where(rng.random(size) < share, low, high)) / 64


def below(mean: float) -> Draw:
    """One less an exponential value."""
    return lambda rng, size: 1 - rng.exponential(mean, size)


def logarithmic(sd: float) -> Draw:
    """Log-normal values, as numbers of steps are."""
    return lambda rng, size: rng.lognormal(0, sd, size)


SHAPES: dict[str, tuple[Draw, Draw]] = {
    "normal": (lambda rng, size: rng.normal(0.5, 0.14, size), lambda rng, size: rng.normal(0.45, 0.14, size)),
    "success on 64 tasks": (successes(0, 0.5), successes(0, 0.5)),
    "success, far apart": (successes(2, 0.8), successes(0, 0.5)),
    "success, near the top": (successes(4, 0.7), successes(1.5, 0.7)),
    "success, both near the top": (successes(4, 0.7), successes(3.5, 0.7)),
    "skewed alike": (below(0.1), below(0.1)),
    "steps, log-normal": (logarithmic(0.5), logarithmic(0.7)),
    "a quarter of both never start": (stuck(0.25), stuck(0.25)),
    "heavy tails": (lambda rng, size: rng.standard_t(3, size), lambda rng, size: np.zeros(size)),
    "* one more skewed": (below(0.05), below(0.15)),
    "* one skewed, one constant": (below(0.1), lambda rng, size: np.full(size, 0.95)),
    "* a tenth, and four tenths never start": (stuck(0.1), stuck(0.4)),
    "* a quarter of one never start": (stuck(0.0, high=0.95), stuck(0.25, high=0.95)),
}
"""Those with a star are shapes for which no interval from so few seeds is right."""


def paired_t(rng: Rng, d: Draws) -> tuple[Draws, Draws]:
    num, mean = d.shape[1], d.mean(1)
    half = t_quantile(0.975, num - 1) * d.std(1, ddof=1) / num**0.5
    return mean - half, mean + half


def bootstrap_t(rng: Rng, d: Draws, *, is_symmetric: bool = False) -> tuple[Draws, Draws]:
    num, mean = d.shape[1], d.mean(1)
    error = d.std(1, ddof=1) / num**0.5
    again = d[:, rng.integers(num, size=(600, num))]
    deviations = again.std(2, ddof=1) + 1e-12
    t = (again.mean(2) - mean[:, None]) / (deviations / num**0.5)
    if is_symmetric:
        half = np.quantile(abs(t), 0.95, axis=1) * error
        return mean - half, mean + half
    low, high = np.quantile(t, [0.025, 0.975], axis=1)
    return mean - high * error, mean - low * error


def hall(rng: Rng, d: Draws) -> tuple[Draws, Draws]:
    """Hall 1992: t, transformed so that the skewness of the values leaves it."""
    num, mean = d.shape[1], d.mean(1)
    error = d.std(1, ddof=1) / num**0.5
    skew = ((d - mean[:, None]) ** 3).mean(1) / (d.std(1) + 1e-12) ** 3 / num**0.5

    def inverse(t: float) -> Draws:
        with np.errstate(divide="ignore", invalid="ignore"):
            bent = (np.cbrt(1 + skew * (t - skew / 6)) - 1) * 3 / skew
        return np.where(abs(skew) < 1e-6, t, bent)

    quantile = t_quantile(0.975, num - 1)
    return mean - inverse(quantile) * error, mean - inverse(-quantile) * error


METHODS: dict[str, Callable[[Rng, Draws], tuple[Draws, Draws]]] = {
    "paired t": paired_t,
    "bootstrap-t": bootstrap_t,
    "symmetric bootstrap-t": lambda rng, d: bootstrap_t(rng, d, is_symmetric=True),
    "Hall": hall,
}


def coverage(num_comparisons: int) -> list[dict[str, Any]]:
    rows = []
    for shape, (first, second) in SHAPES.items():
        rng = np.random.default_rng([len(shape), *shape.encode()])
        many = (4, 1_000_000)
        true = float(np.mean(first(rng, many) - second(rng, many)))
        for num in SEEDS:
            d = first(rng, (num_comparisons, num)) - second(rng, (num_comparisons, num))
            row: dict[str, Any] = {"shape": shape, "seeds": num}
            widths = {}
            for name, method in METHODS.items():
                low, high = method(rng, d)
                row[name] = float(np.mean((low <= true) & (true <= high)))
                widths[name] = float(np.median(high - low))
            rows.append(row | {"width": {name: width / widths["paired t"] for name, width in widths.items()}})
    return rows


def print_coverage(rows: list[dict[str, Any]], num_comparisons: int) -> None:
    heads = " | ".join(f"{name}, {num}" for name in METHODS for num in SEEDS)
    print(f"Coverage of 95 % intervals in {num_comparisons} simulated comparisons, by method and seeds\n")
    print(f"| outcomes | {heads} |\n|---|{'---|' * len(METHODS) * len(SEEDS)}")
    for shape in SHAPES:
        found = {row["seeds"]: row for row in rows if row["shape"] == shape}
        cells = [f"{found[num][name]:.1%}" for name in METHODS for num in SEEDS]
        print(f"| {shape} | {' | '.join(cells)} |")
    widths = [
        f"{np.median([row['width'][name] for row in rows if row['seeds'] == num]):.2f}"
        for name in METHODS
        for num in SEEDS
    ]
    print(f"| width, paired t = 1 | {' | '.join(widths)} |")


def train(folder: Path, number: int, jobs: int) -> None:
    arm = Arm(name="letters", recipe=load_recipe(RECIPE), folder=folder)
    for failure in run_missing([arm.run(seed) for seed in range(number)], jobs=jobs):
        print(f"{failure.run.name}: {failure.words}")


def with_itself(folder: Path, per_arm: int) -> dict[str, Any]:
    """Compare the recipe with itself, over and over, on seeds that are used once."""
    runs = []
    for path in sorted(folder.glob("seed-*/config.yaml")):
        try:
            run = read_run(path.parent)
        except ConfigError:  # it is being written
            continue
        runs += [run] if run.is_finished else []
    runs.sort(key=lambda run: run.recipe.seed)
    metric, found = "eval/success", []
    for start in range(0, len(runs) - 2 * per_arm + 1, 2 * per_arm)[:_COMPARISONS]:
        curves = [
            replace(curve_of(run, metric=metric, recipe="AB"[place // per_arm]), seed=place % per_arm)
            for place, run in enumerate(runs[start : start + 2 * per_arm])
        ]
        found.append(compare(curves, metric=metric).differences[0])
    finals = [curve_of(run, metric=metric, recipe="").values for run in runs]
    last = [values[max(values)] for values in finals]
    return {
        "runs": len(runs),
        "comparisons": len(found),
        "seeds": per_arm,
        "called different": sum(difference.differs for difference in found),
        "area apart": sum(d.area is not None and d.area.p is not None and d.area.p < 0.05 for d in found),
        "final": {
            "mean": float(np.mean(last)),
            "sd": float(np.std(last, ddof=1)),
            "least": min(last),
            "most": max(last),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--runs", type=Path, help="folder of runs of benchmarks/letters.yaml")
    parser.add_argument("--train", type=int, default=0, metavar="N", help="train what is missing of seeds 0 to N - 1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--per-arm", type=int, nargs="+", default=[3])
    options = parser.parse_args()
    rows = coverage(options.comparisons)
    print_coverage(rows, options.comparisons)
    result: dict[str, Any] = {"coverage": rows}
    if options.runs is not None:
        if options.train:
            train(options.runs, options.train, options.jobs)
        result["with itself"] = [with_itself(options.runs, per_arm) for per_arm in options.per_arm]
        for each in result["with itself"]:
            print(f"\nThe recipe with itself: {json.dumps(each)}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
