"""A short supervised phase on the environment's own demonstrations, so that a model made locally knows the form."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from agentrl.chat import Renderer
from agentrl.credit import Credit
from agentrl.env import base_env, describe
from agentrl.errors import AgentRLError, ConfigError, EnvironmentFailure
from agentrl.learn.batch import make_batch
from agentrl.learn.layout import attending
from agentrl.learn.model import Policy
from agentrl.learn.plan import micro_batches
from agentrl.rollout import derive_seed, task_seed
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.fault import raised_words
from agentrl.rollout.moment import MakeEnv
from agentrl.types import AmountOrZero, Count, Message, StopReason, Trajectory, Turn

_ORACLE_TASKS = 4


class WarmupConfig(BaseModel):
    """Supervised training on `oracle()` demonstrations before reinforcement learning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: AmountOrZero = 0
    """Optimizer steps; 0: no warm-up."""
    batch_size: Count = 16
    """Demonstrations for each step."""
    num_demonstrations: Count = 2048
    """Demonstrations made; they are gone through again when they run out."""
    learning_rate: PositiveFloat = 1e-3
    """Step size of AdamW; rises over 20 steps, falls over the last 50."""
    skill: float = Field(default=1.0, ge=0, le=1)
    """Share of turns that the demonstrations play right: a policy that was shown perfection has no spread to learn from."""


def demonstrate(make_env: MakeEnv, renderer: Renderer, *, seed: int, skill: float, max_turns: int) -> Trajectory:
    """Play one episode with the environment's oracle; its actions are encoded as if they had been sampled."""
    env = make_env()
    try:
        turns, is_over = _play(env, renderer, seed=seed, skill=skill, max_turns=max_turns)
    finally:
        env.close()
    return Trajectory(
        group_id="demonstration",
        trajectory_id=str(seed),
        env_id=type(base_env(env)).__name__,
        seed=seed,
        turns=tuple(turns),
        stop_reason=StopReason.TERMINATED if is_over else StopReason.MAX_TURNS,
    )


def _play(
    env: gym.Env[tuple[Message, ...], str | Message], renderer: Renderer, *, seed: int, skill: float, max_turns: int
) -> tuple[list[Turn], bool]:
    base = base_env(env)
    rng = np.random.default_rng(derive_seed(seed, "oracle"))
    messages, _ = env.reset(seed=seed)
    tools = describe(base).tools
    observation_ids = renderer.start(messages, tools)
    context_ids: tuple[int, ...] = ()
    history, extends = list(messages), True
    turns: list[Turn] = []
    is_over = False
    while not is_over and len(turns) < max_turns:
        message = base.oracle(skill=skill, rng=rng)
        action_ids = renderer.encode(message)
        zeros = (0,) * len(action_ids)
        turns.append(
            Turn(
                observation_ids=observation_ids,
                extends=extends,
                action_ids=action_ids,
                behavior_logprobs=zeros,
                versions=zeros,
                reward=0.0,
            )
        )
        messages, _, terminated, truncated, _ = env.step(message)
        is_over = terminated or truncated
        history += [message, *messages]
        context_ids = (context_ids + observation_ids if extends else observation_ids) + action_ids
        added = renderer.extend(context_ids[: -len(action_ids)], action_ids, messages)
        extends = added is not None
        observation_ids = added if added is not None else renderer.start(history, tools)
    return turns, is_over


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
) -> list[Trajectory]:
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


def warm_up(
    policy: Policy,
    examples: list[Trajectory],
    config: WarmupConfig,
    *,
    seed: int,
    max_tokens: int,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
) -> float:
    """Minimise the mean negative log-likelihood of the demonstrated actions; return the last step's.

    Args:
        policy: trained in place.
        examples: demonstrations.
        config: steps, batch size, learning rate (up over 20 steps, down over the last 50).
        seed: order of the demonstrations.
        max_tokens: budget of a micro-batch.
        on_step: told the step and its loss.
    """
    device = next(policy.parameters()).device
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    # Full rate for most of the way: copying from the context is learned late and at once, and a rate that falls early
    # stops short of it.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (config.steps - step) / 50)
    )
    rng = np.random.default_rng(derive_seed(seed, "warm-up"))
    order: list[int] = []
    loss_value = float("nan")
    policy.train()
    for step in range(config.steps):
        while len(order) < config.batch_size:
            order += rng.permutation(len(examples)).tolist()
        chosen, order = [examples[i] for i in order[: config.batch_size]], order[config.batch_size :]
        batch = make_batch(chosen, [Credit.uniform(t, 1.0) for t in chosen], unit="token", aggregation="token-mean")
        loss_value = 0.0
        for micro in micro_batches(batch, max_tokens=max_tokens, layout=policy.layout, device=device):
            with attending(policy.model, policy.layout):
                logprobs_T, _ = policy(micro.inputs, micro.place_T, micro.target_T, 1.0)
                loss: Any = -(micro.weight_T * logprobs_T).sum()
                loss.backward()
            loss_value += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step + 1, loss_value)
    return loss_value
