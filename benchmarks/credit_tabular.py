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
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter

from agentrl import StopReason, Trajectory, TrajectoryGroup, Turn, assign_credit, load_credit
from agentrl.learn.batch import LossColumns, aggregation_weights, unit_index
from agentrl.learn.calibration import Calibration
from agentrl.learn.config import LossConfig
from agentrl.learn.loss import policy_loss
from agentrl.learn.micro_batch_loss import trust_region
from agentrl.learn.plan import draw_minibatches
from agentrl.report.advise import COMPARED, Shown, Task, show
from benchmarks.result_lines import append_line, read_lines

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_ACTIONS, NUM_GROUPS, NUM_MINIBATCHES, NUM_STEPS, SKILL = 4, 4, 4, 50, 0.6
RATES = (0.05, 0.1, 0.2, 0.4)
TUNING_SEEDS = range(10_000, 10_024)
LOSS = LossConfig(trust="token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One task."""

    horizon: int = 12
    locks: int = 4
    noise: float = 1.0
    group_size: int = 8
    aliased: bool = False
    """State keys do not tell whether all locks so far are open."""
    paid: str = "end"


BASE = Cell()
CELLS: dict[str, Cell] = {
    "base": BASE,
    **{f"horizon {n}": replace(BASE, horizon=n) for n in (4, 8, 24, 64)},
    **{f"noise {noise:g}": replace(BASE, noise=noise) for noise in (0, 0.5, 2)},
    **{f"group size {n}": replace(BASE, group_size=n) for n in (2, 4, 16)},
    **{f"locks {n}": replace(BASE, locks=n) for n in (1, 2, 8)},
    "keys aliased": replace(BASE, aliased=True),
    "paid by turn": replace(BASE, paid="turn"),
}
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name, **options} for name, options in COMPARED.items()},
    "shuffled ecpo": {"scheme": "shuffled", "of": {"scheme": "ecpo", **COMPARED["ecpo"]}},
}


@cache
def turn(
    decision: int, opened: bool, action: int, opened_after: bool, reward: float, is_last: bool, aliased: bool
) -> Turn:
    """Return a decision as a turn of one token."""

    def key(k: int, is_open: bool) -> str:
        return f"{k}" if aliased else f"{k}/{is_open}"

    return Turn(
        observation_ids=(decision,),
        action_ids=(action,),
        behavior_logprobs=(0.0,),  # the schemes here do not read it
        versions=(0,),
        reward=reward,
        state_key=key(decision, opened),
        next_state_key=None if is_last else key(decision + 1, opened_after),
        action_key=f"{action}",
    )


class Row:
    """A row of decisions and the policy that makes them, for one seed."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        rng = np.random.default_rng([seed, 0])
        features_KD = rng.normal(size=(cell.horizon, cell.horizon)) / math.sqrt(cell.horizon)
        self.locks = np.unique(np.linspace(0, cell.horizon - 1, cell.locks).round().astype(int))
        self.right = rng.integers(NUM_ACTIONS, size=cell.horizon)
        logits_KA = np.zeros((cell.horizon, NUM_ACTIONS))
        logits_KA[self.locks, self.right[self.locks]] = math.log(SKILL / ((1 - SKILL) / (NUM_ACTIONS - 1)))
        self.features_KD = torch.from_numpy(features_KD)
        self.weights_DA = torch.from_numpy(np.linalg.solve(features_KD, logits_KA)).requires_grad_()
        self._rng = np.random.default_rng([seed, 1])
        self._seed, self._num_steps = seed, 0

    def logprobs(self) -> torch.Tensor:
        return (self.features_KD @ self.weights_DA).log_softmax(-1)

    def success(self) -> float:
        with torch.no_grad():
            return float(self.logprobs()[self.locks, self.right[self.locks]].sum().exp())

    def play(self) -> tuple[list[TrajectoryGroup], Ints]:
        """Play a step's episodes; return them, and their actions (N, K)."""
        cell, num = self.cell, NUM_GROUPS * self.cell.group_size
        self._num_steps += 1
        with torch.no_grad():
            shares_KA = self.logprobs().exp().numpy().cumsum(axis=1)
        draws_NK = self._rng.random((num, cell.horizon))
        actions_NK = (draws_NK[:, :, None] > shares_KA[None, :, :-1]).sum(axis=2)
        chance_NK = self._rng.choice([-1.0, 1.0], size=(num, cell.horizon)) * cell.noise / math.sqrt(cell.horizon)
        is_lock_K = np.isin(np.arange(cell.horizon), self.locks)
        right_NK = (actions_NK == self.right) | ~is_lock_K
        opened_NK = np.logical_and.accumulate(right_NK, axis=1)
        rewards_NK = chance_NK
        if cell.paid == "turn":
            rewards_NK = rewards_NK + (right_NK & is_lock_K) / len(self.locks)
        else:
            rewards_NK = np.zeros_like(chance_NK)
            rewards_NK[:, -1] = opened_NK[:, -1] + chance_NK.sum(axis=1)
        groups = []
        for g in range(NUM_GROUPS):
            members = range(g * cell.group_size, (g + 1) * cell.group_size)
            trajectories = [self._trajectory(g, n, actions_NK[n], opened_NK[n], rewards_NK[n]) for n in members]
            groups.append(TrajectoryGroup(group_id=self._name(g), trajectories=tuple(trajectories)))
        return groups, actions_NK

    def _name(self, group: int) -> str:
        """Name a group as no other of any step or seed: `shuffled` draws its permutations from names."""
        return f"{self._seed}/{self._num_steps}/{group}"

    def _trajectory(self, group: int, number: int, action_K: Ints, opened_K: Any, reward_K: Array) -> Trajectory:
        before_K = [True, *opened_K[:-1].tolist()]
        rows = zip(before_K, action_K.tolist(), opened_K.tolist(), reward_K.tolist(), strict=True)
        last = self.cell.horizon - 1
        return Trajectory(
            group_id=self._name(group),
            trajectory_id=f"{self._name(group)}/{number}",
            env_id="row",
            seed=group,
            turns=tuple(turn(k, *row, k == last, self.cell.aliased) for k, row in enumerate(rows)),
            stop_reason=StopReason.TERMINATED,
        )


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
            if (name, scheme) in found and scheme not in ("uniform", "shuffled ecpo"):
                difference = found[name, scheme] - found[name, "uniform"]
                error = difference.std(ddof=1) / math.sqrt(len(difference))
                gains[scheme] = (round(float(difference.mean()), 4), round(float(error), 4))
        assert shown is not None
        rounded = Shown(**{field: round(value, 4) for field, value in shown.model_dump().items()})
        tasks.append(Task(name=name, seeds=len(found[name, "uniform"]), shown=rounded, gains=gains))
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
