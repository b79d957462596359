"""Calls into an environment, each of which ends in what it said or in an EnvError."""

import base64
import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import gymnasium as gym

from agentrl.env import MessageEnv, base_env, tool_schemas
from agentrl.env.returned import key_return, reset_return, step_return
from agentrl.errors import AgentRLError, EnvError
from agentrl.plain_data import PlainDataError, abbreviated, printable
from agentrl.rollout.fault import raised_words
from agentrl.rollout.tasks import EnvTask
from agentrl.types import Message

Env = gym.Env[tuple[Message, ...], str | Message]
MakeEnv = Callable[[], Env]


class EnvReply(NamedTuple):
    """What an environment said last, as plain data of its own."""

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
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of its tools; said once, when the episode begins or resumes."""


def copy_env(env: Env, *, seed: int | None = None) -> Env:
    """Copy an environment with its wrappers, by its own `fork()`; with a seed, what chance brings next is new."""
    base = base_env(env)
    forked: object = base.fork()
    if not isinstance(forked, MessageEnv):
        raise EnvError(f"fork() of {type(base).__name__} must return a copy, got {abbreviated(forked)}")
    if seed is not None:
        forked.reseed(seed)
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
        raise EnvError(f"environment: construction raised {raised_words(cause)}") from cause


def env_id(env: Env) -> str:
    """Return the name under which an environment's trajectories are kept."""
    return printable(env.spec.id if env.spec else type(base_env(env)).__name__)


def reset_options(task: EnvTask, *, rollout_index: int) -> dict[str, Any]:
    """Return what `reset` is told, beside the seed."""
    return {"rollout_index": rollout_index, "split": task.split, "task_index": task.index}


def reset(env: Env, base: MessageEnv, task: EnvTask, *, rollout_index: int) -> EnvReply:
    """Begin a task."""
    base.take_logged()  # by an episode before
    result = env.reset(seed=task.seed, options=reset_options(task, rollout_index=rollout_index))
    returned = reset_return(result, method=f"reset() of {type(base).__name__}")
    return EnvReply(
        messages=returned.messages,
        state_key=_key(base.state_key(), base, "state_key()"),
        gold_answer=_key(base.gold_answer(), base, "gold_answer()"),
        tools=_tools(base),
    )


def restore(snapshot: str) -> Env:
    """Return the environment of a moment's snapshot.

    Raises:
        EnvError: where unpickling gives none.
    """
    env: object = pickle.loads(base64.b64decode(snapshot))
    if not isinstance(env, gym.Env):
        raise EnvError(f"its snapshot is restored as {abbreviated(env)}; let pickling keep the environment")
    return cast("Env", env)


def check_restored(base: MessageEnv, recorded: EnvReply) -> EnvReply:
    """Return the moment of an environment that was restored, which must be the one that was recorded."""
    state_key = _key(base.state_key(), base, "state_key()")
    if state_key != recorded.state_key:
        raise EnvError(
            f"environment {type(base).__name__}: its snapshot has the state_key {abbreviated(state_key)}, and was recorded "
            f"with {abbreviated(recorded.state_key)}; let pickling keep all of its state"
        )
    return recorded._replace(gold_answer=_key(base.gold_answer(), base, "gold_answer()"), tools=_tools(base))


def step(env: Env, base: MessageEnv, action: Message) -> EnvReply:
    """Carry out an action, of which the environment gets a copy."""
    action = copy.deepcopy(action)
    action_key = _key(base.action_key(action), base, "action_key()")
    returned = step_return(env.step(action), method=f"step() of {type(base).__name__}")
    if logged := base.take_logged():  # by a `step` that leaves it to us, or after `ToolEnv.step` told of some
        told = returned.info.get("logged")
        before = told if isinstance(told, dict) else {}
        returned.info["logged"] = before | {name: before.get(name, 0.0) + number for name, number in logged.items()}
    return EnvReply(
        messages=returned.messages,
        reward=returned.reward,
        terminated=returned.terminated,
        truncated=returned.truncated,
        info=returned.info,
        state_key=_key(base.state_key(), base, "state_key()"),
        action_key=action_key,
        snapshot=base64.b64encode(pickle.dumps(env)).decode() if base.can_snapshot else None,
    )


def _key(key: object, base: MessageEnv, method: str) -> str | None:
    return key_return(key, method=f"{method} of {type(base).__name__}")


def _tools(base: MessageEnv) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(tool_schemas(base.tools))
    except PlainDataError as error:
        raise EnvError(f"environment {type(base).__name__}: {error}") from error
