"""Demonstrations: episodes played by the environment's own `oracle()`."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from agentrl.chat import Dialogue, HistoryConfig, Renderer, TurnTokens
from agentrl.env import ask_oracle, base_env, close_env
from agentrl.errors import ConfigError, EnvError, EnvironmentFailure, UserError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.env_driver import Env, EnvThread, MakeEnv, construct, reset, step
from agentrl.rollout.faults import RaisedError
from agentrl.rollout.tasks import EnvTask, Tasks, derive_seed

_ORACLE_TASKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One episode played by the environment's oracle; none of it was sampled."""

    turns: tuple[TurnTokens, ...]
    is_over: bool
    """False: `max_turns` ended it."""


def demonstrate(
    make_env: MakeEnv, renderer: Renderer, *, task: EnvTask, skill: float, max_turns: int, view: HistoryConfig
) -> Demonstration:
    """Play one episode with the environment's oracle."""
    env = construct(make_env)
    try:
        return _play(env, renderer, task, skill=skill, max_turns=max_turns, view=view)
    finally:
        close_env(env)


def _play(
    env: Env, renderer: Renderer, task: EnvTask, *, skill: float, max_turns: int, view: HistoryConfig
) -> Demonstration:
    base = base_env(env)
    rng = np.random.default_rng(derive_seed(task.seed, "oracle"))
    reply = reset(env, base, task, rollout_index=0)
    dialogue = Dialogue.begin(reply.messages, reply.tools, renderer, view=view)
    turns: list[TurnTokens] = []
    is_over = False
    while not is_over and len(turns) < max_turns:
        message = ask_oracle(base, skill=skill, rng=rng)
        action_ids = renderer.encode(message)
        turns.append(dialogue.turn(action_ids))
        reply = step(env, base, message)
        is_over = reply.terminated or reply.truncated
        dialogue = dialogue.after(action_ids, message, reply.messages, renderer)
    return Demonstration(turns=tuple(turns), is_over=is_over)


async def oracle_ends(make_env: MakeEnv, *, max_turns: int, timeout_s: float, tasks: Tasks) -> bool | None:
    """Return whether the oracle at its best ends one of a few episodes within `max_turns`. None: there is no oracle.

    Raises:
        EnvironmentFailure: with the message of an error, or when an episode hangs.
    """

    def ends(task: EnvTask) -> bool:
        env = construct(make_env)
        try:
            base, rng = base_env(env), np.random.default_rng(task.seed)
            reset(env, base, task, rollout_index=0)
            replies = (step(env, base, ask_oracle(base, rng=rng)) for _ in range(max_turns))
            return any(reply.terminated or reply.truncated for reply in replies)
        finally:
            close_env(env)

    tasks = replace(tasks, seed=derive_seed(tasks.seed, "oracle"))
    with EnvThread() as thread:
        try:
            for task in map(tasks.train, range(_ORACLE_TASKS)):
                if await thread.call(partial(ends, task), timeout_s=timeout_s * (max_turns + 2)):
                    return True
        except TimeoutError as error:
            raise EnvironmentFailure(f"{_where(task)} did not return") from error
        except RaisedError as error:
            if isinstance(error.raised, NotImplementedError):
                return None
            raise EnvironmentFailure(f"{_where(task)}{_words(error)}") from error
    return False


async def demonstrations(
    make_env: MakeEnv, renderer: Renderer, *, count: int, skill: float, config: RolloutConfig, tasks: Tasks
) -> list[Demonstration]:
    """Play demonstrations on tasks of the training split.

    The deadline of each is `env_timeout_s` times the calls that it may make: construction, reset, turns.

    Raises:
        ConfigError: when the environment has no oracle.
        EnvironmentFailure: with the message of an error, or when an episode hangs.
    """
    tasks = replace(tasks, seed=derive_seed(tasks.seed, "demonstrations"))
    max_turns = config.max_turns
    limit_s = config.env_timeout_s * (max_turns + 2)
    what = "a demonstration with the environment's oracle()"
    played = []
    with EnvThread() as thread:
        try:
            for index in range(count):
                task = tasks.train(index)
                play = partial(
                    demonstrate, make_env, renderer, task=task, skill=skill, max_turns=max_turns, view=config.history
                )
                played.append(await thread.call(play, timeout_s=limit_s))
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"{what} did not end within {limit_s:g} s (rollout.env_timeout_s for each of its calls)"
            ) from error
        except RaisedError as error:
            if isinstance(error.raised, UserError):
                raise error.raised from None
            if isinstance(error.raised, NotImplementedError):
                raise ConfigError(f"env.id: {error.line}") from error
            raise EnvironmentFailure(f"{what}{_words(error)}") from error
    return played


def _where(task: EnvTask) -> str:
    return f"an episode with the environment's oracle(), task seed {task.seed}"


def _words(error: RaisedError) -> str:
    """Return the error of an episode, to follow its description."""
    return f": {error.raised}" if isinstance(error.raised, EnvError) else f" raised {error.line}"
