"""How much of the exact advantage each credit scheme recovers, on a decision process small enough to enumerate.

    python benchmarks/credit_exact.py [--seeds 0 1 2 3 4] [--amps 0 1] [--rows ROW ...] [--plot PATH.svg]

KeyDoor-Distractor: a key room (take: .4, the key with .9), a corridor with up to two loops (.35 each), three rooms whose
collecting (.5) pays mu +- AMP with mu = 0, 0, .1, and a door (open: .6) that pays 1 with .95 if the key is held. The
policy is fixed and tabular, with one log-odds parameter for each state; values and policy gradient are exact.

- corr: correlation of the credited with the exact advantage over all decisions.
- leak: RMS credit of the decisions whose exact advantage is 0, divided by the RMS credit of all decisions.
- cos: cosine of the mean gradient, sum over decisions of credit * grad log pi, with the exact policy gradient. The mean
  is over the batch: noise alone lowers the cosine of an unbiased scheme to about 1 / sqrt(1 + 1 / (SNR * groups)).
- SNR: with g the gradient estimate of one group (mean over its trajectories), |mean of g|^2 / trace of cov(g), over the
  groups of the batch: a batch of 1/SNR groups has as much noise as signal. Noise alone would show as 1 / groups.
- scale: the least-squares factor from the mean gradient to the exact one (1: unbiased and in units of reward). Biases are
  taken after multiplying the credit by it, so that schemes that divide by a standard deviation can be compared.
- bias: mean credit less exact advantage, by situation (a state and one of its two actions). gap: the same for the
  difference between a state's two actions, at the listed state where it is largest; unlike a bias that both actions
  share, it moves the gradient.

Each scheme stands next to its shuffled control (`scheme: shuffled`), its own credit dealt out to the wrong turns at random.

Legend: `N` decisions of a batch, `G` groups, `S` states, `A` the two actions of a state.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl import Need, StopReason, Trajectory, TrajectoryGroup, Turn, assign_credit, load_credit
from agentrl.recipe.registry import names
from agentrl_credit.triage import ROLES

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SCHEMES: dict[str, dict[str, Any]] = {
    "uniform, leave-one-out": {"scheme": "uniform", "normalize": "leave_one_out"},
    "uniform, std": {"scheme": "uniform"},
    "turn_return, pool": {"scheme": "turn_return"},
    "turn_return, state": {"scheme": "turn_return", "baseline": "state"},
    "gigpo": {"scheme": "gigpo"},
    "group_gae, lam 0": {"scheme": "group_gae", "lam": 0.0, "leave_one_out": False},
    "group_gae, lam 0, leave-one-out": {"scheme": "group_gae", "lam": 0.0},
    "group_gae, lam .5": {"scheme": "group_gae", "lam": 0.5},
    "action_values, lam 1": {"scheme": "action_values", "gamma": 1.0, "lam": 1.0},
    "action_values, lam .5": {"scheme": "action_values", "gamma": 1.0, "lam": 0.5},
    "action_values, gamma .8, lam .5": {"scheme": "action_values", "gamma": 0.8, "lam": 0.5},
    "action_values, lam 0": {"scheme": "action_values", "gamma": 1.0, "lam": 0.0},
    "ecpo": {"scheme": "ecpo", "gamma": 1.0},
    "crbc": {"scheme": "crbc"},
    "crbc, values alone": {
        "scheme": "crbc",
        "gamma": 1.0,
        "episode_weight": 0.0,
        "step_weight": 1.0,
        "normalize": "none",
    },
    "g2po": {"scheme": "g2po"},
    "g2po, gamma 1, means alone": {"scheme": "g2po", "gamma": 1.0, "normalize": "none"},
    "judge, right in 4 of 5": {"scheme": "judge"},
    "triage, right in 4 of 5": {"scheme": "triage"},
    "redistribute": {"scheme": "redistribute"},
    "redistribute, group_gae": {"scheme": "redistribute", "then": {"scheme": "group_gae", "lam": 0.0}},
    "tree": {"scheme": "tree"},
    "turn_gae, exact critic, lam .95": {"scheme": "turn_gae", "lam": 0.95},
    "exact values": {"scheme": "turn_gae", "lam": 0.0},
}
"""Rows of the table: a display name and what a recipe has under `credit:`."""
NEED_A_MODEL = ("distill", "info_gain")
ACCURACY = 0.8
"""Share of turns in which the simulated judge names the right role; otherwise it is one of the other three by chance."""

FIRST, SECOND = 0, 1
DECISIONS = {
    "key room": ("take", "skip", 0.4),
    "corridor 0": ("loop", "go on", 0.35),
    "corridor 1": ("loop", "go on", 0.35),
    "room 0": ("collect", "pass", 0.5),
    "room 1": ("collect", "pass", 0.5),
    "room 2": ("collect", "pass", 0.5),
    "door": ("open", "wait", 0.6),
}
"""In an order in which every place comes before those it leads to: the two actions and the probability of the first.
After the second loop there is nothing left to decide in the corridor, so that it takes no turn."""
MU = {"room 0": 0.0, "room 1": 0.0, "room 2": 0.1}


class State(NamedTuple):
    """All that the future depends on."""

    place: str
    has_key: bool

    def label(self, *, aliased: bool = False) -> str:
        return (
            self.place if aliased or self.place == "key room" else f"{self.place} {'key' if self.has_key else 'bare'}"
        )


class Step(NamedTuple):
    """One decision that was sampled."""

    state: State
    action: int
    reward: float
    following: State | None


Outcomes = list[tuple[float, float, State | None]]
"""What an action can lead to: probability, reward, next state (None: the episode is over)."""

START = State("key room", False)
PLACES = list(DECISIONS)
STATES = [START, *(State(place, has_key) for place in PLACES[1:] for has_key in (True, False))]
LISTED = [START, *(State(place, key) for place in ("corridor 0", "room 0", "room 2", "door") for key in (True, False))]
"""The states whose bias is printed: those left out are alike or rare."""


def outcomes(state: State, action: int, amp: float) -> Outcomes:
    place, has_key = state
    if place == "door":
        return [(0.95, 1.0, None), (0.05, 0.0, None)] if has_key and action == FIRST else [(1.0, 0.0, None)]
    following = PLACES[PLACES.index(place) + 1]
    if place == "key room":
        found, missed = State(following, True), State(following, False)
        return [(0.9, 0.0, found), (0.1, 0.0, missed)] if action == FIRST else [(1.0, 0.0, missed)]
    if place in MU:
        after = State(following, has_key)
        return [(0.5, MU[place] + sign * amp, after) for sign in (1, -1)] if action == FIRST else [(1.0, 0.0, after)]
    return [(1.0, 0.0, State(following if action == FIRST else "room 0", has_key))]


class KeyDoor:
    """The decision process with its exact values, by backward enumeration."""

    def __init__(self, amp: float) -> None:
        self.outcomes = {(s, action): outcomes(s, action, amp) for s in STATES for action in (FIRST, SECOND)}
        self.first_S = np.array([DECISIONS[state.place][2] for state in STATES])
        self.values: dict[State | None, float] = {None: 0.0}
        q_SA = np.zeros((len(STATES), 2))
        for s, state in reversed(list(enumerate(STATES))):
            for action in (FIRST, SECOND):
                paths = self.outcomes[state, action]
                q_SA[s, action] = sum(p * (reward + self.values[after]) for p, reward, after in paths)
            self.values[state] = float(self.first_S[s] * q_SA[s, FIRST] + (1 - self.first_S[s]) * q_SA[s, SECOND])
        self.advantages_SA = q_SA - np.array([self.values[state] for state in STATES])[:, None]
        self.advantages_SA[np.abs(self.advantages_SA) < 1e-12] = 0.0  # rounding of what is 0
        visits: dict[State | None, float] = dict.fromkeys([*STATES, None], 0.0) | {START: 1.0}
        for s, state in enumerate(STATES):
            for action, share in ((FIRST, self.first_S[s]), (SECOND, 1 - self.first_S[s])):
                for p, _, after in self.outcomes[state, action]:
                    visits[after] += visits[state] * share * p
        visits_S = np.array([visits[state] for state in STATES])
        self.gradient_S = visits_S * self.first_S * (1 - self.first_S) * (q_SA[:, FIRST] - q_SA[:, SECOND])
        self._check()

    def _check(self) -> None:
        expected_SA = np.zeros((len(STATES), 2))
        expected_SA[STATES.index(START)] = 0.3078, -0.2052
        expected_SA[STATES.index(State("door", True))] = 0.38, -0.57
        for has_key in (True, False):
            expected_SA[STATES.index(State("room 2", has_key))] = 0.05, -0.05
        assert abs(self.values[START] - 0.2552) < 1e-4, self.values[START]
        assert np.abs(self.advantages_SA - expected_SA).max() < 1e-4, self.advantages_SA
        assert not self.advantages_SA[expected_SA == 0].any(), self.advantages_SA

    def play(self, state: State | None, rng: np.random.Generator) -> list[Step]:
        """Follow the policy from `state` to the end."""
        steps = []
        while state is not None:
            action = FIRST if rng.random() < DECISIONS[state.place][2] else SECOND
            paths = self.outcomes[state, action]
            _, reward, after = paths[0] if len(paths) == 1 or rng.random() < paths[0][0] else paths[1]
            steps.append(Step(state, action, reward, after))
            state = after
        return steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Sampled groups, and the same decisions as columns."""

    groups: list[TrajectoryGroup]
    group_N: Ints
    state_N: Ints
    action_N: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """What one scheme made of one batch."""

    columns: dict[str, float]
    """The columns of the table."""
    bias_SA: Array
    """Mean scaled credit less exact advantage."""


def sample(process: KeyDoor, *, seed: int, num_groups: int, group_size: int, num_branches: int) -> Batch:
    # Rollouts that are forked have random numbers of their own, so that the trajectories are the same without them.
    rng, fork_rng, judge_rng = (np.random.default_rng([seed, n]) for n in range(3))

    def score(step: Step) -> float:
        exact = float(process.advantages_SA[STATES.index(step.state), step.action])
        role = "progress" if exact > 0 else "regression" if exact < 0 else "infrastructure"
        if judge_rng.random() < ACCURACY:
            return ROLES[role]
        return ROLES[judge_rng.choice([other for other in ROLES if other != role])]

    def turn(step: Step) -> Turn:
        first, second, p = DECISIONS[step.state.place]
        forks = [process.play(step.state, fork_rng) for _ in range(num_branches)]
        return Turn(
            observation_ids=(STATES.index(step.state),),
            action_ids=(len(STATES) + step.action,),
            behavior_logprobs=(math.log(p if step.action == FIRST else 1 - p),),
            versions=(0,),
            reward=step.reward,
            state_key=step.state.label(),
            next_state_key=None if step.following is None else step.following.label(),
            action_key=first if step.action == FIRST else second,
            signals={"values": (process.values[step.state],), "turn_scores": score(step)},
            branch_rewards=tuple(tuple(s.reward for s in fork) for fork in forks) if forks else None,
        )

    groups: list[TrajectoryGroup] = []
    columns: list[tuple[int, int, int]] = []
    for g in range(num_groups):
        trajectories = []
        for i in range(group_size):
            steps = process.play(START, rng)
            columns += [(g, STATES.index(step.state), step.action) for step in steps]
            trajectories.append(
                Trajectory(
                    group_id=f"{g}",
                    trajectory_id=f"{g}/{i}",
                    env_id="key_door_distractor",
                    seed=g,
                    turns=tuple(turn(step) for step in steps),
                    stop_reason=StopReason.TERMINATED,
                )
            )
        groups.append(TrajectoryGroup(group_id=f"{g}", trajectories=tuple(trajectories)))
    group_N, state_N, action_N = np.array(columns, dtype=np.int64).T
    return Batch(groups=groups, group_N=group_N, state_N=state_N, action_N=action_N)


def aliased(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Leave out of the state keys whether the key is held."""
    short = {state.label(): state.label(aliased=True) for state in STATES}

    def rename(turn: Turn) -> Turn:
        after = turn.next_state_key
        return replace(
            turn, state_key=short[turn.state_key or ""], next_state_key=None if after is None else short[after]
        )

    def rewrite(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, turns=tuple(rename(turn) for turn in trajectory.turns))

    return [replace(group, trajectories=tuple(rewrite(t) for t in group.trajectories)) for group in groups]


def measure(process: KeyDoor, batch: Batch, groups: Sequence[TrajectoryGroup], recipe: dict[str, Any]) -> Measured:
    credits = [credit for row in assign_credit(load_credit(recipe), groups) for credit in row]
    credit_N = np.concatenate([np.where(c.keep_T, c.advantages_T, 0.0) for c in credits]).astype(np.float64)
    exact_N = process.advantages_SA[batch.state_N, batch.action_N]
    # Of the first action's log-odds; with a logit for each action both norms would only grow by the root of 2.
    score_N = (batch.action_N == FIRST) - process.first_S[batch.state_N]
    gradient_GS = np.zeros((len(batch.groups), len(STATES)))
    np.add.at(gradient_GS, (batch.group_N, batch.state_N), credit_N * score_N / len(batch.groups[0].trajectories))
    mean_S, exact_S = gradient_GS.mean(axis=0), process.gradient_S
    scale = float(mean_S @ exact_S / (mean_S @ mean_S))
    total_SA, count_SA = np.zeros((2, len(STATES), 2))
    np.add.at(total_SA, (batch.state_N, batch.action_N), credit_N)
    np.add.at(count_SA, (batch.state_N, batch.action_N), 1)
    columns = {
        "corr": float(np.corrcoef(credit_N, exact_N)[0, 1]),
        "leak": rms(credit_N[exact_N == 0]) / rms(credit_N),
        "cos": float(mean_S @ exact_S / np.linalg.norm(mean_S) / np.linalg.norm(exact_S)),
        "SNR": float(mean_S @ mean_S / gradient_GS.var(axis=0, ddof=1).sum()),
        "scale": scale,
    }
    return Measured(columns=columns, bias_SA=scale * total_SA / np.maximum(count_SA, 1) - process.advantages_SA)


def rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def summarise(found: Sequence[Measured]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds; of the biases the mean."""
    bias_SA = np.mean([one.bias_SA for one in found], axis=0)
    listed = [STATES.index(state) for state in LISTED]
    worst = max(listed, key=lambda s: abs(float(bias_SA[s, FIRST] - bias_SA[s, SECOND])))
    columns = {name: [one.columns[name] for one in found] for name in found[0].columns}
    columns["gap"] = [float(one.bias_SA[worst, FIRST] - one.bias_SA[worst, SECOND]) for one in found]
    ddof = min(1, len(found) - 1)
    return {
        **{name: [float(np.mean(values)), float(np.std(values, ddof=ddof))] for name, values in columns.items()},
        "gap at": STATES[worst].label(),
        "bias": {
            STATES[s].label(): dict(zip(DECISIONS[STATES[s].place][:2], bias_SA[s].tolist(), strict=True))
            for s in listed
        },
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    columns, control = ("corr", "leak", "cos", "SNR", "scale", "gap"), ("corr", "cos", "SNR")
    titles = "".join(f"{title:>15}" for title in (*columns, *(f"shuffled {name}" for name in control)))
    print(f"{'':32}{titles}  gap at")
    for row in rows:
        shown = [*(row["own"][name] for name in columns), *(row["shuffled"][name] for name in control)]
        cells = "".join(f"{f'{mean:.3f} ± {sd:.3f}':>15}" for mean, sd in shown)
        print(f"{row['scheme']:32}{cells}  {row['own']['gap at']}")
    print("\nbias by situation, mean over the seeds")
    print(f"{'':32}{''.join(f'{state.label():>17}' for state in LISTED)}")
    print(f"{'':32}{''.join(f'{first:>10}{second:>7}' for first, second, _ in (DECISIONS[s.place] for s in LISTED))}")
    for row in rows:
        pairs = [tuple(bias.values()) for bias in row["own"]["bias"].values()]
        print(f"{row['scheme']:32}{''.join(f'{first:>+10.2f}{second:>+7.2f}' for first, second in pairs)}")


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one line of panels for each AMP: filled dots are schemes, hollow ones their shuffled controls."""
    from matplotlib import pyplot as plt  # only who asks for a plot needs it

    plt.switch_backend("Agg")
    amps, schemes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("amp", "scheme"))
    titles = {"corr": "correlation of advantages", "SNR": "SNR of the gradient", "cos": "cosine of the gradient"}
    size = (13, 1.2 + 0.27 * len(schemes) * len(amps))
    figure, axes = plt.subplots(len(amps), len(titles), figsize=size, sharey=True, sharex="col", squeeze=False)
    for axis, (amp, (name, title)) in zip(axes.flat, product(amps, titles.items()), strict=True):
        for kind, face in (("shuffled", "white"), ("own", "tab:blue")):
            means, sds = np.array([row[kind][name] for row in rows if row["amp"] == amp]).T
            style = {"fmt": "o", "color": "tab:blue", "mfc": face, "ms": 5, "elinewidth": 1}
            axis.errorbar(means, schemes, xerr=sds, label=kind.replace("own", "scheme"), **style)
        axis.set_title(f"{title}, AMP {amp:g}", fontsize=10)
        axis.set_xscale("log" if name == "SNR" else "linear")
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes[0, 0].invert_yaxis()
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--amps", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--branches", type=int, default=4, help="rollouts forked before each turn, where a scheme asks")
    helped = "rows repeated with state keys that leave out whether the key is held"
    parser.add_argument(
        "--aliased", nargs="*", choices=SCHEMES, metavar="ROW", default=["group_gae, lam 0"], help=helped
    )
    parser.add_argument("--rows", nargs="+", choices=SCHEMES, metavar="ROW", default=[*SCHEMES], help="rows to measure")
    parser.add_argument("--plot", type=Path, help="an SVG or PNG file; needs matplotlib")
    options = parser.parse_args()
    begin = time.perf_counter()
    chosen = {}
    for name in options.rows:
        recipe = SCHEMES[name]
        if recipe["scheme"] not in names("agentrl.credit"):
            print(f"skipped: {name} ({recipe['scheme']!r} is not installed)")
            continue
        chosen[name] = (recipe, False)
        if name in options.aliased:
            chosen[f"{name}, aliased"] = (recipe, True)
    print(f"without a language model there is nothing to measure for: {', '.join(NEED_A_MODEL)}")
    forks = any(Need.BRANCHES in load_credit(recipe).requirements() for recipe, _ in chosen.values())
    sizes = {"num_groups": options.groups, "group_size": options.group_size}
    rows: list[dict[str, Any]] = []
    for amp in options.amps:
        process = KeyDoor(amp)
        own: dict[str, list[Measured]] = {name: [] for name in chosen}
        shuffled: dict[str, list[Measured]] = {name: [] for name in chosen}
        for seed in options.seeds:
            batch = sample(process, seed=seed, num_branches=options.branches if forks else 0, **sizes)
            short = aliased(batch.groups) if any(alias for _, alias in chosen.values()) else []
            for name, (recipe, alias) in chosen.items():
                control = {"scheme": "shuffled", "of": recipe, "seed": seed}
                groups = short if alias else batch.groups
                own[name].append(measure(process, batch, groups, recipe))
                shuffled[name].append(measure(process, batch, groups, control))
        table = [
            {"amp": amp, "scheme": name, "recipe": recipe, "aliased": alias}
            | {"own": summarise(own[name]), "shuffled": summarise(shuffled[name])}
            for name, (recipe, alias) in chosen.items()
        ]
        print(
            f"\nAMP {amp:g}: {options.groups} groups of {options.group_size}, mean ± standard deviation over "
            f"{len(options.seeds)} seeds; leak relative to the RMS of all credit; gap and bias of credit * scale"
        )
        print_table(table)
        rows += table
    if options.plot:
        plot(rows, options.plot)
    settings = {key: value for key, value in vars(options).items() if key != "plot"}
    print(json.dumps({**settings, "minutes": (time.perf_counter() - begin) / 60, "rows": rows}))


if __name__ == "__main__":
    main()
