"""Demonstrations: episodes played by the environment's own `oracle()`, or dialogues from a file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.chat import Dialogue, HistoryConfig, Renderer, TurnTokens
from agentrl.chat.renderer import Tools
from agentrl.data.plain import PlainDataError, abbreviated
from agentrl.env import ToolCallError, arguments_object, ask_oracle, base_env, close_env, tool_schemas
from agentrl.env.message_env import ROLES, is_message
from agentrl.env.task_table import read_rows
from agentrl.errors import ConfigError, EnvError, EnvironmentFailure, RendererError, UserError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.env_driver import Env, EnvThread, MakeEnv, construct, reset, step
from agentrl.rollout.faults import RaisedError
from agentrl.rollout.tasks import EnvTask, Tasks, derive_seed
from agentrl.types import Message

_ORACLE_TASKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One episode played by the environment's oracle, or one dialogue of a file; none of it was sampled."""

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


def read_dialogues(
    path: Path, renderer: Renderer, *, tools: Tools, view: HistoryConfig, max_tokens: int
) -> list[Demonstration]:
    """Read dialogues, whose assistant's messages are the actions.

    Args:
        path: a file whose rows have `messages` in OpenAI's form, and maybe `tools`.
        renderer: turns them into tokens.
        tools: of a dialogue that names none.
        view: part of the history that a context shows.
        max_tokens: of a context.

    Raises:
        ConfigError: with file and line, for a dialogue that is none, cannot be written by the renderer, or is too long.
    """
    found = []
    for row in read_rows(str(path), field=_DIALOGUES):
        try:
            messages = [_message(given) for given in _listed(row.values.get("messages"))]
            schemas = tools if row.values.get("tools") is None else tool_schemas(row.values["tools"])
            turns = _turns_of(messages, schemas, renderer, view=view, max_tokens=max_tokens)
        except (ConfigError, PlainDataError, RendererError, ToolCallError) as error:
            raise ConfigError(f"{_DIALOGUES}: {row.place}: {error}") from error
        found.append(Demonstration(turns=turns, is_over=True))
    if not found:
        raise ConfigError(f"{_DIALOGUES}: {path} holds no dialogue")
    return found


_DIALOGUES = "warmup.dialogues"
_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


def _listed(messages: object) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"messages is {abbreviated(messages)}; give a list of messages with role and content")
    return messages


def _message(given: Any) -> Message:
    """Return a message of OpenAI's form as environments have it: content is text, arguments are objects."""
    message = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if unknown := [key for key in message if key not in _KEYS]:
        raise ConfigError(
            f"a message has the key {unknown[0]!r}, which is not read; remove it (known: {', '.join(_KEYS)})"
        )
    if isinstance(parts := message.get("content"), list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise ConfigError(f"content is {abbreviated(parts)}; give text")
        message["content"] = "".join(part["text"] for part in parts)
    if not is_message(message := {"content": None, **message}):
        raise ConfigError(
            f"{abbreviated(given)} is no message; give role ({', '.join(ROLES)}) and content as text, or tool_calls"
        )
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        read = [{**f, "arguments": arguments_object(f["name"], f.get("arguments", {}))} for f in functions]
        message["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, read, strict=True)]
    return {**message, "content": message["content"] or ""}


def _turns_of(
    messages: Sequence[Message], tools: Tools, renderer: Renderer, *, view: HistoryConfig, max_tokens: int
) -> tuple[TurnTokens, ...]:
    actions = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not actions or 0 in actions or any(place + 1 in actions for place in actions):
        raise ConfigError("the assistant speaks after someone else, at least once, and never twice in a row")
    dialogue = Dialogue.begin(messages[: actions[0]], tools, renderer, view=view)
    turns = []
    for place, following in zip_longest(actions, actions[1:]):
        action_ids = renderer.encode(messages[place])
        turns.append(dialogue.turn(action_ids))
        if (num := len(dialogue.context_ids) + len(action_ids)) > max_tokens:
            raise ConfigError(f"it has {num} tokens, more than rollout.max_context_tokens: {max_tokens}; raise that")
        if following is not None:
            dialogue = dialogue.after(action_ids, messages[place], messages[place + 1 : following], renderer)
    return tuple(turns)
