"""Ratios of GSPO, of GRPO and none, each with three credit schemes under one bound, on `key_door` and `corridor`.

    python -m benchmarks.cells run --out FILE [--jobs 2] [--pause-file FILE] [--parts ...]
    python -m benchmarks.cells tell --out FILE [--plot FILE.png]

For each environment and seed one policy is warmed up on poor demonstrations (`SETTINGS` of `benchmarks/evidence.py`); every
cell trains from that checkpoint, with the same first episodes, `train.target_kl: .02` and the same settings but for `loss:`,
`credit:` and the learning rate.

`tune` trains at each of `RATES` on `TUNING_SEEDS`, and at half the lowest and twice the highest of them until the rate of the
largest area lies between two others; `final` trains at that rate on `SEEDS`. `by_length` does both for the range by length;
`stale` for the hybrid, then trains `async` at the rates of fresh rollouts. `area` is the mean of held-out success over the
evaluations after training began.

Results are appended to FILE as JSON lines with the resolved fields of the recipe; no run that is in it is made again.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from benchmarks import evidence
from benchmarks.evidence import Result, area, figures, train, warm_up
from benchmarks.result_lines import append_line, read_lines

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
    "action values": {"scheme": "ecpo", "gamma": 0.8, "lam": 0.5},
}
"""The section `credit:`."""
MAIN_RATIOS = ("gspo", "grpo", "s_u = 1")


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
    result = job._asdict() | times | {"staleness": round(staleness, 3)} | figures(rows) | resolved(recipe)
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


def tried_rates(known: Results, cell: Job) -> dict[float, float]:
    """Return the mean area of each rate that was tried on all tuning seeds, from the lowest rate on."""
    rates = sorted({job.rate for job in known if job == cell._replace(rate=job.rate, seed=job.seed)})
    tuning = {rate: [cell._replace(rate=rate, seed=seed) for seed in TUNING_SEEDS] for rate in rates}
    return {
        rate: statistics.fmean(area(known[job]) for job in jobs)
        for rate, jobs in tuning.items()
        if all(job in known for job in jobs)
    }


def next_rates(known: Results, cell: Job) -> list[float]:
    """Return the rates that are still to be tried: none if the best one lies between two others."""
    means = tried_rates(known, cell)
    if missing := [rate for rate in RATES if rate not in means]:
        return missing
    best = max(means, key=lambda rate: means[rate])
    return [best / 2] * (best == min(means)) + [best * 2] * (best == max(means))


def best_rate(known: Results, cell: Job) -> float | None:
    """Return the rate of the largest area on the tuning seeds; None before that is settled."""
    if next_rates(known, cell):
        return None
    means = tried_rates(known, cell)
    return max(means, key=lambda rate: means[rate])


def cells(part: str) -> list[Job]:
    """Return the cells of a part, each as a job without a rate and a seed."""
    match part:
        case "main":
            grid = product(ENVS, MAIN_RATIOS, CREDITS)
        case "by_length":
            grid = product(ENVS, ["gspo, by length"], ["uniform"])
        case _:
            grid = product(["key_door"], ["hybrid"], ["turn_return"])
    return [Job(*cell, rate=0.0, seed=0) for cell in grid]


def tuning(known: Results, part: str) -> Iterator[Job]:
    for seed, cell in product(TUNING_SEEDS, cells(part)):
        yield from (cell._replace(rate=rate, seed=seed) for rate in next_rates(known, cell))


def final(known: Results, part: str, seeds: Sequence[int] = SEEDS) -> Iterator[Job]:
    for seed, cell in product(seeds, cells(part)):
        if (rate := best_rate(known, cell)) is not None:
            yield cell._replace(rate=rate, seed=seed)


def stale(known: Results) -> Iterator[Job]:
    """Yield the runs with stale rollouts, at the rates of fresh ones."""
    for seed, age, ratio in product(SEEDS, AGES, ("gspo", "hybrid")):
        cell = Job("key_door", ratio, "turn_return", 0.0, 0)
        if (rate := best_rate(known, cell)) is not None:
            yield cell._replace(rate=rate, seed=seed, age=age)


def wanted(known: Results, parts: Sequence[str]) -> Iterator[Job]:
    """Yield all runs that can be named by now, first those that matter most."""
    for part in parts:
        yield from tuning(known, part)
        yield from final(known, part)
        if part == "stale":
            yield from stale(known)


def _next_job(known: Results, parts: Sequence[str], taken: Sequence[Job], warm: Path) -> Job | None:
    """Return the next run, rather one that does not wait for a warm-up under way."""
    left = [job for job in wanted(known, parts) if job not in known and job not in taken]
    waiting = {(job.env, job.seed) for job in taken if not _warm_folder(job, warm).exists()}
    return next((job for job in left if (job.env, job.seed) not in waiting), next(iter(left), None))


def run(out: Path, *, parts: Sequence[str], num_jobs: int, pause_file: Path | None) -> int:
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
            while len(running) < num_jobs and (job := _next_job(known, parts, [*failed, *running.values()], warm)):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    runs.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    runs.add_argument("--pause-file", type=Path, help="no run begins while this file exists")
    parts = ["main", "by_length", "stale"]
    runs.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.exit(run(options.out, parts=options.parts, num_jobs=options.jobs, pause_file=options.pause_file) > 0)


if __name__ == "__main__":
    main()
