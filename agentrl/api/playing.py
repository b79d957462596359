"""One episode, played by a model or by whatever stands behind an OpenAI-compatible endpoint."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from agentrl.api.evaluation import evaluated
from agentrl.api.target import load_to_play, look_for_modules_here, sections, without_running_loop
from agentrl.data.plain import abbreviated, line_of, plain_data
from agentrl.env import MessageEnv, base_env, close_env, describe
from agentrl.env.message_env import is_message
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.recipe.config import load_recipe
from agentrl.report.terminal import Console
from agentrl.rollout.faults import environment_failures
from agentrl.rollout.play import Played
from agentrl.rollout.play import play as play_with
from agentrl.rollout.tasks import Tasks
from agentrl.types import Message, Trajectory


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
        EnvironmentFailure: where the endpoint does not answer, or the environment fails.
    """
    look_for_modules_here(model)
    if endpoint is None:
        return _played_here(env, model, seed=seed, max_turns=max_turns, temperature=temperature)
    if env is None or not isinstance(model, str):
        raise ConfigError("play: with an endpoint, name an environment, and the model as the endpoint knows it")
    policy = _endpoint_policy(endpoint, model, temperature=temperature, key=os.environ.get(api_key_env))
    config = load_recipe({}, changes=sections({"env": env})).env
    with environment_failures():
        made = config.make()
        try:
            task = Tasks(seed=seed, num=describe(base_env(made)).num_tasks, first=seed).evaluation(1)[0]
            rng = np.random.default_rng(seed)
            return play_with(made, policy, seed=task.seed, index=task.index, max_turns=max_turns, rng=rng)
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
    if trajectory.error is not None:
        raise EnvironmentFailure(trajectory.error)
    return Played(
        messages=[message for turn in trajectory.turns for message in (*turn.observation, turn.message)],
        rewards=[turn.reward for turn in trajectory.turns],
        is_over=not trajectory.truncated,
        success=trajectory.metrics.get("success", 0.0) > 0,
        score=trajectory.metrics.get("score", 0.0),
    )


def _endpoint_policy(
    url: str, model: str, *, temperature: float, key: str | None
) -> Callable[[MessageEnv, Sequence[Message], np.random.Generator], Message]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def policy(env: MessageEnv, messages: Sequence[Message], rng: np.random.Generator) -> Message:  # noqa: ARG001
        body: dict[str, Any] = {"model": model, "messages": list(map(_sent, messages)), "temperature": temperature}
        if env.tools:
            body["tools"] = list(env.tools)
        try:
            response = httpx2.post(f"{url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=120.0)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise EnvironmentFailure(f"{url} does not answer: {line_of(error)}") from error
        if response.status_code != 200:
            raise EnvironmentFailure(f"{url} refused the request: HTTP {response.status_code}: {response.text[:300]}")
        try:
            message = plain_data(response.json()["choices"][0]["message"])
            said: Message = {"role": "assistant", "content": message.get("content") or ""}
            said |= {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
            if not is_message(said):
                raise ValueError("it is no message")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise EnvironmentFailure(f"{url}: no chat completion: {abbreviated(response.text)}") from error
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
