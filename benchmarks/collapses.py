"""What happens in a run that collapses: minibatch by minibatch, tokens, advantages, entropy and Adam's moments.

    python -m benchmarks.collapses watch --evidence FILE --out FILE [--most 12]
    python -m benchmarks.collapses tell --out FILE [--plot FILE.svg]

`watch` makes runs of `benchmarks/evidence.py` again that collapsed there, and beside each the same at half the rate, and notes
of each minibatch, before its update, the mean log-ratio to the policy that sampled, of tokens of positive advantage (`up`) and
negative (`down`) and of all (`kl`, negated), the share of tokens that the trust region stops, effective samples, entropy and
the gradient's norm; and of the update: `adam` = root mean square of m / (sqrt(v) + eps) over all weights, by which the learning
rate is multiplied, and `along` = the cosine between that and the gradient. Each token is in one minibatch of a step: whatever
its ratio is then, other tokens made it. `tell` prints the minibatches of the step after which a run fell.
"""

import argparse
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.distributed.checkpoints import checkpoints
from agentrl.learn.learner import Gradient, Learner
from agentrl.learn.metrics import effective_samples
from agentrl.report.folder import RunFolder
from agentrl.run import loop
from agentrl.run.build import build
from benchmarks.evidence import Job, Result, has_collapsed, make_recipe, read_results
from benchmarks.evidence import train as train_plainly
from benchmarks.result_lines import append_line, read_lines


class WatchedLearner(Learner):
    """Notes what each minibatch showed, and what its update was."""

    rows: list[dict[str, Any]]

    def add_gradients(self, *parts: Any, **options: Any) -> Gradient:
        gradient = super().add_gradients(*parts, **options)
        self.rows.append({"version": options["version"], **of_minibatch(gradient), **self._of_update()})
        return gradient

    def _of_update(self) -> dict[str, float]:
        """Describe the update that follows, from Adam's moments as it will leave them."""
        optimizer = getattr(self.state.optimizer, "optimizer", self.state.optimizer)
        squares = along = length = num = 0.0
        for group in optimizer.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = optimizer.state.get(parameter, {}), parameter.grad
                count = float(state.get("step", 0)) + 1
                m = first * state.get("exp_avg", 0) + (1 - first) * gradient
                v = second * state.get("exp_avg_sq", 0) + (1 - second) * gradient**2
                step = (m / (1 - first**count)) / ((v / (1 - second**count)).sqrt() + group["eps"])
                squares += float((step**2).sum())
                along += float((step * gradient).sum())
                length += float((gradient**2).sum())
                num += step.numel()
        cosine = along / math.sqrt(squares * length) if squares * length > 0 else 0.0
        return {"adam": math.sqrt(squares / max(1, num)), "along": cosine}


def of_minibatch(gradient: Gradient) -> dict[str, float]:
    names = ("log_ratio_T", "advantage_T", "clipped_T", "entropy_T")
    log_ratio_T, advantage_T, clipped_T, entropy_T = (gradient.observations.column(name) for name in names)

    def mean(values: Any) -> float:
        return float(np.mean(values)) if len(values) else 0.0

    return {
        "kl": mean(-log_ratio_T),
        "up": mean(log_ratio_T[advantage_T > 0]),
        "down": mean(log_ratio_T[advantage_T < 0]),
        "far_up": mean(log_ratio_T[advantage_T > 0] < -0.2),
        "far_down": mean(log_ratio_T[advantage_T < 0] > 0.2),
        "clipped": mean(clipped_T),
        "samples": effective_samples(gradient.stats),
        "entropy": mean(entropy_T),
        "gradient": gradient.stats.grad_norm,
        "pushed_up": mean(advantage_T > 0),
    }


def watch(jobs: Sequence[Job], out: Path) -> None:
    """Make runs of one environment and seed again, from one warm-up."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        warm = Path(temporary) / "warm"
        train_plainly(make_recipe(jobs[0], run_dir=warm, model=None, more=["--train.steps", "1"]), None)
        shutil.rmtree(checkpoints(warm / "checkpoints")[1])
        for job in jobs:
            run_dir = Path(temporary) / "run"
            shutil.copytree(warm, run_dir)
            folder = RunFolder.open(run_dir)
            recipe = make_recipe(job, run_dir=run_dir, model=None)
            with build(recipe, tokenizer_folder=folder.tokenizer) as parts:
                plain = parts.learner
                learner = WatchedLearner(
                    plain.state,
                    loss=recipe.loss,
                    config=recipe.train,
                    temperature=recipe.rollout.temperature,
                    seed=recipe.seed,
                )
                learner.rows = []
                rows = loop.train(replace(parts, learner=learner), folder)[1]
            shutil.rmtree(run_dir)
            result = job._asdict() | {
                "rewards": [row["reward/mean"] for row in rows if row["step"] > 0],
                "curve": [row.get("eval/success", 0.0) for row in rows if "eval/episodes" in row],
                "minibatches": learner.rows,
            }
            append_line(out, result)
            print(*job, [round(success, 2) for success in result["curve"]], flush=True)


def last_good(values: Sequence[float]) -> int:
    """Return the last step with a third of the best, which is a mean of three steps."""
    best = max(statistics.mean(values[max(0, k - 2) : k + 1]) for k in range(len(values)))
    return max([1, *(k for k, value in enumerate(values, 1) if value >= best / 3)])


def fall(result: Result) -> int | None:
    """Return the step whose update made the reward fall for good, or one after it. None: none did.

    It is not after the last step with a third of the best reward, nor after the evaluation from which held-out success stays
    below half of its best: where rewards come by chance, a policy that has collapsed earns some.
    """
    if not has_collapsed(result):
        return None
    rewards, curve = result["rewards"], result["curve"]
    gone = next(k for k in range(len(curve)) if max(curve[k:]) < max(curve) / 2)
    return min(last_good(rewards), gone * len(rewards) // (len(curve) - 1))  # the first evaluation comes before step 1


def tell(results: Sequence[Result]) -> None:
    """Print the minibatches of the step that made each run fall."""
    print(
        "| ratio, credit, rate, seed | fell after step | minibatch | kl | up | down | clipped | effective samples | entropy "
        "| gradient | adam | along |"
    )
    print(f"|{'---|' * 12}")
    for result in results:
        if (step := fall(result)) is None:
            continue
        name = f"{result['ratio']}, {result['credit']}, {result['rate']:g}, {result['seed']}"
        usual = statistics.median(m["gradient"] for m in result["minibatches"] if m["version"] < step - 1)
        for number, m in enumerate([m for m in result["minibatches"] if m["version"] == step - 1], 1):
            cells = [f"{m[key]:.3g}" for key in ("kl", "up", "down", "clipped", "samples", "entropy")]
            cells += [f"{m['gradient'] / usual:.1f} times its median", f"{m['adam']:.2f}", f"{m['along']:+.2f}"]
            print(f"| {name} | {step} | {number} | {' | '.join(cells)} |")


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw each run that collapsed beside the same at half the rate."""
    from matplotlib import pyplot as plt  # only who asks for a plot needs it

    plt.switch_backend("Agg")
    fallen = [result for result in results if fall(result) is not None][:4]
    panels = {"reward": None, "kl": "log", "gradient": "log", "entropy": "log", "samples": None}
    figure, axes = plt.subplots(len(panels), len(fallen), figsize=(3.2 * len(fallen), 8), squeeze=False, sharex="col")
    for column, result in enumerate(fallen):
        half = next((r for r in results if r["rate"] == result["rate"] / 2 and same_start(r, result)), None)
        for row, (name, scale) in enumerate(panels.items()):
            axis = axes[row][column]
            for of_run, color in ((half, "tab:gray"), (result, "tab:red")):
                if of_run is None:
                    continue
                if name == "reward":
                    axis.plot(range(1, len(of_run["rewards"]) + 1), of_run["rewards"], color=color)
                    continue
                seen: dict[int, int] = {}
                places, values = [], []
                for m in of_run["minibatches"]:
                    places.append(m["version"] + 1 + seen.get(m["version"], 0) / 4)
                    seen[m["version"]] = seen.get(m["version"], 0) + 1
                    values.append(abs(m[name]) if scale else m[name])
                axis.plot(places, values, ".-", ms=2, lw=0.6, color=color)
            if scale:
                axis.set_yscale(scale)
                axis.set_ylim(bottom=1e-4)
            axis.axvline(fall(result) or 0, color="black", lw=0.5, ls=":")
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel({"kl": "|kl|, nats a token", "samples": "effective samples"}.get(name, name))
        axes[0][column].set_title(
            f"{result['ratio']}, {result['credit']}, {result['rate']:g}, seed {result['seed']}", fontsize=8
        )
        axes[-1][column].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def same_start(one: Result, other: Result) -> bool:
    return all(one[key] == other[key] for key in ("env", "ratio", "credit", "seed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["watch", "tell"])
    parser.add_argument("--evidence", type=Path, help="results of benchmarks/evidence.py")
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    parser.add_argument("--most", type=int, default=12, help="runs that collapsed to make again")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.part == "watch":
        collapsed = [
            job for job, result in read_results(options.evidence, is_any=True).items() if has_collapsed(result)
        ]
        known = {tuple(result[name] for name in Job._fields) for result in read_lines(options.out)}
        for job in [job for job in collapsed if job not in known][: options.most]:
            watch([job, job._replace(rate=job.rate / 2)], options.out)
        return
    results = read_lines(options.out)
    tell(results)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
