"""Policies that know nothing of a task: what an environment must not be solved by."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from agentrl.api.playing import Played
from agentrl.env import MessageEnv, as_message, ask_oracle, base_env, tool_call
from agentrl.env.make import is_schema, likely_arguments
from agentrl.rollout.env_driver import Env
from agentrl.types import Message

Policy: TypeAlias = Callable[[MessageEnv, Sequence[Message], np.random.Generator], str | Message]
"""Environment, dialogue so far and random numbers to the next action."""

_WORDS = re.compile(r"[^\W\d_]+")
_NUMBERS = re.compile(r"\d{1,9}")
_MAX_HEARD = 8
"""Last messages of which a random policy takes words."""
_TEXTS = ("", "0", "1", "2", "yes", "no", "A", "the")
"""What a policy may always say."""


def play(
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


def oracle(env: MessageEnv, messages: Sequence[Message], rng: np.random.Generator) -> Message:
    """Play as the environment's oracle does."""
    return ask_oracle(env, rng=rng)


def random_action(env: MessageEnv, messages: Sequence[Message], rng: np.random.Generator) -> str | Message:
    """Call a random tool with arguments that its schema allows, or say a few words and numbers of the dialogue.

    Four of five turns call, where there are tools. Texts and whole numbers are taken from the first message and the last
    ones, numbers also from 0 to 9.
    """
    heard = [*messages[:1], *messages[1:][-_MAX_HEARD:]]
    said = " ".join(str(m.get("content") or "") for m in heard if m["role"] != "assistant")
    words = _WORDS.findall(said) or list(_TEXTS[1:])
    numbers = [*map(int, _NUMBERS.findall(said)), *range(10)]
    schemas = [schema for schema in env.tools if is_schema(schema)]
    if schemas and rng.random() < 0.8:
        function = schemas[int(rng.integers(len(schemas)))]["function"]
        properties: dict[str, Any] = function["parameters"].get("properties", {})
        return tool_call(function["name"], **{n: _random_value(p, words, numbers, rng) for n, p in properties.items()})
    pool = [*words, *map(str, numbers)]
    return " ".join(pool[int(rng.integers(len(pool)))] for _ in range(int(rng.integers(1, 6))))


def constant_actions(env: MessageEnv, *, max_values: int = 8) -> Iterator[str | Message]:
    """Yield the actions that a policy may repeat for ever: each tool with likely arguments, and short texts.

    Where a tool takes a choice or a whole number, there is an action for each of its first `max_values` values.
    """
    yield from _TEXTS
    for schema in filter(is_schema, env.tools):
        function, likely = schema["function"], likely_arguments(schema)
        yield tool_call(function["name"], **likely)
        properties: dict[str, Any] = function["parameters"].get("properties", {})
        for name, of in properties.items():
            whole = range(max_values) if of.get("type") == "integer" else ()
            for value in (of.get("enum") or list(whole))[:max_values]:
                if value != likely[name]:
                    yield tool_call(function["name"], **{**likely, name: value})


def always(action: str | Message) -> Policy:
    """Return the policy that repeats an action."""
    return lambda env, messages, rng: action


def _random_value(of: dict[str, Any], words: list[str], numbers: list[int], rng: np.random.Generator) -> Any:
    """Draw a value that a property's schema allows."""
    if choices := of.get("enum") or of.get("anyOf"):
        chosen = choices[int(rng.integers(len(choices)))]
        return chosen if of.get("enum") else _random_value(chosen, words, numbers, rng)
    match of.get("type"):
        case "integer":
            low, high = of.get("minimum"), of.get("maximum")
            if low is not None and high is not None:
                return int(rng.integers(low, high, endpoint=True))
            return numbers[int(rng.integers(len(numbers)))]
        case "number":
            return float(numbers[int(rng.integers(len(numbers)))])
        case "boolean":
            return bool(rng.integers(2))
        case "array":
            return [_random_value(of.get("items", {}), words, numbers, rng) for _ in range(int(rng.integers(4)))]
        case "object":
            properties: dict[str, Any] = of.get("properties", {})
            return {name: _random_value(p, words, numbers, rng) for name, p in properties.items()}
        case "null":
            return None
        case _:
            return words[int(rng.integers(len(words)))]
