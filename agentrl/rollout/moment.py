"""Calls into an environment, each of which ends in what it said or in an EnvError."""

import base64
import copy
import json
import math
import pickle
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from agentrl.env import MessageEnv, base_env
from agentrl.env.spaces import is_message
from agentrl.errors import AgentRLError
from agentrl.types import Message

Env = gym.Env[tuple[Message, ...], str | Message]
MakeEnv = Callable[[], Env]


class EnvError(AgentRLError):
    """The environment raised, hung or broke its contract."""


class Moment(NamedTuple):
    """What an environment said last."""

    messages: tuple[Message, ...]
    state_key: str | None
    gold_answer: str | None = None
    action_key: str | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}  # noqa: RUF012 - never written to
    snapshot: str | None = None
    """The environment itself, pickled, in base64, where it `can_snapshot`."""


def copy_env(env: Env, *, seed: int | None = None) -> Env:
    """Copy an environment with its wrappers, by its own `fork()`; with a seed, what chance brings next is new."""
    base = base_env(env)
    forked = base.fork()
    if seed is not None:
        forked.np_random = np.random.default_rng(seed)
    return copy.deepcopy(env, {id(base): forked})


def construct(make_env: MakeEnv) -> Env:
    """Make the environment; what its constructor raises is a failure like any other.

    `agentrl.env.make_env` blames the recipe for it. When a run begins that is right; in an episode, the same recipe has
    made environments before.
    """
    try:
        return make_env()
    except AgentRLError as error:
        cause = error.__cause__ or error
        raise EnvError(f"environment: construction raised {type(cause).__name__}: {cause}") from error


def reset(env: Env, base: MessageEnv, *, seed: int, rollout_index: int) -> Moment:
    """Begin a task."""
    result: Any = env.reset(seed=seed, options={"rollout_index": rollout_index})
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvError(f"reset() of {type(base).__name__} must return (messages, info), got {shape(result)}")
    _check_info(result[1], base, "reset()")
    return Moment(
        messages=_checked_messages(result[0], base, "reset()"),
        state_key=_checked_key(base.state_key(), base, "state_key()"),
        gold_answer=_checked_key(base.gold_answer(), base, "gold_answer()"),
    )


def restore(snapshot: str) -> Env:
    """Return the environment of a moment's snapshot."""
    env: Env = pickle.loads(base64.b64decode(snapshot))
    return env


def look(base: MessageEnv, recorded: Moment) -> Moment:
    """Return the moment of an environment that was restored, which must be the one that was recorded."""
    state_key = _checked_key(base.state_key(), base, "state_key()")
    if state_key != recorded.state_key:
        raise EnvError(
            f"environment {type(base).__name__}: its snapshot has the state_key {shape(state_key)}, and was recorded with "
            f"{shape(recorded.state_key)}; let pickling keep all of its state"
        )
    return recorded._replace(gold_answer=_checked_key(base.gold_answer(), base, "gold_answer()"))


def step(env: Env, base: MessageEnv, action: Message) -> Moment:
    """Carry out an action."""
    action_key = _checked_key(base.action_key(action), base, "action_key()")
    result: Any = env.step(action)
    name = type(base).__name__
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(
            f"step() of {name} must return (messages, reward, terminated, truncated, info), got {shape(result)}"
        )
    messages, reward, terminated, truncated, info = result
    if not is_number(reward) or not math.isfinite(reward):
        raise EnvError(f"step() of {name} returned the reward {reward!r}; it must be a finite number")
    _check_info(info, base, "step()")
    messages = _checked_messages(messages, base, "step()")
    return Moment(
        messages=messages,
        state_key=_checked_key(base.state_key(), base, "state_key()"),
        action_key=action_key,
        reward=float(reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=_kept_info(info, base),
        snapshot=base64.b64encode(pickle.dumps(env)).decode() if base.can_snapshot else None,
    )


def _checked_messages(messages: object, base: MessageEnv, method: str) -> tuple[Message, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not all(map(is_message, messages)):
        raise EnvError(
            f"{method} of {type(base).__name__} must return a tuple of messages like "
            f"{{'role': 'user', 'content': '...'}}, got {shape(messages)}"
        )
    return tuple(messages)


def _checked_key(key: object, base: MessageEnv, method: str) -> str | None:
    if key is not None and not isinstance(key, str):
        raise EnvError(f"{method} of {type(base).__name__} must return a string or None, got {shape(key)}")
    return key


def _check_info(info: object, base: MessageEnv, method: str) -> None:
    name = type(base).__name__
    if not isinstance(info, dict):
        raise EnvError(f"{method} of {name} returned info of type {type(info).__name__}; it must be a dict")
    for key in info:
        if not isinstance(key, str):
            raise EnvError(f"{method} of {name} returned info with the key {shape(key)}; its keys must be strings")


def _kept_info(info: dict[str, Any], base: MessageEnv) -> dict[str, Any]:
    """Return an `info` as it comes out of a journal or a checkpoint."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(info, default=plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"step() of {type(base).__name__} returned info that JSON cannot hold: {error}") from error
    return kept


def is_number(value: object) -> bool:
    """Tell whether a value is a number, Python's or numpy's."""
    return isinstance(value, Real | np.bool_)


def shape(value: object) -> str:
    """Describe a value in a few words."""
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def plain(value: Any) -> Any:
    """Return what JSON does not know as what it knows: numpy's numbers as numbers, the rest as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "size", None) == 1 else str(value)
