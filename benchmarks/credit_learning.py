"""What a credit scheme is worth: held-out success after equal budgets of episodes, over seeds, against `uniform`.

    python benchmarks/credit_learning.py --out FILE [--jobs 2] [--envs ...] [--seeds ...] [--schemes ...]

For each environment and seed, one policy is made and warmed up on poor demonstrations; every scheme then continues from that
checkpoint: the same weights, the same first episodes, the same settings but for the credit. `key_door` pays at the door,
for a box chosen many turns before, and pays by chance alone in between; `calculator` pays for right calls and the right
answer. `final` is success on the held-out tasks after the last step, `area` its mean over all evaluations after training
began. `shuffled` deals the advantages of `group_gae` out to random turns: what is left of them on the wrong turn.

Results are appended to FILE as JSON lines; what is in it already, under the same settings, is not run again (take another
file after a change of code). So a stopped run is resumed by the same command, and `--jobs 0` only shows what is there.
The settings were chosen on seeds 0 to 3, so the seeds reported begin at 10.
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
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from agentrl.distributed.checkpoints import checkpoints
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.recipe.registry import names
from agentrl.report.folder import RunFolder
from agentrl.run import loop
from agentrl.run.build import build

ROOT = Path(__file__).resolve().parents[1]
Result: TypeAlias = dict[str, Any]
"""One line of the results file."""

COMMON = """
    --train.schedule constant --train.num_minibatches 4 --train.checkpoint_every 1000
    --evaluation.num_tasks 128 --report.rollouts_every 0
"""
SETTINGS = {
    "key_door": """
        --env.id key_door --env.options.num_boxes 6 --env.options.num_distractors 6 --env.options.key_reward 0
        --env.options.noise 0.25
        --model.local.hidden_size 64 --model.local.intermediate_size 192
        --warmup.steps 800 --warmup.learning_rate 3e-3 --warmup.num_demonstrations 3000 --warmup.skill 0.35
        --rollout.num_groups 4 --rollout.max_turns 10 --rollout.max_turn_tokens 24 --rollout.max_episode_tokens 256
        --train.steps 24 --train.learning_rate 6e-4 --evaluation.every 4
    """,
    "calculator": """
        --warmup.steps 600 --warmup.learning_rate 2e-3 --warmup.num_demonstrations 3000 --warmup.skill 0.6
        --rollout.num_groups 6
        --train.steps 60 --train.learning_rate 3e-4 --evaluation.every 10
    """,
}
"""What each environment changes in the default recipe, the same for every scheme."""


def schemes(gamma: float) -> dict[str, dict[str, Any]]:
    """Name the rows of the table and what stands under `credit:` for each; to compare others, edit this."""
    state = {"scheme": "turn_return", "baseline": "state", "leave_one_out": True, "gamma": gamma}
    group_gae = {"scheme": "group_gae", "gamma": gamma, "lam": 0.5}
    by_turn = {"scheme": "turn_return", "baseline": "turn", "leave_one_out": False, "gamma": 0.5, "normalize": "std"}
    return {
        "uniform": {"scheme": "uniform"},
        "pool": {"scheme": "turn_return", "baseline": "pool", "leave_one_out": True},
        "turn": by_turn,  # the default recipe's
        "state": state,
        "gigpo": {"scheme": "gigpo", "gamma": gamma},
        "group_gae": group_gae,
        "action_values": {"scheme": "action_values", "gamma": gamma, "lam": 0.5},
        "shuffled": {"scheme": "shuffled", "of": group_gae},
    }


SCHEMES = {"key_door": schemes(gamma=1.0), "calculator": schemes(gamma=0.5)}


def make_recipe(env: str, scheme: str, seed: int, run_dir: Path | None = None, *options: str) -> Recipe:
    place = [] if run_dir is None else ["--run_dir", str(run_dir)]
    overrides = [*COMMON.split(), *SETTINGS[env].split(), "--seed", str(seed), *place, *options]
    recipe = load_recipe(ROOT / "examples" / "calculator.yaml", overrides)
    return Recipe.model_validate(recipe.model_dump() | {"credit": SCHEMES[env][scheme]})


@cache
def fingerprint(env: str, scheme: str, seed: int) -> str:
    """Name the settings of a result: what is written down, so that a recipe's further field changes nothing."""
    recipe = (ROOT / "examples" / "calculator.yaml").read_text(encoding="utf-8")
    settings = [recipe, COMMON.split(), SETTINGS[env].split(), SCHEMES[env][scheme], seed]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def train(recipe: Recipe, folder: RunFolder | None) -> list[dict[str, float]]:
    with build(recipe, tokenizer_folder=None if folder is None else folder.tokenizer) as parts:
        return loop.train(parts, folder)[1]


def train_all(env: str, seed: int, wanted: Sequence[str], out: Path) -> None:
    """Warm up once, then train with each of the schemes from there, appending each result to `out`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder) / "warm"
        train(make_recipe(env, "uniform", seed, warm, "--train.steps", "1"), None)
        _, after_a_step = checkpoints(warm / "checkpoints")
        shutil.rmtree(after_a_step)  # what resumes from a copy now starts right after the warm-up
        for scheme in wanted:
            run_dir = Path(folder) / "run"
            shutil.copytree(warm, run_dir)
            begin = time.perf_counter()
            rows = train(make_recipe(env, scheme, seed, run_dir), RunFolder.open(run_dir))
            seconds = time.perf_counter() - begin
            shutil.rmtree(run_dir)
            result: Result = {"env": env, "scheme": scheme, "seed": seed, "settings": fingerprint(env, scheme, seed)}
            result |= figures(rows) | {"seconds": seconds}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            curve = " ".join(f"{success:.2f}" for success in result["curve"])
            print(f"{env:11} seed {seed} {scheme:15} {curve}  ({seconds:.0f} s)", flush=True)


def figures(rows: Sequence[dict[str, float]]) -> Result:
    # An evaluation in which no episode came to its end reports no success: there was none.
    curve = [row.get("eval/success", 0.0) for row in rows if "eval/episodes" in row]
    shown = {"grad_norm": "grad_norm", "clipped_tokens": "clip/tokens", "truncated": "episode/truncated"}
    means = {name: statistics.mean(row[metric] for row in rows[1:] if metric in row) for name, metric in shown.items()}
    return {"start": curve[0], "final": curve[-1], "area": statistics.mean(curve[1:]), "curve": curve} | means


def read_results(out: Path, wanted: Iterable[tuple[str, str, int]]) -> dict[tuple[str, str, int], Result]:
    """Return what is known already under today's settings."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    known = {(r["env"], r["scheme"], r["seed"], r["settings"]): r for r in map(json.loads, lines)}
    return {job: known[key] for job in wanted if (key := (*job, fingerprint(*job))) in known}


def describe(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, standard deviation and standard error; a single value has no spread."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "sd": sd, "se": None if sd is None else sd / math.sqrt(len(values))}


def compare(of_scheme: dict[int, Result], of_uniform: dict[int, Result]) -> dict[str, Any]:
    """Summarise a scheme, and its differences from `uniform`, seed by seed."""
    row: dict[str, Any] = {"seeds": sorted(of_scheme)}
    for name in ("final", "area"):
        row[name] = describe([result[name] for result in of_scheme.values()])
        paired = [of_scheme[seed][name] - of_uniform[seed][name] for seed in of_scheme if seed in of_uniform]
        if paired and of_scheme is not of_uniform:
            gain = describe(paired)
            row[f"{name}_gain"] = gain | {"in_se": statistics.mean(paired) / se if (se := gain["se"]) else None}
    for name in ("start", "grad_norm", "clipped_tokens", "truncated", "seconds"):
        row[name] = statistics.mean(result[name] for result in of_scheme.values())
    return row


def print_table(env: str, table: dict[str, dict[str, Any]]) -> None:
    def text(part: dict[str, float | None] | None, *keys: str) -> str:
        cells = ["-" if part is None or (value := part.get(key)) is None else f"{value:.3f}" for key in keys]
        return f"{cells[0]:>6} ± {cells[1]:<5} ({cells[2]:>6})"

    print(
        f"\n{env}: mean ± standard error (standard deviation); gain over uniform (in standard errors), paired by seed"
    )
    heads = f"{'final':23} {'area':23} {'gain of final':23} {'gain of area':23}"
    print(f"{'scheme':15} {'n':>2} {'start':>6}  {heads} {'gradient':>8} {'clipped':>7} {'cut off':>7} {'s':>4}")
    for scheme, row in table.items():
        parts = [text(row[name], "mean", "se", "sd") for name in ("final", "area")]
        parts += [text(row.get(f"{name}_gain"), "mean", "se", "in_se") for name in ("final", "area")]
        print(
            f"{scheme:15} {len(row['seeds']):>2} {row['start']:>6.3f}  {' '.join(parts)} {row['grad_norm']:>8.3f} "
            f"{row['clipped_tokens']:>7.1%} {row['truncated']:>7.1%} {row['seconds']:>4.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each; 0: run nothing")
    parser.add_argument("--envs", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 18)))
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES["key_door"]), default=list(SCHEMES["key_door"]))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = {name: SCHEMES["key_door"][name]["scheme"] for name in options.schemes}
    for name in [name for name, scheme in rows.items() if ":" not in scheme and scheme not in names("agentrl.credit")]:
        print(f"{name} is left out: no credit scheme {rows.pop(name)!r} is installed")
    wanted = [(env, scheme, seed) for env in options.envs for seed in options.seeds for scheme in rows]
    known = read_results(options.out, wanted)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs or 1, mp_context=context, max_tasks_per_child=1) as pool:
        begun = []
        for env, seed in dict.fromkeys((env, seed) for env, _, seed in wanted) if options.jobs else ():
            if missing := [scheme for scheme in rows if (env, scheme, seed) not in known]:
                begun.append(pool.submit(train_all, env, seed, missing, options.out))
        for future in as_completed(begun):
            future.result()
    known = read_results(options.out, wanted)
    summary: dict[str, Any] = {}
    for env in options.envs:
        found = {
            scheme: of_seed
            for scheme in rows
            if (of_seed := {s: known[env, scheme, s] for s in options.seeds if (env, scheme, s) in known})
        }
        for seed in options.seeds:
            if len({of_seed[seed]["start"] for of_seed in found.values() if seed in of_seed}) > 1:
                print(f"{env}, seed {seed}: not all began with the same success, so not with the same weights")
        summary[env] = {name: compare(of_seed, found.get("uniform", {})) for name, of_seed in found.items()}
        print_table(env, summary[env])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
