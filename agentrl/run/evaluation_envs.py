"""The environments that a run is evaluated in: its own, or those that `evaluation.env` names."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

from agentrl.config import Recipe
from agentrl.errors import UserError
from agentrl.rollout import RolloutPool, Tasks, describe_env
from agentrl.rollout.environments import Environments


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnv:
    """An environment to evaluate in."""

    name: str
    """Its metrics are `eval/NAME/...`. Empty: the only one, whose metrics are `eval/...`."""
    environments: Environments
    tasks: Tasks
    has_tools: bool

    @property
    def prefix(self) -> str:
        """Of its metrics and groups."""
        return f"eval/{self.name}/" if self.name else "eval/"


def describe_others(recipe: Recipe, runner: asyncio.Runner, stack: ExitStack) -> tuple[EvaluationEnv, ...]:
    """Look at the environments that `evaluation.env` names; they are closed with the stack.

    Raises:
        UserError: naming the one that cannot be made, or has no evaluation tasks.
    """
    found = []
    for name, env in recipe.evaluation.env.items():
        try:
            description = runner.run(describe_env(env.make, timeout_s=recipe.rollout.env_timeout_s))
            tasks = Tasks(seed=recipe.seed, evaluation_seed=recipe.evaluation.seed, num=description.num_tasks)
            tasks.evaluation(1)
        except UserError as error:
            raise type(error)(f"evaluation.env{f'.{name}' if name else ''}: {error}") from error
        environments = Environments(env.make)
        stack.callback(environments.close)
        found.append(
            EvaluationEnv(name=name, environments=environments, tasks=tasks, has_tools=bool(description.tools))
        )
    return tuple(found)


def own_env(pool: RolloutPool, *, has_tools: bool) -> EvaluationEnv:
    """Return the environment that the run trains in.

    Raises:
        ConfigError: where it has no evaluation tasks.
    """
    pool.tasks.evaluation(1)
    return EvaluationEnv(name="", environments=pool.environments, tasks=pool.tasks, has_tools=has_tools)
