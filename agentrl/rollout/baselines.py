"""Baseline policies that know nothing of a task and must not solve it, and `play`, which plays an episode with one."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from agentrl.data.plain import printable
from agentrl.env import MessageEnv, as_message, ask_oracle, base_env, tool_call
from agentrl.env.make import is_schema, likely_arguments
from agentrl.rollout.env_driver import Env
from agentrl.types import Message

Policy: TypeAlias = Callable[[MessageEnv, Sequence[Message], np.random.Generator], str | Message]
"""Function from environment, dialogue so far and random generator to the next action."""

_WORDS = re.compile(r"[^\W\d_]+")
_NUMBERS = re.compile(r"\d{1,9}")
_MAX_MESSAGES = 8
"""Number of last messages from which a random policy takes words."""
_TEXTS = ("", "0", "1", "2", "yes", "no", "A", "the")
"""Texts that a policy may always send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode played by a baseline policy."""

    messages: list[Message]
    """Dialogue, including the actions."""
    rewards: list[float]
    """Reward of each turn."""
    is_over: bool
    """False if the limit of turns ended it."""
    success: bool
    """True if the environment reported success at the end."""
    score: float
    """Score from 0 to 1; 0 if the environment gave none."""

    def __str__(self) -> str:
        """Return the dialogue, one message per line."""
        lines = [
            f"{m['role']}: {' '.join(filter(None, [str(m.get('content') or ''), *_calls(m)]))}" for m in self.messages
        ]
        end = f"reward {sum(self.rewards):g}, success {self.success}, score {self.score:g}, {len(self.rewards)} turns"
        return "\n".join([*map(printable, lines), f"[{end}]"])


def _calls(message: Message) -> list[str]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [f"{function.get('name')}({function.get('arguments')})" for function in functions]


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
    """Play an episode of at most `max_turns` turns; of a table, the task with that index (None: chosen by the seed)."""
    base = base_env(env)
    num_tasks = base.num_tasks(split)
    task = None if num_tasks is None else seed % num_tasks if index is None else index
    first, _ = env.reset(seed=seed, options={"rollout_index": 0, "split": split, "task_index": task})
    messages, is_over = list(first), False
    rewards: list[float] = []
    info: dict[str, Any] = {}
    while not is_over and len(rewards) < max_turns:
        action = policy(base, messages, rng)
        observation, reward, terminated, truncated, info = env.step(action)
        messages += [as_message(action), *observation]
        rewards.append(float(reward))
        is_over = bool(terminated or truncated)
    return Played(
        messages=messages,
        rewards=rewards,
        is_over=is_over,
        success=bool(is_over and info.get("success")),
        score=float(info.get("score") or 0.0) if is_over else 0.0,
    )


def oracle(env: MessageEnv, messages: Sequence[Message], rng: np.random.Generator) -> Message:  # noqa: ARG001 - a Policy
    """Return the action of the environment's oracle."""
    return ask_oracle(env, rng=rng)


def random_action(env: MessageEnv, messages: Sequence[Message], rng: np.random.Generator) -> str | Message:
    """Call a random tool with arguments that its schema allows, or send a few words and numbers of the dialogue.

    If there are tools, four of five turns call one. Texts and whole numbers are taken from the first message and the last
    ones, numbers also from 0 to 9.
    """
    recent = [*messages[:1], *messages[1:][-_MAX_MESSAGES:]]
    text = " ".join(str(m.get("content") or "") for m in recent if m["role"] != "assistant")
    words = _WORDS.findall(text) or list(_TEXTS[1:])
    numbers = [*map(int, _NUMBERS.findall(text)), *range(10)]
    schemas = [schema for schema in env.tools if is_schema(schema)]
    if schemas and rng.random() < 0.8:
        function = schemas[int(rng.integers(len(schemas)))]["function"]
        properties: dict[str, Any] = function["parameters"].get("properties", {})
        return tool_call(function["name"], **{n: _random_value(p, words, numbers, rng) for n, p in properties.items()})
    pool = [*words, *map(str, numbers)]
    return " ".join(pool[int(rng.integers(len(pool)))] for _ in range(int(rng.integers(1, 6))))


def constant_actions(env: MessageEnv, *, max_values: int = 8) -> Iterator[str | Message]:
    """Yield actions that a policy may repeat for ever: each tool with likely arguments, and short texts.

    If a tool takes a choice or an integer, there is an action for each of its first `max_values` values.
    """
    yield from _TEXTS
    for tool in filter(is_schema, env.tools):
        function, likely = tool["function"], likely_arguments(tool)
        yield tool_call(function["name"], **likely)
        properties: dict[str, Any] = function["parameters"].get("properties", {})
        for name, schema in properties.items():
            whole = range(max_values) if schema.get("type") == "integer" else ()
            for value in (schema.get("enum") or list(whole))[:max_values]:
                if value != likely[name]:
                    yield tool_call(function["name"], **{**likely, name: value})


def always(action: str | Message) -> Policy:
    """Return the policy that repeats an action."""
    return lambda env, messages, rng: action  # noqa: ARG005 - a Policy


def _random_value(schema: dict[str, Any], words: list[str], numbers: list[int], rng: np.random.Generator) -> Any:
    """Draw a value that a property's schema allows."""
    if choices := schema.get("enum") or schema.get("anyOf"):
        chosen = choices[int(rng.integers(len(choices)))]
        return chosen if schema.get("enum") else _random_value(chosen, words, numbers, rng)
    match schema.get("type"):
        case "integer":
            low, high = schema.get("minimum"), schema.get("maximum")
            if low is not None and high is not None:
                return int(rng.integers(low, high, endpoint=True))
            return numbers[int(rng.integers(len(numbers)))]
        case "number":
            return float(numbers[int(rng.integers(len(numbers)))])
        case "boolean":
            return bool(rng.integers(2))
        case "array":
            return [_random_value(schema.get("items", {}), words, numbers, rng) for _ in range(int(rng.integers(4)))]
        case "object":
            properties: dict[str, Any] = schema.get("properties", {})
            return {name: _random_value(p, words, numbers, rng) for name, p in properties.items()}
        case "null":
            return None
        case _:
            return words[int(rng.integers(len(words)))]
