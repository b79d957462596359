"""Evaluation on the tasks of the eval split, with 95 % intervals over tasks.

The intervals treat tasks as clusters, because episodes of one task are not independent.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import comb
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from agentrl.data.plain import is_number
from agentrl.env.make import EnvConfig
from agentrl.rollout.pool import RolloutPool
from agentrl.types import AmountOrZero, Count, Prompt, StopReason, TaskShard, Trajectory, TrajectoryGroup, between


class Interval(NamedTuple):
    """A 95 % confidence interval over tasks."""

    low: float
    high: float


class EvaluationConfig(BaseModel):
    """Evaluation of the policy on tasks of the eval split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: AmountOrZero = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    num_tasks: Count = 128
    """Evaluation tasks, each evaluated exactly once (`samples` episodes each); fewer if the environment has fewer."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of the evaluation tasks: runs of several seeds that share it are evaluated on the same tasks. None: the run's."""
    samples: Count = 1
    """Episodes per task."""
    pass_at: tuple[PositiveInt, ...] = (1,)
    """The k of pass@k, each at most `samples`."""
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]*$")], EnvConfig] = {}
    """Other environments to evaluate in, by name: their metrics are `eval/NAME/...`. One may stand alone (`{id: ...}`), as
    `eval/...`. None: that of training."""
    temperature: Annotated[float, Field(ge=0), between(0, 100)] = 1.0
    """Sampling temperature; 0 takes the most probable token."""

    @field_validator("env", mode="before")
    @classmethod
    def _named(cls, given: object) -> object:
        """Give a lone environment the empty name."""
        is_alone = isinstance(given, EnvConfig) or (isinstance(given, dict) and isinstance(given.get("id"), str))
        return {"": given} if is_alone else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if max(self.pass_at, default=1) > self.samples:
            raise ValueError(f"pass_at: {max(self.pass_at)} needs as many samples, got samples: {self.samples}")
        for name, env in self.env.items():
            if env.schedule:
                field = ".".join(filter(None, ("env", name, "schedule")))
                raise ValueError(f"{field}: every evaluation is in the same environment; give its options alone")
        return self

    def with_prompt(self, prompt: Prompt) -> Self:
        """Fill in the option `prompt` of each environment that has one and leaves it open."""
        return self.model_copy(update={"env": {name: env.with_prompt(prompt) for name, env in self.env.items()}})


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the chance that at least one of k samples is right: 1 - C(n - c, k) / C(n, k), arXiv 2107.03374 eq. 1."""
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of an evaluation."""

    metrics: dict[str, float]
    """`reward`, `failed`, and so on; `success` (fraction of episodes) and `pass@k` if any episode reports success."""
    groups: list[TrajectoryGroup]
    panel: tuple[str | None, ...]
    """Hash of the first messages and keys of each task. None: every episode of it failed before them."""

    def intervals(self) -> dict[str, Interval]:
        """Return 95 % intervals over tasks: of `reward`, and of `success`, `pass@k` and `score` if they are reported."""
        valid = [group.valid for group in self.groups]
        found = {"reward": mean_interval([[t.reward for t in group] for group in valid])}
        names = {name for group in valid for t in group for name in t.metrics}
        if "success" in names:
            known = [reported(group, "success") for group in valid]
            found["success"] = share_interval(known)
            right = [(len(successes), sum(value > 0 for value in successes)) for successes in known]
            names_of_k = [name for name in self.metrics if name.startswith("pass@")]
            found |= {name: pass_interval(right, int(name.removeprefix("pass@"))) for name in names_of_k}
        if "score" in names:
            found["score"] = mean_interval([reported(group, "score") for group in valid])
        return {name: interval for name, interval in found.items() if interval is not None}

    def tasks(self) -> list["TaskResult"]:
        """Return the result of each task."""
        has_success = any("success" in t.metrics for group in self.groups for t in group.valid)
        return [_result(group, has_success=has_success) for group in self.groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Result of one evaluation task."""

    group_id: str
    seed: int
    task_index: int | None
    """Its number in the eval split. None: tasks follow from the seed."""
    episodes: int
    """Number of episodes, including failed ones."""
    solved: int | None
    """Number of successes. None: the environment does not report success."""
    reward: float | None
    """Mean over episodes that did not fail, and were scored. None: there is none."""
    stop_reasons: dict[str, int]
    error: str | None
    """Error of the first episode that has one."""


def _result(group: TrajectoryGroup, *, has_success: bool) -> TaskResult:
    first, valid = group.trajectories[0], group.valid
    return TaskResult(
        group_id=group.group_id,
        seed=first.seed,
        task_index=first.task_index,
        episodes=len(group.trajectories),
        solved=sum(value > 0 for value in reported(valid, "success")) if has_success else None,
        reward=float(np.mean([t.reward for t in valid])) if valid else None,
        stop_reasons=dict(Counter(str(t.stop_reason) for t in group.trajectories)),
        error=next((t.error for t in group.trajectories if t.error), None),
    )


async def play_evaluation(
    pool: RolloutPool, config: EvaluationConfig, *, shard: TaskShard, prefix: str = "eval/"
) -> list[TrajectoryGroup]:
    """Play this rank's evaluation tasks, sharded as training tasks are; group ids begin with `prefix`."""
    tasks = {f"{prefix}{place:06d}": task for place, task in enumerate(pool.tasks.evaluation(config.num_tasks))}
    own = islice(tasks.items(), shard.process, None, shard.num_processes) if shard.num_groups else ()
    return await pool.play(dict(own), group_size=config.samples)


def summarize_evaluation(groups: Iterable[TrajectoryGroup], config: EvaluationConfig) -> Evaluation:
    """Compute the metrics of played evaluation tasks.

    Episodes that failed, or that nothing could score, are left out of every mean and counted in `failed` and `unscored`.
    """
    groups = sorted(groups, key=lambda group: group.group_id)
    trajectories = [t for group in groups for t in group.valid]
    everyone = [t for group in groups for t in group.trajectories]
    num_unscored = sum(t.stop_reason is StopReason.UNSCORED for t in everyone)
    metrics = {
        "episodes": float(len(trajectories)),
        "failed": float(len(everyone) - len(trajectories) - num_unscored),
        "unscored": float(num_unscored),
    }
    if trajectories:
        metrics["reward"] = float(np.mean([t.reward for t in trajectories]))
        metrics["turns"] = float(np.mean([len(t.turns) for t in trajectories]))
        metrics["action_tokens"] = float(np.mean([t.num_action_tokens for t in trajectories]))
        metrics |= stop_shares(everyone)
        parts = {f"reward/{name}": value for name, value in component_means(trajectories).items()}
        metrics = reported_means(trajectories) | parts | metrics
        if any("success" in t.metrics for t in trajectories):
            known = [reported(group.valid, "success") for group in groups]
            right = [(len(successes), sum(value > 0 for value in successes)) for successes in known]
            for k in config.pass_at:
                if rates := [pass_at_k(n, c, k) for n, c in right if n >= k]:
                    metrics[f"pass@{k}"] = float(np.mean(rates))
    return Evaluation(metrics=metrics, groups=groups, panel=tuple(map(_hash_of_task, groups)))


def stop_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of episodes that ended for each reason, as `stop/REASON`; of programs' reasons, if programs played."""
    has_programs = any(turn.call for t in trajectories for turn in t.turns[:1])
    reasons = [reason for reason in StopReason if has_programs or reason is not StopReason.AGENT_ERROR]
    return {f"stop/{reason}": float(np.mean([t.stop_reason is reason for t in trajectories])) for reason in reasons}


def _hash_of_task(group: TrajectoryGroup) -> str | None:
    begun = next((t for t in group.trajectories if t.turns), None)
    if begun is None:
        return None
    first = begun.turns[0]
    identity = repr((first.observation, begun.gold_answer, first.state_key))
    return hashlib.sha256(identity.encode(errors="backslashreplace")).hexdigest()[:12]


def reported(trajectories: Iterable[Trajectory], name: str) -> list[float]:
    """List what environments report at the end of each episode: 0 for one cut off before that, nothing for None."""
    return [value for t in trajectories if (value := t.reported(name)) is not None]


def reported_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Average the numbers that environments report at the end of an episode; one cut off before that counts as 0."""
    names = {name for t in trajectories for name in t.metrics} - {"env_s"}
    return {name: float(np.mean(reported(trajectories, name))) for name in sorted(names)}


def component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Average the total of each reward component per episode; 0 if it did not occur."""
    totals: dict[str, float] = {}
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        components = turn.extras.get("reward_components")
        for name, amount in components.items() if isinstance(components, dict) else ():
            totals[name] = totals.get(name, 0.0) + (float(amount) if is_number(amount) else 0.0)
    return {name: totals[name] / len(trajectories) for name in sorted(totals)}


_Z = 1.959963984540054
_T_FEW = {1: 12.7062, 2: 4.3027}
"""Quantiles of Student's t at .975, for degrees of freedom too few for the series in `student`."""


def wilson(share: float, num: float) -> Interval:
    """Return Wilson's score interval of a share of `num` independent trials (JASA 22, 1927).

        (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Raises:
        ValueError: for a share out of [0, 1], or a number that is not above 0.
    """
    if not (0 <= share <= 1 and num > 0):
        raise ValueError(f"expected a share in [0, 1] of more than 0 trials, got {share} of {num}")
    scale, center = 1 + _Z**2 / num, share + _Z**2 / (2 * num)
    spread = _Z * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    return Interval(max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale))


def share_interval(tasks: Sequence[Sequence[float]]) -> Interval | None:
    """Return the interval of a fraction of episodes (0 or 1 each, one row per task). None: there is no episode.

    With one episode per task it is Wilson's. With several, it is Wilson's for the number of independent episodes that has the
    variance of the tasks; if all are equal, for the number of tasks.
    """
    tasks = [task for task in tasks if len(task)]
    if not tasks:
        return None
    num, share = sum(map(len, tasks)), _mean(tasks)
    return _share_interval(share, _variance(tasks), num_tasks=len(tasks), num=num)


def pass_interval(right: Sequence[tuple[int, int]], k: int) -> Interval | None:
    """Return the interval of pass@k, from the number of episodes and of successes of each task. None: all have fewer than k.

    It is Wilson's, as of a fraction of sets of k episodes each, whose independent number has the variance of the tasks.
    """
    enough = [(n, c) for n, c in right if n >= k]
    if not enough:
        return None
    rates = [[pass_at_k(n, c, k)] for n, c in enough]
    num = sum(n for n, _ in enough) / k
    return _share_interval(_mean(rates), _variance(rates), num_tasks=len(rates), num=num)


def _share_interval(share: float, variance: float, *, num_tasks: int, num: float) -> Interval:
    if num == num_tasks:  # one episode, or set of episodes, each
        return wilson(share, num)
    independent = num_tasks if not variance else share * (1 - share) / variance
    return wilson(share, min(max(independent, 1.0), num))


def mean_interval(tasks: Sequence[Sequence[float]]) -> Interval | None:
    """Return the interval of a mean over episodes, one row per task. None: there are fewer than two tasks.

        m +- t_{k - 1} sqrt(k / (k - 1) sum over tasks of (sum over its episodes of (y - m))^2) / N

    the cluster-robust variance of k tasks with N episodes.
    """
    tasks = [task for task in tasks if len(task)]
    if len(tasks) < 2:
        return None
    spread, mean = student(len(tasks) - 1) * math.sqrt(_variance(tasks)), _mean(tasks)
    return Interval(mean - spread, mean + spread)


def student(degrees: int) -> float:
    """Return the quantile of Student's t at .975, to 1 % (Abramowitz and Stegun 26.7.5)."""
    if degrees in _T_FEW:
        return _T_FEW[degrees]
    z, v = _Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))


def _mean(tasks: Sequence[Sequence[float]]) -> float:
    return float(np.mean(np.concatenate([np.asarray(task, dtype=np.float64) for task in tasks])))


def _variance(tasks: Sequence[Sequence[float]]) -> float:
    """Return the cluster-robust variance of the mean over all episodes, with tasks as clusters."""
    mean = _mean(tasks)
    num = sum(map(len, tasks))
    k = len(tasks)
    if k < 2:
        return 0.0
    residuals = [float(np.sum(np.asarray(task, dtype=np.float64) - mean)) for task in tasks]
    return k / (k - 1) * sum(residual**2 for residual in residuals) / num**2
