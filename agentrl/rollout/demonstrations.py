"""Episodes that the environment's own `oracle()` plays."""

from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np

from agentrl.chat import Dialogue, Renderer
from agentrl.env import base_env, describe
from agentrl.errors import AgentRLError, ConfigError, EnvironmentFailure
from agentrl.rollout.env_calls import MakeEnv
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.fault import raised_words
from agentrl.rollout.seeds import derive_seed, task_seed
from agentrl.types import Message

_ORACLE_TASKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstratedTurn:
    """The tokens of one turn, as a policy would read and sample them."""

    observation_ids: tuple[int, ...]
    """What the environment's messages added before the action; the whole context where `extends` is False."""
    extends: bool
    """False: history was rewritten, and a new context begins."""
    action_ids: tuple[int, ...]
    """The oracle's action, encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One episode that the environment's oracle played. Nothing of it was sampled."""

    turns: tuple[DemonstratedTurn, ...]
    is_over: bool
    """False: `max_turns` ended it."""


def demonstrate(make_env: MakeEnv, renderer: Renderer, *, seed: int, skill: float, max_turns: int) -> Demonstration:
    """Play one episode with the environment's oracle."""
    env = make_env()
    try:
        return _play(env, renderer, seed=seed, skill=skill, max_turns=max_turns)
    finally:
        env.close()


def _play(
    env: gym.Env[tuple[Message, ...], str | Message], renderer: Renderer, *, seed: int, skill: float, max_turns: int
) -> Demonstration:
    base = base_env(env)
    rng = np.random.default_rng(derive_seed(seed, "oracle"))
    messages, _ = env.reset(seed=seed)
    dialogue = Dialogue.begin(messages, describe(base).tools, renderer)
    turns: list[DemonstratedTurn] = []
    is_over = False
    while not is_over and len(turns) < max_turns:
        message = base.oracle(skill=skill, rng=rng)
        action_ids = renderer.encode(message)
        turns.append(
            DemonstratedTurn(observation_ids=dialogue.observation_ids, extends=dialogue.extends, action_ids=action_ids)
        )
        messages, _, terminated, truncated, _ = env.step(message)
        is_over = terminated or truncated
        dialogue = dialogue.after(action_ids, message, messages, renderer)
    return Demonstration(turns=tuple(turns), is_over=is_over)


async def oracle_ends(make_env: MakeEnv, *, max_turns: int, timeout_s: float, seed: int) -> bool | None:
    """Tell whether the oracle at its best ends an episode within `max_turns`, in the first of a few tasks; None: there is none.

    Raises:
        EnvironmentFailure: with the words of what an episode raised, or when it hung.
    """

    def ends(task: int) -> bool:
        env = make_env()
        try:
            base, rng, is_over = base_env(env), np.random.default_rng(task), False
            env.reset(seed=task)
            for _ in range(max_turns):
                _, _, terminated, truncated, _ = env.step(base.oracle(skill=1.0, rng=rng))
                is_over = terminated or truncated
                if is_over:
                    break
            return is_over
        finally:
            env.close()

    tasks = [task_seed(derive_seed(seed, "oracle"), index) for index in range(_ORACLE_TASKS)]
    thread = EnvThread()
    try:
        for task in tasks:
            if await thread.call(partial(ends, task), timeout_s=timeout_s * (max_turns + 2)):
                return True
    except NotImplementedError:
        return None
    except Exception as error:
        words = "did not return" if thread.is_lost else f"raised {raised_words(error)}"
        raise EnvironmentFailure(f"an episode with the environment's oracle(), task seed {task}, {words}") from error
    finally:
        thread.close()
    return False


async def demonstrations(
    make_env: MakeEnv, renderer: Renderer, *, count: int, skill: float, max_turns: int, timeout_s: float, seed: int
) -> list[Demonstration]:
    """Play demonstrations on tasks of the training half of the seeds.

    Each has a deadline of `timeout_s` seconds for every call that it may make: construction, reset, its turns.

    Raises:
        ConfigError: when the environment has no oracle.
        EnvironmentFailure: with the words of what an episode raised, or when it hung.
    """
    thread = EnvThread()
    limit_s = timeout_s * (max_turns + 2)
    played = []
    try:
        for index in range(count):
            task = task_seed(derive_seed(seed, "demonstrations"), index)
            play = partial(demonstrate, make_env, renderer, seed=task, skill=skill, max_turns=max_turns)
            played.append(await thread.call(play, timeout_s=limit_s))
    except AgentRLError:
        raise
    except NotImplementedError as error:
        raise ConfigError(f"env.id: {error}") from error
    except Exception as error:
        if thread.is_lost:
            words = f"did not end within {limit_s:g} s (rollout.env_timeout_s for each of its calls)"
        else:
            words = f"raised {raised_words(error)}"
        raise EnvironmentFailure(f"a demonstration with the environment's oracle() {words}") from error
    finally:
        thread.close()
    return played
