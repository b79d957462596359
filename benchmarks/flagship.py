"""The flagship: a real chat model learns to find treasures in mazes (`examples/treasure.yaml`), by several arms.

    python -m benchmarks.flagship run --out FILE [--seeds 0 1 2] [--arms ...] [--jobs 1] [--runs FOLDER]
    python -m benchmarks.flagship tell --out FILE [--plot FILE.svg]

An arm has the recipe's fields but for those of ARMS. COMPARED are each ratio with each credit scheme, at the recipe's learning
rate, which is tuned for none of them apart; their runs of one seed have the same warm-up and the same first episodes. With
one job a run has all cores of the machine; with more, each has one thread.

Results are appended to FILE as JSON lines with the fields of the recipe that a run resolved; no run that is in it is made
again, and one that was killed goes on from its last checkpoint, so that its times are those of the rest. Run folders are kept
in `--runs`.

`tell` prints a table of the arms, the paired differences by seed and the recipe's fields, and draws the arm of the recipe: a
curve for each seed. `area` is the mean of held-out success over the evaluations after training began. p is two-sided, of an
exact permutation of signs; with n pairs it is at least 2 / 2^n.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from agentrl.report.folder import RunFolder
from agentrl.report.statistics import holm
from benchmarks.cells import sign_flip_p
from benchmarks.evidence import Result, area, at_the_end, figures, mean_and_error
from benchmarks.result_lines import ROOT, append_line, fields_block, read_lines
from examples.treasure import DIRECTIONS, Treasure

RECIPE = "examples/treasure.yaml"
RATIOS = {
    "grpo": "--loss.algorithm grpo",
    "gspo_token": "--loss.algorithm gspo_token --loss.clip_by_length 8000",
}
"""`gspo_token` has the paper's range at 8,000 tokens, wider for the few that an episode has here."""
CREDITS = {
    "uniform": "--credit.scheme uniform",
    "action_values": "--credit.scheme action_values --credit.gamma 1 --credit.lam 0.5",
}
COMPARED = {f"{ratio}/{credit}": f"{RATIOS[ratio]} {CREDITS[credit]}" for ratio, credit in product(RATIOS, CREDITS)}
OWN = next(iter(COMPARED))
"""The arm of the recipe."""
ARMS = COMPARED | {
    "hybrid": "--loss gspo_hybrid",
    "adapters": "--model.lora.rank 16 --train.learning_rate 2e-4 --warmup.learning_rate 2e-4",
    "partial": "--rollout.mode partial --rollout.max_staleness 4",
    "long": "--env.id benchmarks.flagship:LongAnswers --warmup.steps 0 --rollout.cut_off act --rollout.max_turn_tokens 128 "
    "--rollout.max_episode_tokens 896 --rollout.max_context_tokens 1536 --rollout.num_groups 2 --rollout.dynamic_sampling 0 "
    "--train.steps 5 --train.max_tokens_per_micro_batch 4096 --evaluation.num_tasks 32",
}
"""Options of each arm."""
MIN_PAIRS = 5
"""Least number of pairs of which a p is told."""


class LongAnswers(Treasure):
    """The same mazes for answers of many words: the last direction that one names is taken, so that no warm-up is needed."""

    def answer(self, text: str) -> str:
        said = re.findall("|".join(DIRECTIONS), text.lower())
        return super().answer(said[-1] if said else "")


class Job(NamedTuple):
    """One run."""

    arm: str
    seed: int


def train(job: Job, out: Path, runs: Path, *, num_threads: int, more: Sequence[str] = ()) -> None:
    """Make one run and append its result; what a killed one has done, up to its last checkpoint, is not done again."""
    folder = runs / f"{job.arm.replace('/', '-')}-{job.seed}"
    options = [*ARMS[job.arm].split(), *more, "--seed", str(job.seed), "--run_dir", str(folder)]
    what = [str(folder)] if folder.exists() else [RECIPE, *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "train", "--quiet", *what],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
    )
    begin = time.perf_counter()
    _, status, usage = os.wait4(process.pid, 0)  # for its own processor time
    if status:
        raise SystemExit(f"{job.arm}, seed {job.seed}: status {status}; run the same command to go on")
    times = {"seconds": round(time.perf_counter() - begin, 1), "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1)}
    result = job._asdict() | {"threads": num_threads} | times | read_run(folder)
    append_line(out, result)
    print(told(result), flush=True)


def read_run(folder: Path) -> Result:
    """Return what a finished run came to, and its recipe."""
    run = RunFolder.open(folder)
    rows, recipe = run.metrics(), run.config()
    kept = ("env", "model", "warmup", "rollout", "credit", "loss", "train", "evaluation")
    return {
        "seconds_a_step": [round(row["time/step_s"], 1) for row in rows if row["step"] > 0],
        **figures(rows),
        "episodes": [int(row["eval/episodes"]) for row in rows if "eval/episodes" in row],
        "recipe": {section: recipe[section] for section in kept},
    }


def told(result: Result) -> str:
    curve = " ".join(f"{success:.2f}" for success in result["curve"])
    return f"{result['arm']:24} seed {result['seed']} {curve} ({result['seconds'] / 60:.1f} min)"


def read_results(out: Path) -> dict[Job, Result]:
    return {Job(**{name: line[name] for name in Job._fields}): line for line in read_lines(out)}


def run(out: Path, jobs: Sequence[Job], *, num_jobs: int, runs: Path, more: Sequence[str]) -> None:
    known = read_results(out)
    num_threads = 1 if num_jobs > 1 else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_jobs) as pool:
        futures = [
            pool.submit(train, job, out, runs, num_threads=num_threads, more=more) for job in jobs if job not in known
        ]
    for future in futures:
        future.result()


def by_arm(known: dict[Job, Result]) -> dict[str, dict[int, Result]]:
    """Return the results of each arm by seed."""
    return {arm: {job.seed: result for job, result in sorted(known.items()) if job.arm == arm} for arm in ARMS}


def tell(known: dict[Job, Result]) -> None:
    arms = {arm: results for arm, results in by_arm(known).items() if results}
    print("| arm | seeds | start | end, each seed | end | area | entropy at the end | seconds a step, median |")
    print("|---|---|---|---|---|---|---|---|")
    for arm, results in arms.items():
        found = list(results.values())
        steps = statistics.median(seconds for result in found for seconds in result["seconds_a_step"])
        cells = [
            arm,
            ", ".join(map(str, results)),
            f"{statistics.fmean(result['curve'][0] for result in found):.3f}",
            " ".join(f"{at_the_end(result):.3f}" for result in found),
            mean_and_error(list(map(at_the_end, found))),
            mean_and_error(list(map(area, found))),
            f"{statistics.fmean(result['steps']['entropy'][-1] for result in found):.2f}",
            f"{steps:.0f}",
        ]
        print(f"| {' | '.join(cells)} |")
    print()
    gained = {name: by_seed(arms, pairs) for name, pairs in contrasts().items()}
    effects = [sign_flip_p(list(by.values())) for by in list(gained.values())[:2] if len(by) >= MIN_PAIRS]
    adjusted = dict(zip(gained, holm(effects), strict=False))
    for name, by in gained.items():
        if not by:
            continue
        values = list(by.values())
        p = f", p {sign_flip_p(values):.2g}" if len(values) >= MIN_PAIRS else ""
        p += f", by Holm {adjusted[name]:.2g}" if name in adjusted else ""
        each = " ".join(f"{value:+.3f}" for value in values)
        print(f"- {name}, area, {len(values)} pairs: {mean_and_error(values)} ({each}){p}")
    print(f"\n{fields_block(RECIPE)}")


def contrasts() -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of arms of each contrast: the two main effects, and each arm less the recipe's."""
    (ratio, other_ratio), (credit, other_credit) = RATIOS, CREDITS
    effects = {
        f"{other_ratio} less {ratio}": [(f"{other_ratio}/{each}", f"{ratio}/{each}") for each in CREDITS],
        f"{other_credit} less {credit}": [(f"{each}/{other_credit}", f"{each}/{credit}") for each in RATIOS],
    }
    return effects | {f"{arm} less {OWN}": [(arm, OWN)] for arm in COMPARED if arm != OWN}


def by_seed(arms: dict[str, dict[int, Result]], pairs: Sequence[tuple[str, str]]) -> dict[int, float]:
    """Return the difference in area by seed, the mean over pairs of arms that have all been run with it."""
    both = [(arms.get(ours, {}), arms.get(others, {})) for ours, others in pairs]
    seeds = sorted(set.intersection(*(set(runs) for pair in both for runs in pair)))
    return {seed: statistics.fmean(area(ours[seed]) - area(others[seed]) for ours, others in both) for seed in seeds}


def plot(known: dict[Job, Result], path: Path) -> None:
    """Draw held-out success over steps of the recipe's arm: each seed, and their mean."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "agentrl", "font.size": 10}
    results = by_arm(known)[OWN]
    at = next(iter(results.values()))["at"]
    curves = [result["curve"] for result in results.values()]
    mean = [100 * statistics.fmean(values) for values in zip(*curves, strict=True)]
    figure, axis = plt.subplots(figsize=(7.2, 3.4))
    for seed, result in results.items():
        axis.plot(at, [100 * success for success in result["curve"]], color="C0", alpha=0.4, label=f"seed {seed}")
    axis.plot(at, mean, color="C0", linewidth=2.5, marker="o", label="mean")
    axis.axhline(mean[0], color="0.5", linestyle="--", linewidth=1)
    axis.annotate(
        f"after the demonstrations: {mean[0]:.0f} %",
        (at[-1], mean[0]),
        ha="right",
        va="bottom",
        color="0.35",
        xytext=(0, 3),
        textcoords="offset points",
    )
    axis.annotate(
        f"{mean[-1]:.0f} %", (at[-1], mean[-1]), ha="left", va="center", xytext=(8, 0), textcoords="offset points"
    )
    axis.set(
        xlabel="training step",
        ylabel="treasures found in other mazes, %",
        ylim=(0, 100),
        xlim=(0, at[-1] * 1.08),
        xticks=at,
    )
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runs.add_argument("--arms", nargs="+", choices=ARMS, default=list(COMPARED))
    runs.add_argument("--jobs", type=int, default=1, help="runs at once")
    runs.add_argument("--runs", type=Path, default=ROOT / "runs" / "flagship", help="where run folders are kept")
    tells = commands.add_parser("tell")
    tells.add_argument("--out", type=Path, required=True, help="results of `run`")
    tells.add_argument("--plot", type=Path, help="draw the curves")
    options, more = parser.parse_known_args()
    if options.command == "tell":
        known = read_results(options.out)
        tell(known)
        if options.plot:
            plot(known, options.plot)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    jobs = [Job(arm, seed) for seed, arm in product(options.seeds, options.arms)]
    run(options.out, jobs, num_jobs=options.jobs, runs=options.runs, more=more)


if __name__ == "__main__":
    main()
