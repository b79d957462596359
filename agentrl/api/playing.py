"""One episode, played by a model or by whatever stands behind an OpenAI-compatible endpoint."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import numpy as np

from agentrl.api.evaluation import evaluated
from agentrl.api.target import load_to_play, look_for_modules_here, sections, without_running_loop
from agentrl.data.files import keep_process
from agentrl.data.plain import abbreviated, line_of, plain_data, printable
from agentrl.env import MessageEnv, as_message, base_env, close_env, describe
from agentrl.env.endpoint import ApiKey
from agentrl.env.message_env import is_message
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.recipe.config import load_recipe
from agentrl.report.terminal import Console
from agentrl.rollout.env_driver import Env
from agentrl.rollout.faults import environment_failures
from agentrl.rollout.tasks import Tasks
from agentrl.types import Message, StopReason, Trajectory

Policy: TypeAlias = Callable[[MessageEnv, Sequence[Message], np.random.Generator], str | Message]
"""Environment, dialogue so far and random numbers to the next action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode."""

    messages: list[Message]
    """The dialogue, actions among it."""
    rewards: list[float]
    """Reward of each turn."""
    is_over: bool
    """False if the limit of turns ended it."""
    success: bool
    """Whether the environment said so at the end."""
    score: float
    """From 0 to 1; 0 if the environment gave none."""
    is_scored: bool = True
    """False if nothing could score it: the last reward, given as 0, is none."""

    def __str__(self) -> str:
        """Write the dialogue out, a message a line."""
        lines = [
            f"{m['role']}: {' '.join(filter(None, [str(m.get('content') or ''), *_calls(m)]))}" for m in self.messages
        ]
        end = (
            f"reward {sum(self.rewards):g}, success {self.success}, score {self.score:g}"
            if self.is_scored
            else "no score"
        )
        return "\n".join([*map(printable, lines), f"[{end}, {len(self.rewards)} turns]"])


def _calls(message: Message) -> list[str]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [f"{function.get('name')}({function.get('arguments')})" for function in functions]


def play_episode(
    env: Env,
    policy: Policy,
    *,
    seed: int,
    max_turns: int,
    rng: np.random.Generator,
    split: str = "eval",
    index: int | None = None,
) -> Played:
    """Play an episode, on at most `max_turns` turns; of a table the task of that index, or (None) that the seed comes to."""
    base = base_env(env)
    num_tasks = base.num_tasks(split)
    task = None if num_tasks is None else seed % num_tasks if index is None else index
    first, _ = env.reset(seed=seed, options={"rollout_index": 0, "split": split, "task_index": task})
    messages, is_over = list(first), False
    rewards: list[float] = []
    reward: Any = None
    info: dict[str, Any] = {}
    while not is_over and len(rewards) < max_turns:
        action = policy(base, messages, rng)
        observation, reward, terminated, truncated, info = env.step(action)
        messages += [as_message(action), *observation]
        rewards.append(float(reward or 0.0))
        is_over = bool(terminated or truncated)
    return Played(
        messages=messages,
        rewards=rewards,
        is_over=is_over,
        success=bool(is_over and info.get("success")),
        score=float(info.get("score") or 0.0) if is_over else 0.0,
        is_scored=not is_over or reward is not None,
    )


@keep_process()
def play(
    env: Any = None,
    model: str | os.PathLike[str] | None = None,
    *,
    endpoint: str | None = None,
    seed: int = 0,
    max_turns: int = 16,
    temperature: float = 1.0,
    api_key_env: str = "OPENAI_API_KEY",
) -> Played:
    """Let a model play one evaluation task; print what is returned to read the dialogue.

    Args:
        env: a class, a function that returns an environment, a name, or a section `env`. None: that of the run.
        model: a run or its folder, or the name or folder of a Hugging Face model; with `endpoint`, its name there.
        endpoint: of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`.
        seed: which task.
        max_turns: the episode ends after so many.
        temperature: of sampling.
        api_key_env: environment variable that holds the endpoint's key; it need not be set where none is asked for.

    Raises:
        UserError: for what cannot be carried out.
        EnvironmentFailure: if the endpoint does not answer, or the environment fails.
    """
    look_for_modules_here(model)
    if endpoint is None:
        return _played_here(env, model, seed=seed, max_turns=max_turns, temperature=temperature)
    if env is None or not isinstance(model, str):
        raise ConfigError("play: with an endpoint, name an environment, and the model as the endpoint knows it")
    policy = _endpoint_policy(endpoint, model, temperature=temperature, key=ApiKey(api_key_env))
    config = load_recipe({}, changes=sections({"env": env})).env
    with environment_failures():
        made = config.make()
        try:
            task = Tasks(seed=seed, num=describe(base_env(made)).num_tasks, first=seed).evaluation(1)[0]
            rng = np.random.default_rng(seed)
            return play_episode(made, policy, seed=task.seed, index=task.index, max_turns=max_turns, rng=rng)
        finally:
            close_env(made)


def _played_here(
    env: Any, model: str | os.PathLike[str] | None, *, seed: int, max_turns: int, temperature: float
) -> Played:
    is_run = model is not None and (Path(model) / "config.yaml").is_file()
    changes = {
        "env": env,
        "model": None if is_run else model,
        "seed": seed,
        "rollout": {"max_turns": max_turns},
        "evaluation": {"num_tasks": 1, "seed": seed, "samples": 1, "pass_at": [1], "temperature": temperature},
    }
    recipe, run_dir = load_to_play(model if is_run else None, changes=sections(changes))
    with without_running_loop():
        found, _ = evaluated(recipe, run_dir, console=Console(soft_wrap=True), keep=False, first=seed)
    trajectory: Trajectory = next(iter(found.values())).groups[0].trajectories[0]
    is_scored = trajectory.stop_reason is not StopReason.UNSCORED
    if is_scored and trajectory.error is not None:
        raise EnvironmentFailure(trajectory.error)
    return Played(
        messages=[message for turn in trajectory.turns for message in (*turn.observation, turn.message)],
        rewards=[turn.reward for turn in trajectory.turns],
        is_over=not trajectory.truncated,
        success=bool(trajectory.reported("success")),
        score=trajectory.reported("score") or 0.0,
        is_scored=is_scored,
    )


def _endpoint_policy(url: str, model: str, *, temperature: float, key: ApiKey) -> Policy:

    def policy(env: MessageEnv, messages: Sequence[Message], rng: np.random.Generator) -> Message:  # noqa: ARG001
        body: dict[str, Any] = {"model": model, "messages": list(map(_sent, messages)), "temperature": temperature}
        if env.tools:
            body["tools"] = list(env.tools)
        try:
            response = httpx2.post(f"{url.rstrip('/')}/chat/completions", json=body, headers=key.headers, timeout=120.0)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise EnvironmentFailure(f"{url} does not answer: {line_of(error)}") from error
        text = key.removed_from(response.text)
        if response.status_code != 200:
            raise EnvironmentFailure(f"{url} refused the request: HTTP {response.status_code}: {text[:300]}")
        try:
            message = plain_data(json.loads(text)["choices"][0]["message"])
            said: Message = {"role": "assistant", "content": message.get("content") or ""}
            said |= {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
            if not is_message(said):
                raise ValueError("it is no message")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise EnvironmentFailure(f"{url}: no chat completion: {abbreviated(text)}") from error
        return said

    return policy


def _sent(message: Message) -> Message:
    """Return a message as endpoints take it: the arguments of calls are JSON in text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}
