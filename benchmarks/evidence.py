"""GSPO and GRPO, trust regions and credit, on environments of few and of many turns: what `docs/evidence.md` quotes.

    python -m benchmarks.evidence cures --out FILE [--jobs 2] [--envs ...] [--ratios ...] [--credits ...] [--trains ...]
    python -m benchmarks.evidence tune --out FILE [--jobs 2] [...]
    python -m benchmarks.evidence final --out FILE [--jobs 2] [...]
    python -m benchmarks.evidence tell --out FILE [--plot FILE.png]

For each environment and seed one policy is made and warmed up on poor demonstrations; each ratio with each credit scheme
continues from that checkpoint: the same weights, the same first episodes, the same settings but for `loss:`, `credit:` and the
learning rate. The credit `shuffled X` is the control of X: its advantages on turns at random, at the rate that X has.

`cures` trains at the highest of `--rates`, where runs collapse, with each of the ways of updating of `TRAINS`, on the seeds 20
to 29. `tune` trains at each of them on the seeds 0, 1 and 30 to 39; `final` at the rate whose area (`--by final`: whose
success at the end) is largest on those of them that were tried, for each environment, ratio and credit apart, on the seeds 10
to 19. `area` is the mean of held-out success over the evaluations after training began. A run has collapsed where its last
success is below half of its best, and that was above .15.

Results are appended to FILE as JSON lines, with what each step showed; what is in it under the same settings is not run
again (take another file after a change of the mathematics).

`tell` prints what each part found, and what each rate did: mean ± standard error over seeds; differences are paired by seed,
from `--against-ratio` (GRPO) with the credit of `--against-credit` (`same`: with that of each) that updates as `--against`
says (`cures`: from the same that updates so).
`steps` are those until the success that is .8 of the largest mean at the end, on straight lines between evaluations; a run
that never gets there counts with all of its steps. `of half`: steps less half of those of GRPO.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import yaml

from agentrl.distributed.checkpoints import checkpoints
from agentrl.errors import TrainingError
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder
from agentrl.run import loop
from agentrl.run.build import build
from agentrl.run.checkpoint import CollapsedError, go_back
from benchmarks.paper import new_model
from benchmarks.result_lines import append_line, read_lines

ROOT = Path(__file__).resolve().parents[1]
Result: TypeAlias = dict[str, Any]
"""One line of the results file."""

TUNING_SEEDS, SEEDS, CURE_SEEDS = (0, 1, *range(30, 40)), range(10, 20), range(20, 30)
RATES = (3e-4, 6e-4, 1.2e-3)
COMMON = """
    --train.schedule constant --train.num_minibatches 4 --train.checkpoint_every 1000
    --evaluation.num_tasks 128 --report.rollouts_every 0
"""
_CALCULATOR = """
    --warmup.steps 600 --warmup.learning_rate 2e-3 --warmup.num_demonstrations 3000 --warmup.skill 0.6
    --rollout.num_groups 6 --train.steps 24 --evaluation.every 4
"""
SETTINGS = {
    "key_door": (
        "calculator",
        """
        --env.id key_door --env.options.num_boxes 6 --env.options.num_distractors 8 --env.options.key_reward 0
        --env.options.noise 0.25
        --model.local.hidden_size 64 --model.local.intermediate_size 192
        --warmup.steps 800 --warmup.learning_rate 3e-3 --warmup.num_demonstrations 3000 --warmup.skill 0.35
        --rollout.num_groups 4 --rollout.max_turns 12 --rollout.max_turn_tokens 24 --rollout.max_episode_tokens 320
        --train.steps 24 --evaluation.every 4
        """,
    ),
    "corridor": ("corridor", "--warmup.skill 0.4 --train.steps 24 --evaluation.every 4"),
    "service_desk": ("service_desk", "--train.steps 40 --evaluation.every 8"),
    "calculator": ("calculator", _CALCULATOR),
    "calculator_moe": ("calculator", _CALCULATOR),
}
"""Each environment's recipe of examples/, and what changes in it."""
RATIOS: dict[str, dict[str, Any]] = {
    "grpo": {"unit": "token"},
    "grpo, watched": {"unit": "token", "kl_coefficient": 1e-9},
    "gspo, paper": {"unit": "trajectory", "trust": "fixed"},
    "gspo, fixed": {"unit": "trajectory", "trust": "fixed", "clip_low": 2e-3, "clip_high": 2.7e-3},
    "gspo, calibrated": {"unit": "trajectory", "trust": "calibrated"},
    "gspo, token": {"unit": "trajectory", "trust": "token"},
    "gspo, kernel": {"unit": "trajectory", "trust": "kernel"},
}
"""What is in `loss:`. `watched`: a weight that changes nothing, so that the divergence from the start is measured."""
TRAINS: dict[str, dict[str, Any]] = {
    "plain": {"target_kl": None},
    "warm-up": {"target_kl": None, "warmup_minibatches": 20},
    "kl .05": {"target_kl": 0.05},
    "kl .02": {"target_kl": 0.02},
    "kl .01": {"target_kl": 0.01},
    "kl .003": {"target_kl": 0.003},
    "kl .001": {"target_kl": 0.001},
    "kl .003, linear": {"target_kl": 0.003, "schedule": "linear"},
    "kl .01, ess": {"target_kl": 0.01, "ess_scaling": True},
    "norm": {"target_kl": None, "max_grad_norm": 0.1},
    "betas": {"target_kl": None, "betas": (0.9, 0.99)},
    "ess": {"target_kl": None, "ess_scaling": True},
    "kl .05, warm-up": {"target_kl": 0.05, "warmup_minibatches": 20},
    "rewind": {"target_kl": None, "on_collapse": "rewind", "checkpoint_every": 2, "keep_last": 20},
}
"""What changes in `train:`."""
_CONTROL = "shuffled "
GAMMA = {"key_door": 1.0, "corridor": 0.8, "service_desk": 0.5, "calculator": 0.5, "calculator_moe": 0.5}
KEPT = {
    "reward": "reward/mean",
    "reward_spread": "reward/spread",
    "success": "episode/success",
    "entropy": "entropy",
    "spread": "ratio/spread",
    "token_spread": "ratio/token_spread",
    "samples": "ratio/effective_samples",
    "clipped": "clip/tokens",
    "pushed_clipped": "clip/pushed_tokens",
    "one_sided": "clip/units_one_sided",
    "kl": "kl/behavior",
    "start_kl": "kl/reference",
    "gradient": "grad_norm",
    "alike": "credit/zero_advantage",
    "step_kl": "kl/step",
    "shortened": "shortened_updates",
}
"""Metrics of each step that a result keeps."""


class Job(NamedTuple):
    """One run."""

    env: str
    ratio: str
    credit: str
    rate: float
    seed: int
    train: str = "plain"


def credit_of(job: Job) -> dict[str, Any]:
    if job.credit.startswith(_CONTROL):
        return {"scheme": "shuffled", "of": credit_of(without_control(job)), "seed": job.seed}
    gamma = GAMMA[job.env]
    settings = {} if job.credit == "uniform" else {"gamma": gamma, "lam": 0.5}
    return {"scheme": job.credit, **settings}


def without_control(job: Job) -> Job:
    """Return the job with the scheme of which it is the control."""
    return job._replace(credit=job.credit.removeprefix(_CONTROL))


def make_recipe(job: Job, *, run_dir: Path, model: Path | None, more: Sequence[str] = ()) -> Recipe:
    name, changes = SETTINGS[job.env]
    options = [*COMMON.split(), *changes.split(), "--seed", str(job.seed), "--run_dir", str(run_dir), *more]
    recipe = load_recipe(ROOT / "examples" / f"{name}.yaml", options).model_dump()
    recipe |= {"credit": credit_of(job), "loss": RATIOS[job.ratio]}
    recipe["train"] |= {"learning_rate": job.rate} | TRAINS[job.train]
    if model is not None:
        recipe["model"] = {"name_or_path": str(model)}
    return Recipe.model_validate(recipe)


def fingerprint(job: Job) -> str:
    """Name the settings of a result: what is written down, so that a recipe's further field changes nothing."""
    name, changes = SETTINGS[job.env]
    recipe = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    recipe = {section: fields for section, fields in recipe.items() if section not in ("credit", "loss")}
    settings = [recipe, COMMON.split(), changes.split(), RATIOS[job.ratio], credit_of(job), TRAINS[job.train]]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def train(recipe: Recipe, folder: RunFolder | None) -> list[dict[str, float]]:
    """Train; return the metrics of every step. A run that goes back has those after it alone."""
    try:
        with build(recipe, tokenizer_folder=None if folder is None else folder.tokenizer) as parts:
            return loop.train(parts, folder)[1]
    except CollapsedError as collapsed:
        assert recipe.run_dir is not None
        resumed, words = go_back(recipe, RunFolder(recipe.run_dir), collapsed)
    print(words, flush=True)
    try:
        return train(resumed, RunFolder.open(recipe.run_dir))
    except TrainingError as error:  # the second collapse ends a run
        print(error, flush=True)
        return RunFolder.open(recipe.run_dir).metrics()


def write_mixture(job: Job, folder: Path) -> Path:
    """Write a mixture of experts that has the tokenizer of the dense policy; return where."""
    with build(make_recipe(job, run_dir=folder / "dense", model=None), tokenizer_folder=None) as parts:
        tokenizer = parts.tokenizer
    new_model("moe", tokenizer).save_pretrained(folder / "moe")
    tokenizer.save_pretrained(folder / "moe")
    return folder / "moe"


def warm_up(job: Job, run_dir: Path, *, model: Path | None) -> None:
    """Warm up a policy in a run folder; what resumes from a copy of it starts right after the warm-up."""
    train(make_recipe(job, run_dir=run_dir, model=model, more=["--train.steps", "1"]), None)
    _, after_a_step = checkpoints(run_dir / "checkpoints")
    shutil.rmtree(after_a_step)


def train_all(jobs: Sequence[Job], out: Path) -> None:
    """Warm up once, then make each of these runs of one environment and seed from there; append their results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_mixture(jobs[0], folder) if jobs[0].env.endswith("moe") else None
        warm = folder / "warm"
        warm_up(jobs[0], warm, model=model)
        for job in jobs:
            run_dir = folder / "run"
            shutil.copytree(warm, run_dir)
            begin = time.perf_counter()
            rows = train(make_recipe(job, run_dir=run_dir, model=model), RunFolder.open(run_dir))
            seconds = time.perf_counter() - begin
            shutil.rmtree(run_dir)
            result = job._asdict() | {"settings": fingerprint(job), "seconds": round(seconds)} | figures(rows)
            append_line(out, result)
            curve = " ".join(f"{success:.2f}" for success in result["curve"])
            print(
                f"{job.env:14} {job.ratio:16} {job.credit:9} {job.train:14} {job.rate:<6g} seed {job.seed:2} {curve} "
                f"({seconds:.0f} s)",
                flush=True,
            )


def figures(rows: Sequence[dict[str, float]]) -> Result:
    # An evaluation in which no episode came to its end reports no success: there was none.
    evaluated = [row for row in rows if "eval/episodes" in row]
    curve = [row.get("eval/success", 0.0) for row in evaluated]
    steps = {
        name: [float(f"{row.get(metric, 0.0):.4g}") for row in rows if row["step"] > 0] for name, metric in KEPT.items()
    }
    return {"at": [int(row["step"]) for row in evaluated], "curve": curve, "steps": steps}


def read_results(out: Path, *, is_any: bool = False) -> dict[Job, Result]:
    """Return the results under today's settings; with `is_any` the last of each run, whatever the recipes were then."""
    found = {Job(**{name: r.get(name, "plain") for name in Job._fields}): r for r in read_lines(out)}
    return {
        job: result
        for job, result in found.items()
        if job.env in SETTINGS and job.ratio in RATIOS and (is_any or result["settings"] == fingerprint(job))
    }


def area(result: Result) -> float:
    return float(statistics.mean(result["curve"][1:]))


def at_the_end(result: Result) -> float:
    return float(result["curve"][-1])


def start(result: Result) -> tuple[float, float]:
    """Return what tells whether runs of one seed began alike: another machine's warm-up comes to other weights."""
    return result["curve"][0], result["steps"]["reward"][0]


def has_collapsed(result: Result) -> bool:
    best = max(result["curve"])
    return bool(best > 0.15 and result["curve"][-1] < best / 2)


def best_rate(
    known: dict[Job, Result], like: Job, rates: Sequence[float] = RATES, by: Callable[[Result], float] = area
) -> float | None:
    """Return the rate that was best on the tuning seeds that tried all, a control's on its scheme's; None where none did."""
    like = without_control(like)
    tried = [[like._replace(rate=rate, seed=seed) for rate in rates] for seed in TUNING_SEEDS]
    found = [[by(known[job]) for job in jobs] for jobs in tried if all(job in known for job in jobs)]
    means = [statistics.mean(column) for column in zip(*found, strict=True)]
    return rates[means.index(max(means))] if means else None


def steps_to(result: Result, success: float) -> float:
    """Return after how many steps a success is reached."""
    points = list(zip(result["at"], result["curve"], strict=True))
    for (step, before), (next_step, after) in pairwise(points):
        if after >= success:
            return float(
                step + (next_step - step) * max(0.0, success - before) / (after - before) if after > before else step
            )
    return float(points[-1][0])


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def figures_of(results: Sequence[Result], threshold: float) -> list[list[float]]:
    """Return of each run the success at its end, its area, and its steps until a threshold."""
    return [
        [at_the_end(result) for result in results],
        [area(result) for result in results],
        [steps_to(result, threshold) for result in results],
    ]


def tell(known: dict[Job, Result], rows: Sequence[Job], seeds: Sequence[int], base: Callable[[Job], Job]) -> None:
    """Print a table for each environment; a row is a job of whatever seed."""
    for env in dict.fromkeys(row.env for row in rows):
        found = {
            row: [known[job] for seed in seeds if (job := row._replace(seed=seed)) in known]
            for row in rows
            if row.env == env
        }
        found = {row: results for row, results in found.items() if len(results) == len(seeds)}
        if not found:
            continue
        best = max(statistics.mean(result["curve"][-1] for result in results) for results in found.values())
        print(f"\n{env}, {len(seeds)} seeds; steps until {0.8 * best:.2f}\n")
        print(
            "| ratio | credit | updates | rate | final | area | steps | collapsed | final, gained | area | steps | of half |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|---|")
        otherwise, shares = [], []
        for row, results in found.items():
            figures = figures_of(results, 0.8 * best)
            gained = ["-"] * (len(figures) + 1)
            other = next((other for other in found if base(row)[:3] == other[:3] and base(row)[5] == other[5]), row)
            if other != row:
                others = figures_of(found[other], 0.8 * best)
                num = sum(start(ours) != start(theirs) for ours, theirs in zip(results, found[other], strict=True))
                if num:
                    otherwise.append(f"{row.ratio}, {row.credit}, {row.train}: {num} of {len(seeds)}")
                pairs = zip(figures, others, strict=True)
                gained = [
                    mean_and_error([a - b for a, b in zip(ours, theirs, strict=True)], 1 if place == 2 else 3)
                    for place, (ours, theirs) in enumerate(pairs)
                ]
                gained.append(mean_and_error([a - b / 2 for a, b in zip(figures[2], others[2], strict=True)], 1))
            collapsed = f"{sum(map(has_collapsed, results))} of {len(results)}"
            means = [mean_and_error(values, 1 if place == 2 else 3) for place, values in enumerate(figures)]
            cells = [row.ratio, row.credit, row.train, f"{row.rate:g}", *means, collapsed, *gained]
            print(f"| {' | '.join(cells)} |")
            if row.ratio == "gspo, calibrated" and all("pushed_clipped" in result["steps"] for result in results):
                late = [100 * statistics.mean(result["steps"]["pushed_clipped"][20:]) for result in results]
                words = f"{row.credit}, {row.train}, {row.rate:g}: {mean_and_error(late, 1)}"
                shares.append(f"{words} ({min(late):.1f} to {max(late):.1f})")
        if shares:
            print(f"\n% clipped by `calibrated`, of pushed tokens, after step 20: {'; '.join(shares)}")
        if otherwise:
            print(f"\nDo not begin as what they are compared with, seeds of {'; '.join(otherwise)}")


def tell_edges(known: dict[Job, Result]) -> None:
    """Print how often tuning chose the lowest and the highest rate, of all settings that were then run on all seeds."""
    rates = {like: best_rate(known, like) for like in {job._replace(seed=0, rate=0.0) for job in known}}
    chosen = [
        rate
        for like, rate in rates.items()
        if rate is not None and all(like._replace(seed=seed, rate=rate) in known for seed in SEEDS)
    ]
    lowest, highest = chosen.count(min(RATES)), chosen.count(max(RATES))
    print(f"\nOf {len(chosen)} settings tuning chose the lowest rate for {lowest}, the highest for {highest}")


DRAWN = {
    "GRPO, uniform": ("grpo", "uniform", "plain"),
    "GSPO with the range of the recipes before, uniform": ("gspo, fixed", "uniform", "plain"),
    "GRPO, action_values": ("grpo", "action_values", "plain"),
    "the default, uniform": ("gspo, token", "uniform", "kl .02"),
    "the default, action_values": ("gspo, token", "action_values", "kl .02"),
}
"""What is drawn of each environment: ratio, credit and way of updating."""


def plot(known: dict[Job, Result], path: Path) -> None:
    """Draw held-out success over steps, mean and standard error over the seeds, each at its best rate."""
    from matplotlib import pyplot as plt  # only who asks for a plot needs it

    plt.switch_backend("Agg")
    envs = [env for env in SETTINGS if best_rate(known, Job(env, *DRAWN["GRPO, uniform"][:2], 0, 0)) is not None]
    figure, axes = plt.subplots(1, len(envs), figsize=(4.2 * len(envs), 3.6), squeeze=False)
    for axis, env in zip(axes[0], envs, strict=True):
        for number, (name, (ratio, credit, way)) in enumerate(DRAWN.items()):
            like = Job(env, ratio, credit, 0, 0, way)
            rate = best_rate(known, like)
            found = [known[job] for seed in SEEDS if (job := like._replace(rate=rate or 0, seed=seed)) in known]
            if len(found) < len(SEEDS):
                continue
            at = found[0]["at"]
            curves = [statistics.mean(result["curve"][k] for result in found) for k in range(len(at))]
            errors = [
                statistics.stdev([result["curve"][k] for result in found]) / len(found) ** 0.5 for k in range(len(at))
            ]
            axis.plot(at, curves, color=f"C{number}", label=name)
            low, high = ([mean + sign * error for mean, error in zip(curves, errors, strict=True)] for sign in (-1, 1))
            axis.fill_between(at, low, high, color=f"C{number}", alpha=0.15)
        axis.set_title(env)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out success")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(DRAWN), fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=150)


def run(wanted: Iterable[Job], out: Path, *, num_jobs: int) -> None:
    """Make the runs that are missing, by environment and seed."""
    known = read_results(out)
    missing: dict[tuple[str, int], list[Job]] = {}
    for job in wanted:
        if job not in known:
            missing.setdefault((job.env, job.seed), []).append(job)
    out.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(train_all, jobs, out) for jobs in missing.values()]):
            future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cures", "tune", "final", "tell"])
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--envs", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument(
        "--ratios", nargs="+", choices=list(RATIOS), default=[name for name in RATIOS if name != "grpo, watched"]
    )
    parser.add_argument("--credits", nargs="+", default=["uniform", "group_gae", "action_values"])
    parser.add_argument("--trains", nargs="+", choices=list(TRAINS), default=["plain"])
    parser.add_argument("--against", choices=list(TRAINS), default="plain", help="with tell")
    parser.add_argument("--against-ratio", choices=list(RATIOS), default="grpo", help="with tell")
    parser.add_argument("--against-credit", default="uniform", help="with tell; same: that of each")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--by", choices=["area", "final"], default="area", help="what the best rate is best in")
    parser.add_argument("--seeds", type=int, nargs="+", help="others than those of the part")
    parser.add_argument("--plot", type=Path, help="with tell: draw the curves of what was measured")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # many at once: each on a core
    rows = [
        Job(env, ratio, credit, max(options.rates), 0, train)
        for env, ratio, credit, train in product(options.envs, options.ratios, options.credits, options.trains)
    ]
    known = read_results(options.out, is_any=options.part == "tell")
    seeds: Sequence[int]
    match options.part:
        case "cures":
            chosen, seeds = rows, CURE_SEEDS
        case "tune":
            chosen, seeds = [row._replace(rate=rate) for row in rows for rate in options.rates], TUNING_SEEDS
        case _:
            by = area if options.by == "area" else at_the_end
            rates = {row: best_rate(known, row, options.rates, by) for row in rows}
            chosen, seeds = [row._replace(rate=rate) for row, rate in rates.items() if rate is not None], SEEDS
    wanted = [row._replace(seed=seed) for row in chosen for seed in options.seeds or seeds]
    if options.part != "tell":
        run(wanted, options.out, num_jobs=options.jobs)
        return
    if options.plot:
        plot(known, options.plot)
    print("Ways of updating, at the highest rate")
    tell(known, rows, options.seeds or CURE_SEEDS, lambda row: row._replace(train="plain"))
    print("\nEach at its best rate")
    against = {"ratio": options.against_ratio, "train": options.against}
    if options.against_credit != "same":
        against["credit"] = options.against_credit
    tell(known, chosen, options.seeds or SEEDS, lambda row: row._replace(**against))
    print("\nAt each rate")
    at_each = [row._replace(rate=rate) for row in rows for rate in options.rates]
    tell(known, at_each, options.seeds or SEEDS, lambda row: row._replace(**against))
    tell_edges(known)


if __name__ == "__main__":
    main()
