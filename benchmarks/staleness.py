"""What stale rollouts cost in learning: `partial` and `async` with 1 to 64 versions between sampling and training.

    python -m benchmarks.staleness run --out FILE [--jobs 2] [--modes sync partial async] [--ages 1 4 16 64] [--seeds ...]
    python -m benchmarks.staleness tell --out FILE [--seeds ...]

Each seed has one warmed-up policy (the calculator of `benchmarks/evidence.py`), from which each way of sampling trains
for the same `--steps` of 48 episodes. `max_staleness: S` starts groups S steps ahead, and `max_live_episodes` lets all of
them be played at once, so that the rollouts of step t were begun S updates before: the first S steps learn from the policy
that the run began with. `recomputed` weighs tokens by exp(mean difference from the sampler), cut at 2; `sampled` compares
with the weights that sampled.

`area` is the mean of held-out success over the evaluations after training began; `of sync` is its ratio to sync's under
the same seed (of the same `--rate` and `--train`, where the file has it), mean ± standard error; `of late sync` that to sync's
area, had it begun `max_staleness` steps later: what is lost beyond the delay. A run has collapsed where its last success is
below half of its best, and that was above .15.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from agentrl.distributed.checkpoints import checkpoints
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from benchmarks.evidence import Job, area, figures, has_collapsed, make_recipe, mean_and_error, train
from benchmarks.result_lines import append_line, read_lines

EPISODES = 48
ANCHORS: dict[str, dict[str, Any]] = {
    "recomputed": {"anchor": "recomputed", "mismatch": "truncate"},
    "sampled": {"anchor": "sampled"},
}


class Way(NamedTuple):
    """How rollouts are sampled, and what tokens are compared with."""

    mode: str
    age: int
    anchor: str


class Setting(NamedTuple):
    """What a row of a table is of."""

    rate: float
    train: str
    way: Way


def recipe_of(job: Job, way: Way | None, run_dir: Path, *, steps: int) -> Recipe:
    """Return the recipe of a run; None: of the warm-up alone."""
    more = ["--train.steps", str(steps if way else 1), "--evaluation.every", str(steps // 12)]
    recipe = make_recipe(job, run_dir=run_dir, model=None, more=more).model_dump()
    if way and way.mode != "sync":
        live = EPISODES * (way.age + 1)
        recipe["rollout"] |= {"mode": way.mode, "max_staleness": way.age, "max_live_episodes": live}
        recipe["loss"] |= ANCHORS[way.anchor] | ({"kept_versions": way.age} if way.anchor == "sampled" else {})
    return Recipe.model_validate(recipe)


def train_all(job: Job, ways: Sequence[Way], out: Path, num_steps: int) -> None:
    """Warm up once, then train each way from there; append what came of it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        warm, run_dir = Path(temporary) / "warm", Path(temporary) / "run"
        train(recipe_of(job, None, warm, steps=num_steps), None)
        _, after_a_step = checkpoints(warm / "checkpoints")
        shutil.rmtree(after_a_step)
        for way in ways:
            shutil.copytree(warm, run_dir)
            rows = train(recipe_of(job, way, run_dir, steps=num_steps), RunFolder.open(run_dir))
            shutil.rmtree(run_dir)
            steps = [row for row in rows if row["step"] > 0]
            means = {
                name: round(statistics.fmean(row.get(name, 0.0) for row in steps), 4)
                for name in ("staleness/mean", "clip/tokens", "ratio/effective_samples", "kl/behavior")
            }
            result = (
                job._asdict() | way._asdict() | means | {"oldest": max(row.get("staleness/max", 0.0) for row in steps)}
            )
            append_line(out, result | figures(rows))
            print(way, job.seed, means, " ".join(f"{success:.2f}" for success in figures(rows)["curve"]), flush=True)


def area_if_late(result: dict[str, Any], steps: int) -> float:
    """Return the area of a run that had begun so many steps later, and waited as it was at first."""
    at = np.array(result["at"])
    return float(np.interp(at - steps, at, result["curve"])[1:].mean())


def tell(out: Path, seeds: Sequence[int] | None) -> None:
    runs: dict[tuple[str, int], dict[Setting, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for result in read_lines(out):
        if seeds is not None and result["seed"] not in seeds:
            continue
        setting = Setting(result["rate"], result["train"], Way(*(result[name] for name in Way._fields)))
        runs[result["ratio"], result["at"][-1]][setting].append(result)
    columns = (
        "rate|train|mode|max_staleness|anchor|runs|seeds|age, mean|oldest|final|area|of sync|of late sync|collapsed"
    )
    for (ratio, steps), found in runs.items():
        print(f"\n{ratio}, {steps} steps\n\n| {' | '.join(columns.split('|'))} |\n{'|---' * 14}|")
        syncs = {setting: results for setting, results in found.items() if setting.way.mode == "sync"}
        for setting, results in sorted(found.items(), key=lambda one: (one[0].way.anchor, one[0].way.age, one[0])):
            # The sync of the same setting; where there is none, of another.
            found_sync = next(iter([*(syncs[s] for s in syncs if s[:2] == setting[:2]), *syncs.values()]), [])
            sync = {result["seed"]: result for result in found_sync}
            both = [(area(result), sync[result["seed"]]) for result in results if result["seed"] in sync]
            ratios = [of / area(reference) for of, reference in both]
            late = [of / area_if_late(reference, setting.way.age) for of, reference in both]
            cells = [
                f"{setting.rate:g}",
                setting.train,
                *map(str, setting.way),
                str(len(results)),
                str(len({result["seed"] for result in results})),
                f"{statistics.fmean(result['staleness/mean'] for result in results):.1f}",
                f"{max(result['oldest'] for result in results):.0f}",
                mean_and_error([result["curve"][-1] for result in results]),
                mean_and_error([area(result) for result in results]),
                *(mean_and_error(each) if each else "-" for each in (ratios, late)),
                f"{sum(map(has_collapsed, results))} of {len(results)}",
            ]
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["run", "tell"])
    parser.add_argument(
        "--out", type=Path, required=True, help="results, one JSON line each; those that it lacks are appended"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--modes", nargs="+", default=["sync", "partial", "async"])
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--anchors", nargs="+", choices=list(ANCHORS), default=list(ANCHORS))
    parser.add_argument("--seeds", type=int, nargs="+", help="to run: 10 to 14; to tell of: all")
    parser.add_argument("--ratio", default="gspo, calibrated")
    parser.add_argument("--train", default="kl .01")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--steps", type=int, default=96)
    options = parser.parse_args()
    if options.part == "tell":
        tell(options.out, options.seeds)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    ways = [Way("sync", 0, "-")] if "sync" in options.modes else []
    stale = [mode for mode in options.modes if mode != "sync"]
    ways += [Way(mode, age, anchor) for age, anchor, mode in product(options.ages, options.anchors, stale)]
    jobs = [
        Job("calculator", options.ratio, "uniform", options.rate, seed, options.train)
        for seed in options.seeds or range(10, 15)
    ]
    results: list[Any] = read_lines(options.out)
    known = {
        (Job(*map(result.get, Job._fields)), Way(*map(result.get, Way._fields)))
        for result in results
        if result["at"][-1] == options.steps
    }
    with ProcessPoolExecutor(
        options.jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        left = [(job, [way for way in ways if (job, way) not in known]) for job in jobs]
        begun = [pool.submit(train_all, job, of_job, options.out, options.steps) for job, of_job in left if of_job]
        for future in as_completed(begun):
            future.result()


if __name__ == "__main__":
    main()
