"""What an environment says of itself, looked at once."""

import operator
from dataclasses import dataclass
from typing import Any

from agentrl.env.message_env import MessageEnv
from agentrl.env.tools import tool_schemas
from agentrl.errors import EnvironmentFailure
from agentrl.plain_data import PlainDataError, abbreviated
from agentrl.types import Need, NumTasks, Split, TaskHashes

MAX_TASKS = 10**8
"""Tasks of a split: each epoch has an order of its own, of eight bytes a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvDescription:
    """What an environment offers to credit schemes, to the model and to the order of tasks."""

    needs: frozenset[Need]
    """Data that credit schemes may read from it."""
    tools: list[dict[str, Any]]
    """JSON schemas of its tools."""
    num_tasks: NumTasks
    task_hashes: TaskHashes


def describe(env: MessageEnv) -> EnvDescription:
    """Return what an environment offers.

    Raises:
        EnvironmentFailure: naming what `provides()`, `tools`, `num_tasks()` or `tasks_hash()` should be.
    """
    name, provided = type(env).__name__, env.provides()
    if not isinstance(provided, set | frozenset) or not all(need in list(Need) for need in provided):
        raise EnvironmentFailure(
            f"environment {name}: provides() returned {abbreviated(provided)}; return a frozenset of agentrl.Need"
        )
    try:
        tools = tool_schemas(env.tools)
    except PlainDataError as error:
        raise EnvironmentFailure(f"environment {name}: {error}") from error
    num_tasks = NumTasks(train=_num_tasks(env, "train"), eval=_num_tasks(env, "eval"))
    hashes = TaskHashes(train=_tasks_hash(env, "train"), eval=_tasks_hash(env, "eval"))
    return EnvDescription(needs=frozenset(map(Need, provided)), tools=tools, num_tasks=num_tasks, task_hashes=hashes)


def _tasks_hash(env: MessageEnv, split: Split) -> str | None:
    given: object = env.tasks_hash(split)
    if given is not None and not isinstance(given, str):
        raise EnvironmentFailure(
            f"environment {type(env).__name__}: tasks_hash({split!r}) returned {abbreviated(given)}; return a str, or None"
        )
    return given


def _num_tasks(env: MessageEnv, split: Split) -> int | None:
    given: Any = env.num_tasks(split)  # of a stranger's: it may be anything
    if given is None:
        return None
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = -1
    if number > MAX_TASKS:
        raise EnvironmentFailure(
            f"environment {type(env).__name__}: num_tasks({split!r}) returned {abbreviated(given)}; an order is kept of up to "
            f"{MAX_TASKS:,} tasks: return None, and let tasks follow from the seed"
        )
    if number < 0:
        raise EnvironmentFailure(
            f"environment {type(env).__name__}: num_tasks({split!r}) returned {abbreviated(given)}; return the number of "
            "tasks, or None where they follow from the seed"
        )
    return int(number)
