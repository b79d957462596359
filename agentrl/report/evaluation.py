"""An evaluation as tables for the terminal, and as one JSON object."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.rollout.evaluation import Evaluation, TaskResult

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


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a recipe, as it is written down, decides what an evaluation of given weights finds."""
    evaluation, rollout = config["evaluation"], config["rollout"]
    envs = evaluation["env"] or {"": config["env"]}
    limits = ("max_turns", "max_turn_tokens", "max_episode_tokens", "max_context_tokens", "history")
    return {
        "env": {name: {key: env[key] for key in ("id", "options", "wrappers")} for name, env in envs.items()},
        "seed": config["seed"] if evaluation["seed"] is None else evaluation["seed"],
        **{key: evaluation[key] for key in ("num_tasks", "samples", "temperature")},
        **{key: rollout[key] for key in limits},
        "chat": config["chat"],
    }


def is_failed(task: TaskResult) -> bool:
    """Tell whether no episode of a task solved it; where success is not reported, whether every episode of it failed."""
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
