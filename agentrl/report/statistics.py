"""Statistics of a few seeds (intervals, tests and power of paired differences), curves as a picture, evaluations as tables.

A run is one observation, whatever the number of its tasks: runs of one recipe differ by their seeds.
"""

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from agentrl.errors import ConfigError, UserError
from agentrl.rollout.evaluation import Evaluation, TaskResult

_MOST_SEEDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, with what it could as well be."""

    mean: float
    low: float | None
    """Ends of the interval. None: one value alone, or values without spread, give none."""
    high: float | None
    p: float | None
    """p value: how often a mean as far from 0 comes by chance if the true one is 0 (two-sided). None: no interval either."""


def estimate(values: Sequence[float], *, level: float = 0.95) -> Estimate:
    """Estimate a mean; of paired differences, this is the paired t-test.

        mean ± t_{(1 + level) / 2, n - 1} * sd / sqrt(n)

    Source: Student 1908. Exact for normal values; `benchmarks/compare_coverage.py` has the coverage for others: it holds 93 to
    97 % where both recipes' outcomes have a similar shape, and falls to about 90 % where one's trail off to one side.

    Raises:
        ValueError: for no value at all, and for one that is not finite.
    """
    values_N = _checked(values)
    mean, num = float(values_N.mean()), len(values_N)
    sd = spread(values)
    if sd is None or sd <= 1e-12 * max(1.0, float(abs(values_N).max())):
        return Estimate(mean=mean, low=None, high=None, p=None)
    error = sd / math.sqrt(num)
    half = t_quantile((1 + level) / 2, num - 1) * error
    return Estimate(mean=mean, low=mean - half, high=mean + half, p=1 - t_within(abs(mean) / error, num - 1))


def within(metric: str, value: float | None) -> float | None:
    """Return an end of a metric's interval where the metric can be: a share is between 0 and 1."""
    name = metric.rpartition("/")[2]
    is_share = name == "success" or name.startswith("pass@")
    return min(1.0, max(0.0, value)) if is_share and value is not None else value


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation, which divides by n - 1. None: of one value."""
    values_N = _checked(values)
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else None


def skewness(values: Sequence[float]) -> float:
    """Return the third central moment over the standard deviation cubed, both dividing by n; 0 without spread."""
    centred_N = _checked(values) - np.mean(values)
    sd = float(np.sqrt(np.mean(centred_N**2)))
    return float(np.mean(centred_N**3)) / sd**3 if sd > 0 else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for their number: the chance that any of the true null hypotheses is rejected stays below the level.

        p'_(i) = max over j <= i of min(1, (m - j + 1) * p_(j)),    p_(1) <= ... <= p_(m)

    Source: Holm 1979.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def power(effect: float, *, sd: float, num: int, alpha: float = 0.05) -> float:
    """Return how often n pairs show a true difference (the noncentral t distribution).

        P(|Z + effect * sqrt(n) / sd| > t_{1 - alpha / 2, n - 1} * S),    S^2 = chi^2_{n - 1} / (n - 1)

    Args:
        effect: the true mean difference.
        sd: standard deviation of the differences.
        num: of pairs, at least 2.
        alpha: how often no difference may be taken for one.
    """
    dof = num - 1
    shift, critical = effect * math.sqrt(num) / sd, t_quantile(1 - alpha / 2, dof)
    s_P = (np.arange(2000) + 0.5) * (1 + 8 / math.sqrt(dof)) / 2000  # the middles of 2,000 intervals
    log_density_P = (dof - 1) * np.log(s_P) - dof * s_P**2 / 2
    weight_P = np.exp(log_density_P - log_density_P.max())
    beyond_P = [_normal(shift - critical * s) + _normal(-shift - critical * s) for s in s_P]
    return float(np.average(beyond_P, weights=weight_P))


def seeds_to_see(effect: float, *, sd: float, wanted: float = 0.8) -> int | None:
    """Return how many pairs show a true difference as often as `wanted`. None: more than 1,000."""
    low, high = 2, _MOST_SEEDS
    if power(effect, sd=sd, num=high) < wanted:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, sd=sd, num=middle) >= wanted else (middle + 1, high)
    return low


def smallest_seen(*, sd: float, num: int, wanted: float = 0.8) -> float:
    """Return the smallest true difference that n pairs show as often as `wanted`."""
    low, high = 0.0, 100 * sd
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, sd=sd, num=num) >= wanted else (middle, high)
    return high


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """Return the area under a curve by the trapezoidal rule, over the length of its base: its mean height."""
    widths = np.diff(np.asarray(steps, dtype=np.float64))
    heights = np.asarray(values, dtype=np.float64)
    return float(widths @ (heights[1:] + heights[:-1]) / 2 / widths.sum())


def steps_to(steps: Sequence[float], values: Sequence[float], *, threshold: float) -> float | None:
    """Return the first of the steps at which a curve is at the threshold or above. None: it never is."""
    return next((step for step, value in zip(steps, values, strict=True) if value >= threshold), None)


def t_within(t: float, dof: int) -> float:
    """Return the chance that Student's t lies between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term = total = (cosine if odd else 1.0) if dof > 1 else 0.0
    for k in range(2 + odd, dof, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def t_quantile(p: float, dof: int) -> float:
    """Return the value below which Student's t lies with chance p, which is at least 1/2: by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, dof) < 2 * p - 1:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, dof) < 2 * p - 1 else (low, middle)
    return (low + high) / 2


def _normal(x: float) -> float:
    """Return the chance that a standard normal value is below x."""
    return math.erfc(-x / math.sqrt(2)) / 2


def _checked(values: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    values_N = np.asarray(values, dtype=np.float64)
    if values_N.ndim != 1 or not len(values_N) or not np.isfinite(values_N).all():
        raise ValueError(f"expected one finite number or more, got {list(values)}")
    return values_N


CURVES = ("reward/mean", "episode/success", "eval/success", "entropy", "clip/tokens")
"""Curves that are drawn by default, if the run has them."""


def shown(rows: Sequence[dict[str, float]]) -> list[str]:
    """Return which of `CURVES` a run has."""
    return [name for name in CURVES if any(name in row for row in rows)]


def draw(rows: Sequence[dict[str, float]], names: Sequence[str]) -> Any:
    """Return a matplotlib figure with a curve beside the other.

    Raises:
        UserError: if matplotlib is not installed, or there is no such metric.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise UserError("plot() needs matplotlib: pip install matplotlib") from error
    known = {name for row in rows for name in row}
    rows = with_unreported(rows, known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"plot: the run has no metric {unknown[0]!r}; it has {', '.join(sorted(known))}")
    figure = plt.figure(figsize=(3.2 * max(len(names), 1), 2.6), layout="constrained")
    for place, name in enumerate(names, start=1):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes = figure.add_subplot(1, len(names), place, title=name, xlabel="step")
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 12 else None)
    plt.close(figure)  # a notebook shows what a cell returns, and would show an open one once more
    return figure


_SHOWN = 20
"""Tasks that are listed in the terminal."""


def tables(found: Mapping[str, Evaluation], env_ids: Mapping[str, str], file: Path | None) -> Iterator[Table | Text]:
    """Yield the metrics of each evaluation, with intervals, and the tasks that were not solved.

    Args:
        found: by the prefix of its metrics.
        env_ids: of the environments, by the same.
        file: that holds the rollouts.
    """
    for prefix, evaluation in found.items():
        intervals = evaluation.intervals()
        title = f"{env_ids[prefix]}: {len(evaluation.groups)} evaluation tasks"
        table = Table("metric", "value", "95 % interval", title=title)
        for name, value in evaluation.metrics.items():
            interval = intervals.get(name)
            table.add_row(name, f"{value:.4g}", f"{interval.low:.4g} to {interval.high:.4g}" if interval else "")
        yield table
        yield from _unsolved(evaluation)
    if file is not None:
        yield Text(f"rollouts: {file} (agentrl show {file} --trajectory ID)", "dim")


def as_json(found: Mapping[str, Evaluation], env_ids: Mapping[str, str], file: Path | None) -> dict[str, Any]:
    """Return the same, with every task."""
    evaluations = [
        {
            "name": prefix.removeprefix("eval/").removesuffix("/"),
            "env": env_ids[prefix],
            "metrics": evaluation.metrics,
            "intervals": {name: list(interval) for name, interval in evaluation.intervals().items()},
            "tasks": [asdict(task) for task in evaluation.tasks()],
        }
        for prefix, evaluation in found.items()
    ]
    return {"evaluations": evaluations, "rollouts": None if file is None else str(file)}


_OF_ENV = ("id", "options", "wrappers")
_OF_AGENT = ("run", "command", "url", "tasks", "reward", "check", "files", "variables", "thoughts")


def player_of(config: Mapping[str, Any]) -> str:
    """Return the name of what plays by a recipe, as it is written down: an environment, or a program."""
    agent = config.get("agent")
    if agent is None:
        return str((config.get("env") or {}).get("id"))
    return str(agent.get("run") or agent.get("url") or next(iter(agent.get("command") or ()), "agent"))


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a recipe, as it is written down, decides what an evaluation of given weights finds."""
    evaluation, rollout = config["evaluation"], config["rollout"]
    envs: Mapping[str, Any] = evaluation["env"]
    if envs or config.get("agent") is None:
        envs = {name: {key: env[key] for key in _OF_ENV} for name, env in (envs or {"": config["env"]}).items()}
    else:
        envs = {"": {key: config["agent"][key] for key in _OF_AGENT}}
    limits = ("max_turns", "max_turn_tokens", "max_episode_tokens", "max_context_tokens", "history")
    return {
        "env": envs,
        "seed": config["seed"] if evaluation["seed"] is None else evaluation["seed"],
        **{key: evaluation[key] for key in ("num_tasks", "samples", "temperature")},
        **{key: rollout[key] for key in limits},
        "chat": config["chat"],
    }


def is_failed(task: TaskResult) -> bool:
    """Return whether no episode of a task solved it; if success is not reported, whether every episode of it failed."""
    return task.reward is None if task.solved is None else task.solved == 0


def _unsolved(evaluation: Evaluation) -> Iterator[Table | Text]:
    tasks = evaluation.tasks()
    if not (failed := [task for task in tasks if is_failed(task)]):
        return
    table = Table(
        "task", "seed", "reward", "ended by", "error", title=f"{len(failed)} of {len(tasks)} tasks not solved"
    )
    for task in failed[:_SHOWN]:
        name = task.group_id if task.task_index is None else f"{task.group_id} (row {task.task_index})"
        ends = ", ".join(f"{reason} {number}" for reason, number in task.stop_reasons.items())
        reward = "-" if task.reward is None else f"{task.reward:.3g}"
        table.add_row(name, str(task.seed), reward, ends, Text((task.error or "")[:200]))
    yield table
    if len(failed) > _SHOWN:
        yield Text(f"and {len(failed) - _SHOWN} more; --json has all", "dim")


def best_step(rows: Iterable[Mapping[str, float]], *, among: Container[int]) -> int | None:
    """Return the step with the best evaluation: by success, else score, else reward, averaged over environments.

    Args:
        rows: metrics of steps.
        among: steps that count; the beginning does not. Of equals the last one is the best.
    """
    evaluated = [row for row in rows if row["step"] > 0 and row["step"] in among]
    for measure in ("success", "score", "reward"):
        pattern = re.compile(rf"eval/([^/]+/)?{measure}")
        found = {int(row["step"]): [row[name] for name in row if pattern.fullmatch(name)] for row in evaluated}
        if means := {step: sum(values) / len(values) for step, values in found.items() if values}:
            return max(means, key=lambda step: (means[step], step))
    return None


def with_unreported(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> list[dict[str, float]]:
    """Return rows of metrics in which success, score and pass@k are 0 if episodes were played and none came to report them.

    Args:
        rows: metrics of steps.
        names: metrics of the run, or of others with the same recipe: a run whose every episode is cut off reports nothing.
    """
    reported = [name for name in names if _is_reported(name)]
    return [{**{name: 0.0 for name in reported if _counts(name, row)}, **row} for row in rows]


def _is_reported(name: str) -> bool:
    measure = name.rpartition("/")[2]
    return measure in ("success", "score") or measure.startswith("pass@")


def _counts(name: str, row: Mapping[str, float]) -> bool:
    theme, _, measure = name.rpartition("/")
    if theme == "episode":
        return "reward/mean" in row
    is_too_few = measure.startswith("pass@") and f"{theme}/success" in row  # every task has fewer than k episodes
    return row.get(f"{theme}/episodes", 0.0) > 0 and not is_too_few
