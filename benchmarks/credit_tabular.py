"""Which credit scheme learns fastest where: the real schemes and the real loss on a policy that is a table.

    python -m benchmarks.credit_tabular RESULTS.jsonl.gz [--cells base noise ...] [--seeds 100] [--jobs 2]
    python -m benchmarks.credit_tabular RESULTS.jsonl.gz --tell [--plot PATH.svg] [--map agentrl/report/credit_map.json]

An episode is a row of decisions among four actions. A few of them are locks, spread evenly, with one right action each;
the others change nothing. The episode pays 1 at its end if every lock was opened; with `paid: turn` each lock pays its share
when it is opened. Chance adds to every turn's reward (with `paid: end` to the last one's), independent of what is done:
`noise` is its standard deviation over a whole episode. Logits are linear in random features of the decision, as many as
there are decisions, so that decisions disturb one another; at the start locks are opened with probability .6.

A step is four groups of episodes of the present policy, and four minibatches of AdamW. Success, the probability that all
locks are opened, is computed exactly after each step. Each scheme has the learning rate (of four) that gives it the largest
area under that curve on 24 seeds of their own (runs collapse at high rates, so that few do not tell); then as many
seeds are run as asked, each with the same features and the same random numbers for every scheme. `shuffled` deals a
scheme's advantages out to random turns.

Rows are added to RESULTS as they are measured, and those that are there are not measured again. A cell is the base but for
one thing. Told are means of paired differences from `uniform`, with standard errors.

Legend: `K` decisions, `A` actions, `N` episodes of a step, `T` decisions of a minibatch, `D` features.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from agentrl import assign_credit, load_credit
from agentrl.learn.batch import LossColumns
from agentrl.learn.calibration import Calibration
from agentrl.learn.config import LossConfig
from agentrl.learn.loss import policy_loss
from agentrl.learn.micro_batch_loss import trust_region
from agentrl.learn.plan import draw_minibatches
from agentrl.learn.tokens import aggregation_weights, unit_index
from agentrl.report.advise import RunProfile, Task, show
from benchmarks.result_lines import append_line, read_lines
from tests.support.tabular import BASE, SCHEMES, SHUFFLED, Array, Cell, Ints, Row

NUM_MINIBATCHES, NUM_STEPS = 4, 50
RATES = (0.05, 0.1, 0.2, 0.4)
TUNING_SEEDS = range(10_000, 10_024)
LOSS = LossConfig(trust="token")
CELLS: dict[str, Cell] = {
    "base": BASE,
    **{f"horizon {n}": replace(BASE, horizon=n) for n in (4, 8, 24, 64)},
    **{f"noise {noise:g}": replace(BASE, noise=noise) for noise in (0, 0.5, 2)},
    **{f"group size {n}": replace(BASE, group_size=n) for n in (2, 4, 16)},
    **{f"locks {n}": replace(BASE, locks=n) for n in (1, 2, 8)},
    "keys aliased": replace(BASE, aliased=True),
    "paid by turn": replace(BASE, paid="turn"),
    "paid by turn, horizon 4": replace(BASE, paid="turn", horizon=4),
}


def learn(cell: Cell, recipe: dict[str, Any], rate: float, seed: int) -> list[float]:
    """Train a policy; return its success after each step."""
    row, scheme, rng = Row(cell, seed), load_credit(recipe), np.random.default_rng([seed, 2])
    optimizer = torch.optim.AdamW([row.weights_DA], lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    curve = []
    for _ in range(NUM_STEPS):
        groups, actions_NK = row.play()
        credits = [credit for of_group in assign_credit(scheme, groups) for credit in of_group]
        advantages_NK = np.stack([credit.advantages_T for credit in credits]).astype(np.float64)
        with torch.no_grad():
            sampled_KA = row.logprobs()
        drawn = draw_minibatches(
            [g for g, group in enumerate(groups) for _ in group.trajectories],
            has_gradient_I=advantages_NK.any(axis=1),
            num_minibatches=NUM_MINIBATCHES,
            rng=rng,
        )
        for computed, counted in drawn:
            update(row, optimizer, sampled_KA, actions_NK, advantages_NK, np.array([*computed, *counted]))
        curve.append(row.success())
    return curve


def update(
    row: Row,
    optimizer: torch.optim.Optimizer,
    sampled_KA: torch.Tensor,
    actions_NK: Ints,
    advantages_NK: Array,
    chosen: Ints,
) -> None:
    """Make one optimizer step on the chosen episodes."""
    if not len(chosen) or not advantages_NK[chosen].any():
        return
    horizon = row.cell.horizon
    trajectory_T, decision_T = np.repeat(np.arange(len(chosen)), horizon), np.tile(np.arange(horizon), len(chosen))
    at = torch.from_numpy(decision_T), torch.from_numpy(actions_NK[chosen].ravel())
    unit_T = torch.from_numpy(unit_index(LOSS.unit, trajectory_T, decision_T, np.zeros_like(decision_T)))
    columns = LossColumns(
        advantage_T=torch.from_numpy(advantages_NK[chosen].ravel()),
        weight_T=torch.from_numpy(aggregation_weights(LOSS.aggregation, trajectory_T=trajectory_T, turn_T=decision_T)),
        behavior_T=sampled_KA[at],
        unit_T=unit_T,
        count_U=torch.bincount(unit_T),
        version_T=torch.zeros_like(unit_T),
        trajectory_T=torch.from_numpy(trajectory_T),
    )
    result = policy_loss(
        row.logprobs()[at],
        anchor_logprobs_T=columns.behavior_T,
        advantages_T=columns.advantage_T,
        unit_T=unit_T,
        weight_T=columns.weight_T,
        trust=trust_region(LOSS, columns, calibration=Calibration(), version=0),
    )
    optimizer.zero_grad()
    result.loss.backward()
    torch.nn.utils.clip_grad_norm_([row.weights_DA], 1.0)
    optimizer.step()


def measure(job: tuple[str, str, int]) -> dict[str, Any]:
    """Tune a scheme in a cell, and run the seeds."""
    torch.set_num_threads(1)
    name, scheme, num_seeds = job
    cell, recipe = CELLS[name], SCHEMES[scheme]
    tuned = {rate: float(np.mean([learn(cell, recipe, rate, seed) for seed in TUNING_SEEDS])) for rate in RATES}
    rate = max(tuned, key=lambda rate: tuned[rate])
    curves = np.array([learn(cell, recipe, rate, seed) for seed in range(num_seeds)])
    return {
        "name": name,
        "cell": asdict(cell),
        "scheme": scheme,
        "rate": rate,
        "tuned": {f"{rate:g}": area for rate, area in tuned.items()},
        "area": curves.mean(axis=1).round(6).tolist(),
        "final": curves[:, -1].round(6).tolist(),
    }


def tell(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table: area under the curve of success, and paired differences from `uniform`."""
    found = {(row["name"], row["scheme"]): row for row in rows}
    names, measured = ({row[key] for row in rows} for key in ("name", "scheme"))
    schemes = [scheme for scheme in SCHEMES if scheme in measured]
    print(f"| task | {' | '.join(schemes)} |")
    print(f"|---|{'---|' * len(schemes)}")
    for name in (name for name in CELLS if name in names):
        base = np.array(found[name, "uniform"]["area"])
        cells = [f"{base.mean():.3f}"]
        for scheme in schemes[1:]:
            if (row := found.get((name, scheme))) is None:
                cells.append("")
                continue
            difference = np.array(row["area"]) - base
            cells.append(f"{difference.mean():+.3f} ± {difference.std(ddof=1) / math.sqrt(len(difference)):.3f}")
        print(f"| {name} | {' | '.join(cells)} |")


def map_of(rows: Sequence[dict[str, Any]]) -> list[Task]:
    """Return what rollouts show of each task, measured as those of a run are, and what each scheme gains there."""
    found = {(row["name"], row["scheme"]): np.array(row["area"]) for row in rows}
    tasks = []
    for name, cell in CELLS.items():
        # Where keys do not tell what matters, rollouts do not show it.
        if cell.aliased or not all((name, scheme) in found for scheme in SCHEMES):
            continue
        shown = show([group for seed in range(20) for group in Row(cell, seed).play()[0]])
        gains = {}
        for scheme in SCHEMES:
            if (name, scheme) in found and scheme not in ("uniform", SHUFFLED):
                difference = found[name, scheme] - found[name, "uniform"]
                error = difference.std(ddof=1) / math.sqrt(len(difference))
                gains[scheme] = (round(float(difference.mean()), 4), round(float(error), 4))
        assert shown is not None
        rounded = RunProfile(**{field: round(value, 4) for field, value in shown.model_dump().items()})
        tasks.append(Task(name=name, seeds=len(found[name, "uniform"]), profile=rounded, gains=gains))
    return tasks


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the paired differences of each task."""
    from matplotlib import pyplot as plt  # only who asks for a plot needs it

    plt.switch_backend("Agg")
    found = {(row["name"], row["scheme"]): np.array(row["area"]) for row in rows}
    names = [name for name in CELLS if (name, "uniform") in found]
    schemes = [scheme for scheme in SCHEMES if scheme != "uniform" and (names[0], scheme) in found]
    figure, axis = plt.subplots(figsize=(8, 1 + 0.45 * len(names)))
    for number, scheme in enumerate(schemes):
        means, errors = [], []
        for name in names:
            difference = found[name, scheme] - found[name, "uniform"]
            means.append(difference.mean())
            errors.append(difference.std(ddof=1) / math.sqrt(len(difference)))
        places = np.arange(len(names)) + 0.7 * (number / max(1, len(schemes) - 1) - 0.5)
        axis.errorbar(means, places, xerr=errors, fmt="o", ms=4, label=scheme)
    axis.axvline(0, color="gray", lw=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("area under the curve of success, less that of uniform (mean and standard error)")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tell", action="store_true", help="measure nothing")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--map", type=Path, help="what `agentrl credit advise` goes by")
    options = parser.parse_args()
    rows = read_lines(options.results)
    known = {(row["name"], row["scheme"], len(row["area"])) for row in rows}
    wanted = [(cell, scheme, options.seeds) for cell in options.cells for scheme in options.schemes]
    jobs = [] if options.tell else [job for job in wanted if job not in known]
    with get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap_unordered(measure, jobs):
            rows.append(row)
            append_line(options.results, row)
            print(f"{row['name']}, {row['scheme']}: {np.mean(row['area']):.3f} at {row['rate']:g}", flush=True)
    tell(rows)
    if options.plot:
        plot(rows, options.plot)
    if options.map:
        tasks = TypeAdapter(list[Task]).dump_python(map_of(rows), mode="json")
        options.map.write_text("[\n" + ",\n".join(map(json.dumps, tasks)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
