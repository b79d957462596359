"""Ratios of GSPO, of GRPO and none, each with three credit schemes under one bound, on `key_door` and `corridor`.

    python -m benchmarks.cells run --out FILE [--jobs 2] [--pause-file FILE] [--parts ...]
    python -m benchmarks.cells tell --out FILE [--plot FILE.png]

For each environment and seed one policy is warmed up on poor demonstrations (`SETTINGS` of `benchmarks/evidence.py`); every
cell trains from that checkpoint, with the same first episodes, `train.target_kl: .02` and the same settings but for `loss:`,
`credit:` and the learning rate.

A cell's rate is searched on `TUNING_SEEDS`, from `RATES` on, until half of the best and twice the best have been tried too; a
rate that is behind by `MARGIN` of the area is not tried on further seeds. The cell is then trained at its best rate on `SEEDS`.
Part `main` is the cells; `by_length` the range by length at the rates of `gspo`; `discount` another discount on `key_door`;
`stale` the hybrid, and `async` at the rates of fresh rollouts. `area` is the mean of held-out success over the evaluations
after training began.

`tell` prints a table of the cells, the tuned rates, and differences. A main effect is a paired difference averaged over the
levels of the other factor; its pairs are those of environment and seed. p is two-sided, of an exact permutation of signs, and
adjusted for the four contrasts of the two factors (Holm). Steps are those until .8 of the largest mean success at the end
of the environment, on straight lines between evaluations; runs that never come there are censored: the median is of all
runs, and the log-rank test is stratified by environment and level of the other factor.

Results are appended to FILE as JSON lines with the resolved fields of the recipe; no run that is in it is made again.
"""

import argparse
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock

from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.statistics import holm
from benchmarks import evidence
from benchmarks.evidence import (
    Result,
    area,
    at_the_end,
    figures,
    has_collapsed,
    mean_and_error,
    steps_to,
    train,
    warm_up,
)
from benchmarks.result_lines import append_line, fields_block, read_lines

ENVS = ("key_door", "corridor")
RATES = (3e-4, 6e-4, 1.2e-3)
TUNING_SEEDS, SEEDS = range(3), range(100, 108)
AGES = (1, 4)
RATIOS: dict[str, dict[str, Any]] = {
    "gspo": {"unit": "trajectory", "trust": "fixed", "clip_low": 3e-4, "clip_high": 4e-4},
    "grpo": {"unit": "token", "trust": "fixed", "clip_low": 0.2, "clip_high": 0.27},
    "s_u = 1": {"unit": "token", "trust": "none"},
    "gspo, by length": {
        "unit": "trajectory",
        "trust": "fixed",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "clip_by_length": 8000,
    },
    "hybrid": {"unit": "trajectory", "trust": "token", "clip_low": 0.2, "clip_high": 0.27},
}
"""Fields of `loss:`; `aggregation: trajectory-mean` beside them."""
CREDITS: dict[str, dict[str, Any]] = {
    "uniform": {"scheme": "uniform", "normalize": "std"},
    "turn_return": {
        "scheme": "turn_return",
        "baseline": "turn",
        "leave_one_out": False,
        "normalize": "std",
        "gamma": 0.8,
    },
    "action_values": {"scheme": "action_values", "gamma": 0.8, "lam": 0.5},
    "action_values, gamma 1": {"scheme": "action_values", "gamma": 1.0, "lam": 0.5},
}
"""The section `credit:`."""
MARGIN = 0.1
MAIN_RATIOS = ("gspo", "grpo", "s_u = 1")
MAIN_CREDITS = ("uniform", "turn_return", "action_values")


class Job(NamedTuple):
    """One run."""

    env: str
    ratio: str
    credit: str
    rate: float
    seed: int
    age: int = 0
    """`rollout.max_staleness` of `async`; 0: fresh rollouts."""


def make_recipe(job: Job, run_dir: Path) -> Recipe:
    recipe = evidence.make_recipe(_evidence_job(job), run_dir=run_dir, model=None).model_dump()
    recipe["loss"] = {**RATIOS[job.ratio], "aggregation": "trajectory-mean"}
    recipe["credit"] = CREDITS[job.credit]
    if job.age:
        rollout = recipe["rollout"]
        live = rollout["num_groups"] * rollout["group_size"] * (job.age + 1)
        recipe["rollout"] = {**rollout, "mode": "async", "max_staleness": job.age, "max_live_episodes": live}
    return Recipe.model_validate(recipe)


def _evidence_job(job: Job) -> evidence.Job:
    return evidence.Job(job.env, "grpo", "uniform", job.rate, job.seed, "kl .02")


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that a cell sets, with the defaults beside them."""
    sections = recipe.model_dump(mode="json", include={"loss", "credit", "train", "rollout"})
    sections["loss"].pop("algorithm", None)  # every field that it sets is there
    return sections


def _warm_folder(job: Job, folder: Path) -> Path:
    return folder / f"{job.env}-{job.seed}"


def warmed(job: Job, folder: Path) -> Path:
    """Return the run folder of the warmed-up policy of an environment and seed; make it if it is not there."""
    kept = _warm_folder(job, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                warm_up(_evidence_job(job), Path(temporary) / "warm", model=None)
                (Path(temporary) / "warm").rename(kept)
    return kept


def train_one(job: Job, out: Path, warm: Path) -> str:
    """Make one run from its warmed-up policy, and append its result; return a line about it."""
    torch.set_num_threads(1)
    kept = warmed(job, warm)
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary) / "run"
        shutil.copytree(kept, run_dir)
        recipe = make_recipe(job, run_dir)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        rows = train(recipe, RunFolder.open(run_dir))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    times = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
    staleness = statistics.fmean(row.get("staleness/mean", 0.0) for row in rows if row["step"] > 0)
    more = {"staleness": round(staleness, 3), "resolved": resolved(recipe)}
    result = job._asdict() | times | figures(rows) | more
    append_line(out, result)
    curve = " ".join(f"{success:.2f}" for success in result["curve"])
    age = f"age {job.age} " if job.age else ""
    return (
        f"{job.env:9} {job.ratio:15} {job.credit:13} {job.rate:<8g} seed {job.seed:3} {age}{curve} "
        f"({seconds:.0f} s, {cpu_seconds:.0f} of the processor)"
    )


Results = dict[Job, Result]


def read_results(out: Path) -> Results:
    return {Job(**{name: line[name] for name in Job._fields}): line for line in read_lines(out)}


class Tuning(NamedTuple):
    """State of the search for a cell's learning rate."""

    missing: list[Job]
    """Runs to be made next; none if the rate is settled."""
    best: float
    """Rate of the largest mean area."""
    means: dict[float, tuple[float, int]]
    """Mean area of each rate that was tried, and over how many seeds."""


def tune(known: Results, cell: Job) -> Tuning:
    """Search the rate of the largest area: further out while the best is at an edge, on fewer rates with each seed."""
    first = TUNING_SEEDS[0]
    tried = {job.rate for job in known if job == cell._replace(rate=job.rate, seed=first)}
    rates, best = sorted({*RATES, *tried}), 0.0
    means: dict[float, tuple[float, int]] = {}
    for count, seed in enumerate(TUNING_SEEDS, 1):
        jobs = [cell._replace(rate=rate, seed=seed) for rate in rates]
        if missing := [job for job in jobs if job not in known]:
            return Tuning(missing, best, means)
        seeds = TUNING_SEEDS[:count]
        areas = {
            rate: statistics.fmean(area(known[cell._replace(rate=rate, seed=seed)]) for seed in seeds) for rate in rates
        }
        means |= {rate: (mean, count) for rate, mean in areas.items()}
        best = max(areas, key=lambda rate: areas[rate])
        if beyond := [rate for rate in (best / 2, best * 2) if rate not in means]:
            return Tuning([cell._replace(rate=rate, seed=first) for rate in beyond], best, means)
        rates = [rate for rate in rates if areas[rate] > areas[best] - MARGIN]
        if rates == [best]:
            break
    return Tuning([], best, means)


def best_rate(known: Results, cell: Job) -> float | None:
    """Return the rate at which a cell is trained; None before that is settled. The range by length has that of `gspo`."""
    ratio = "gspo" if cell.ratio == "gspo, by length" else cell.ratio
    tuning = tune(known, cell._replace(ratio=ratio, age=0))
    return None if tuning.missing else tuning.best


def cells(part: str) -> list[Job]:
    """Return the cells of a part, each as a job without a rate and a seed."""
    match part:
        case "main":
            grid = product(ENVS, MAIN_RATIOS, MAIN_CREDITS)
        case "by_length":
            grid = product(ENVS, ["gspo, by length"], ["uniform"])
        case "discount":
            grid = product(["key_door"], ["gspo", "grpo"], ["action_values, gamma 1"])
        case _:
            grid = product(["key_door"], ["gspo", "hybrid"], ["turn_return"])
    return [Job(*cell, rate=0.0, seed=0) for cell in grid]


def final(known: Results, grid: Sequence[Job], seeds: Sequence[int]) -> Iterator[Job]:
    """Yield the runs of these cells on fresh seeds, as far as their rates are settled."""
    rates = {cell: best_rate(known, cell) for cell in grid}
    for seed, cell in product(seeds, grid):
        if (rate := rates[cell]) is not None:
            yield cell._replace(rate=rate, seed=seed)


def wanted(known: Results, parts: Sequence[str], envs: Sequence[str]) -> Iterator[Job]:
    """Yield the runs that can be named by now, first those that matter most."""
    for env, part in sorted(product(envs, parts), key=lambda env_and_part: env_and_part[1] == "stale"):
        grid = [cell for cell in cells(part) if cell.env == env]
        missing = [job for cell in grid if cell.ratio != "gspo, by length" for job in tune(known, cell).missing]
        yield from sorted(missing, key=lambda job: job.seed)
        if part == "main":
            yield from final(known, grid, SEEDS[:4])
            yield from final(known, [cell for cell in grid if cell.credit != "action_values"], SEEDS)
        yield from final(known, grid, SEEDS)
        if part == "stale":
            yield from final(known, [cell._replace(age=age) for age, cell in product(AGES, grid)], SEEDS)


def _next_job(known: Results, wanted: Iterator[Job], taken: Sequence[Job], warm: Path) -> Job | None:
    """Return the next run, rather one that does not wait for a warm-up under way."""
    left = [job for job in wanted if job not in known and job not in taken]
    waiting = {(job.env, job.seed) for job in taken if not _warm_folder(job, warm).exists()}
    return next((job for job in left if (job.env, job.seed) not in waiting), next(iter(left), None))


def run(out: Path, *, parts: Sequence[str], envs: Sequence[str], num_jobs: int, pause_file: Path | None) -> int:
    """Make the runs that are missing; return how many failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    running: dict[Future[str], Job] = {}
    failed: set[Job] = set()
    warm = out.with_suffix(".warm")
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            while pause_file is not None and pause_file.exists():
                time.sleep(3)
            known = read_results(out)
            while len(running) < num_jobs and (
                job := _next_job(known, wanted(known, parts, envs), [*failed, *running.values()], warm)
            ):
                running[pool.submit(train_one, job, out, warm)] = job
            if not running:
                return len(failed)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                if (error := future.exception()) is not None:
                    failed.add(job)
                    print(f"FAILED {job}: {error!r}", flush=True)
                else:
                    print(time.strftime("%H:%M:%S"), len(known), future.result(), flush=True)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p value of a mean of paired differences, by all of their signs.

        p = share of the 2^n choices of signs for which |mean of sign * difference| >= |mean of difference|

    Source: Fisher 1935, The Design of Experiments, section 21.
    """
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return float(np.mean(np.abs(sums) >= abs(math.fsum(differences)) - 1e-12))


def log_rank_p(strata: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the two-sided p value of a stratified log-rank test between two arms.

        z = sum of (observed - expected events of the first arm) / sqrt(sum of hypergeometric variances)

    Source: Mantel 1966; Peto and Peto 1972.

    Args:
        strata: times of the two arms of each stratum; infinity if the event had not come when all runs ended.
    """
    excess = variance = 0.0
    for ours, others in strata:
        for step in {each for each in (*ours, *others) if each < math.inf}:
            at_risk = [sum(each >= step for each in arm) for arm in (ours, others)]
            events = [sum(each == step for each in arm) for arm in (ours, others)]
            num, share = sum(at_risk), at_risk[0] / sum(at_risk)
            excess += events[0] - sum(events) * share
            variance += sum(events) * share * (1 - share) * (num - sum(events)) / max(1, num - 1)
    return math.erfc(abs(excess) / math.sqrt(2 * variance)) if variance else 1.0


CONTRASTS: tuple[tuple[str, str, str], ...] = (
    ("ratio", "gspo", "grpo"),
    ("ratio", "s_u = 1", "grpo"),
    ("credit", "turn_return", "uniform"),
    ("credit", "action_values", "uniform"),
)
"""Factor, level, and the level that it is compared with."""


def event_times(known: Results, cell: Job, limits: dict[str, float]) -> list[float]:
    """Return the steps until the success of the environment; infinity for a run that never has it."""
    limit = limits[cell.env]
    results = at_its_rate(known, cell).values()
    return [steps_to(result, limit) if max(result["curve"]) >= limit else math.inf for result in results]


def at_its_rate(known: Results, cell: Job) -> dict[int, Result]:
    """Return the results of a cell at its tuned rate, by seed."""
    rate = best_rate(known, cell)
    jobs = [cell._replace(rate=rate or 0.0, seed=seed) for seed in SEEDS]
    return {job.seed: known[job] for job in jobs if job in known}


def thresholds(known: Results) -> dict[str, float]:
    """Return for each environment .8 of the largest mean success at the end of its main cells."""
    found = [(cell.env, results.values()) for cell in cells("main") if (results := at_its_rate(known, cell))]
    ends = {env: [statistics.fmean(map(at_the_end, results)) for of, results in found if of == env] for env in ENVS}
    return {env: 0.8 * max(means, default=1.0) for env, means in ends.items()}


def tell(known: Results) -> None:
    limits = thresholds(known)
    print(f"steps until {', '.join(f'{limit:.3f} ({env})' for env, limit in limits.items())}\n")
    columns = "task|ratio|credit|rate|area|final|steps, median|reached|tokens clipped, %|updates shortened, %|collapsed"
    print(f"| {' | '.join(columns.split('|'))} |\n{'|---' * len(columns.split('|'))}|")
    with_ages = [cell._replace(age=age) for cell, age in product(cells("stale"), (0, *AGES))]
    for cell in dict.fromkeys([*cells("main"), *cells("by_length"), *cells("discount"), *with_ages]):
        if results := list(at_its_rate(known, cell).values()):
            print(f"| {' | '.join(row(cell, results, event_times(known, cell, limits)))} |")
    print("\nRates that were tried, the mean area of each, and over how many seeds:\n")
    for cell in dict.fromkeys([*cells("main"), *cells("discount"), *cells("stale")]):
        missing, best, means = tune(known, cell)
        rates = [
            f"{'**' * (rate == best)}{rate:g}{'**' * (rate == best)} {mean:.3f} ({count})"
            for rate, (mean, count) in sorted(means.items())
        ]
        print(f"- {cell.env}, {cell.ratio}, {cell.credit}: {', '.join(rates)}{', not settled' if missing else ''}")
    print("\nMain effects:\n")
    tell_effects(known, limits)
    print("\nBeside them, p without adjustment:\n")
    tell_others(known)
    print()
    tell_fields()
    seconds, cpu = ([result[name] for result in known.values()] for name in ("seconds", "cpu_seconds"))
    print(
        f"\n{len(known)} runs, {sum(cpu) / 3600:.1f} hours of processor time; one takes {statistics.median(cpu):.0f} s of it"
        f" and {statistics.median(seconds):.0f} s by the clock in the median"
    )


def tell_fields() -> None:
    """Print the fields that the cells resolve to today, for the page to record."""
    for loss in RATIOS.values():
        print(fields_block({"loss": {**loss, "aggregation": "trajectory-mean"}}, sections=["loss"]))
    for credit in CREDITS.values():
        print(fields_block({"credit": credit}, sections=["credit"]))
    for env in ENVS:
        name, changes = evidence.SETTINGS[env]
        options = [*evidence.COMMON.split(), *changes.split(), "--train.target_kl", "0.02"]
        print(fields_block(f"examples/{name}.yaml", options, sections=["train"]))


def row(cell: Job, results: Sequence[Result], times: Sequence[float]) -> list[str]:
    """Return a row of the table of cells."""
    median = statistics.median(times)
    clipped, shortened = (
        100 * statistics.fmean(statistics.fmean(result["steps"][name]) for result in results)
        for name in ("clipped", "shortened")
    )
    ratio = f"{cell.ratio}, async {cell.age}" if cell.age else cell.ratio
    return [
        *(cell.env, ratio, cell.credit, f"{results[0]['rate']:g}"),
        mean_and_error([area(result) for result in results]),
        mean_and_error([at_the_end(result) for result in results]),
        f"{median:.1f}" if median < math.inf else "-",
        f"{sum(each < math.inf for each in times)} of {len(times)}",
        f"{clipped:.2g}",
        f"{shortened / results[0]['resolved']['train']['num_minibatches']:.2g}",
        f"{sum(map(has_collapsed, results))} of {len(results)}",
    ]


Pair = tuple[Job, Job]


def differences(known: Results, pairs: Sequence[Pair], of: Callable[[Result], float]) -> list[float]:
    """Return the difference within a pair of cells for each environment and seed, averaged over an environment's pairs."""
    found = []
    for env in dict.fromkeys(pair[0].env for pair in pairs):
        arms = [[at_its_rate(known, cell) for cell in pair] for pair in pairs if pair[0].env == env]
        seeds = [seed for seed in SEEDS if all(seed in arm for pair in arms for arm in pair)]
        found += [statistics.fmean(of(ours[seed]) - of(others[seed]) for ours, others in arms) for seed in seeds]
    return found


def pairs_of(factor: str, level: str, base: str, envs: Sequence[str] = ENVS) -> list[Pair]:
    """Return the pairs of main cells that differ in one factor."""
    ours = [cell for cell in cells("main") if getattr(cell, factor) == level and cell.env in envs]
    changed: dict[str, Any] = {factor: base}
    return [(cell, cell._replace(**changed)) for cell in ours]


def tell_effects(known: Results, limits: dict[str, float]) -> None:
    """Print the four contrasts, over both environments and in each."""
    found = {contrast: differences(known, pairs_of(*contrast), area) for contrast in CONTRASTS}
    found = {contrast: areas for contrast, areas in found.items() if areas}
    adjusted = dict(zip(found, holm([sign_flip_p(areas) for areas in found.values()]), strict=True))
    for contrast, areas in found.items():
        factor, level, base = contrast
        pairs = pairs_of(*contrast)
        ends = differences(known, pairs, at_the_end)
        by_env = {env: differences(known, pairs_of(*contrast, [env]), area) for env in ENVS}
        in_each = [f"{env} {mean_and_error(values)}" for env, values in by_env.items() if values]
        strata = [[event_times(known, cell, limits) for cell in pair] for pair in pairs]
        print(
            f"- {factor}, {level} less {base}, {len(areas)} pairs: area {mean_and_error(areas)}, p {sign_flip_p(areas):.2g}, "
            f"by Holm {adjusted[contrast]:.2g} ({', '.join(in_each)}); final {mean_and_error(ends)}, "
            f"p {sign_flip_p(ends):.2g}; steps, log-rank p {log_rank_p(strata):.2g}"
        )


def tell_others(known: Results) -> None:
    """Print the contrasts of the range by length, and of stale rollouts."""
    by_length = [(cell, cell._replace(ratio="gspo")) for cell in cells("by_length")]
    contrasts = {
        "gspo by length less gspo": by_length,
        "gspo by length less grpo": [(cell, cell._replace(ratio="grpo")) for cell, _ in by_length],
    }
    discount = cells("discount")
    for credit in ("action_values", "uniform"):
        contrasts[f"action_values, gamma 1, less {credit}"] = [
            (cell, cell._replace(credit=credit)) for cell in discount
        ]
    contrasts["gspo less grpo with gamma 1"] = [(discount[0], discount[1])]
    gspo, hybrid = cells("stale")
    for age in (0, *AGES):
        pair = (hybrid._replace(age=age), gspo._replace(age=age))
        contrasts[f"hybrid less gspo, {f'async at {age}' if age else 'fresh'}"] = [pair]
    for name, pairs in contrasts.items():
        if areas := differences(known, pairs, area):
            ends = differences(known, pairs, at_the_end)
            print(
                f"- {name}, {len(areas)} pairs: area {mean_and_error(areas)}, p {sign_flip_p(areas):.2g}; final "
                f"{mean_and_error(ends)}, p {sign_flip_p(ends):.2g}"
            )


def plot(known: Results, path: Path) -> None:
    """Draw held-out success over steps, mean and standard error over the seeds: a column for each credit scheme."""
    from matplotlib import pyplot as plt  # only who asks for a plot needs it

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(len(ENVS), len(MAIN_CREDITS), figsize=(10.5, 5.6), sharex=True, sharey="row")
    for (row_of_axes, env), (column, credit) in product(zip(axes, ENVS, strict=True), enumerate(MAIN_CREDITS)):
        axis = row_of_axes[column]
        for number, ratio in enumerate(MAIN_RATIOS):
            results = list(at_its_rate(known, Job(env, ratio, credit, 0.0, 0)).values())
            if not results:
                continue
            curves = np.array([result["curve"] for result in results])
            means, errors = curves.mean(0), curves.std(0, ddof=1) / math.sqrt(len(curves))
            axis.plot(results[0]["at"], means, color=f"C{number}", label=ratio)
            axis.fill_between(results[0]["at"], means - errors, means + errors, color=f"C{number}", alpha=0.15)
        axis.set_title(f"{env}, {credit}", fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("held-out success")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(MAIN_RATIOS), fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    runs.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    runs.add_argument("--pause-file", type=Path, help="no run begins while this file exists")
    parts = ["main", "by_length", "discount", "stale"]
    runs.add_argument("--parts", nargs="+", choices=parts, default=parts)
    runs.add_argument("--envs", nargs="+", choices=ENVS, default=ENVS)
    tells = commands.add_parser("tell")
    tells.add_argument("--out", type=Path, required=True, help="results of `run`")
    tells.add_argument("--plot", type=Path, help="draw the curves")
    options = parser.parse_args()
    if options.command == "tell":
        known = read_results(options.out)
        tell(known)
        if options.plot:
            plot(known, options.plot)
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    failures = run(
        options.out, parts=options.parts, envs=options.envs, num_jobs=options.jobs, pause_file=options.pause_file
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
