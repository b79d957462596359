"""One episode: messages to tokens, tokens to an action, an action to messages, until something ends it."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from agentrl.chat import Renderer
from agentrl.engine import Sampler
from agentrl.env import MessageEnv, base_env
from agentrl.env.spaces import is_message
from agentrl.errors import AgentRLError, ConfigError, EngineError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.seeds import derive_seed
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason, Trajectory, Turn

MakeEnv = Callable[[], gym.Env[tuple[Message, ...], str | Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What fixes an episode before it begins."""

    group_id: str
    rollout_index: int
    """Number of this episode within its group."""
    seed: int
    """Seed of the environment, shared by the group."""
    sampling_seed: int
    """Seed from which each turn's sampling seed follows."""
    attempt: int = 0
    """How often this episode has been begun before."""

    @property
    def trajectory_id(self) -> str:
        """Name of the episode."""
        return f"{self.group_id}/{self.rollout_index}"


class EnvError(AgentRLError):
    """The environment raised, hung or broke its contract."""


class _Moment(NamedTuple):
    """What the environment said last."""

    messages: tuple[Message, ...]
    state_key: str | None
    action_key: str | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}  # noqa: RUF012 - never written to


async def run_episode(
    task: Task, *, make_env: MakeEnv, engine: Sampler, renderer: Renderer, config: RolloutConfig, thread: EnvThread
) -> Trajectory:
    """Play one episode; a failure of the environment or the engine is returned as data.

    Raises:
        UserError: for what no retry can mend, such as a first prompt longer than the context limit.
    """
    episode = _Episode(task, engine, renderer, config, thread)
    with engine.conversation(f"{task.trajectory_id}#{task.attempt}"):
        try:
            return await episode.play(make_env)
        except EnvError as error:
            return episode.result(StopReason.ENV_ERROR, error=str(error))
        except EngineError as error:
            return episode.result(StopReason.ENGINE_ERROR, error=str(error))


class _Episode:
    """A live episode; grows by one turn at a time."""

    def __init__(
        self, task: Task, engine: Sampler, renderer: Renderer, config: RolloutConfig, thread: EnvThread
    ) -> None:
        self._task, self._engine, self._renderer = task, engine, renderer
        self._config, self._thread = config, thread
        self._turns: list[Turn] = []
        self._env_id = ""
        self._env_s = 0.0
        self._final_info: dict[str, Any] = {}

    async def play(self, make_env: MakeEnv) -> Trajectory:
        env = await self._on_thread("construction", partial(_construct, make_env))
        base = base_env(env)
        self._env_id = env.spec.id if env.spec else type(base).__name__
        try:
            trajectory = await self._play(env, base)
        except BaseException:
            if self._thread.is_lost:  # hanging, or cancelled within a call
                self._thread.call_unattended(env.close)
            else:
                with suppress(EnvError):  # what went wrong first says more
                    await self._on_thread("close()", env.close)
            raise
        await self._on_thread("close()", env.close)
        return trajectory

    async def _play(self, env: gym.Env[tuple[Message, ...], str | Message], base: MessageEnv) -> Trajectory:
        config = self._config
        moment = await self._on_thread("reset()", lambda: _reset(env, base, self._task))
        history = list(moment.messages)
        context_ids: tuple[int, ...] = ()
        observation_ids, extends = self._renderer.start(history, base.tools), True
        if len(observation_ids) >= config.max_context_tokens:
            raise ConfigError(
                f"rollout.max_context_tokens: {config.max_context_tokens} leaves no room after the first prompt of "
                f"{len(observation_ids)} tokens; raise it"
            )
        while True:
            before = context_ids + observation_ids if extends else observation_ids
            room = config.max_context_tokens - len(before)
            budget = config.max_episode_tokens - sum(len(turn.action_ids) for turn in self._turns)
            if room < 1:
                return self.result(StopReason.CONTEXT_OVERFLOW, truncated=True)
            if budget < 1:
                return self.result(StopReason.MAX_TOKENS, truncated=True)
            completion = await self._sample(before, min(config.max_turn_tokens, budget, room))
            message = self._renderer.parse(completion.token_ids)
            turn = Turn(
                observation_ids=observation_ids,
                extends=extends,
                action_ids=completion.token_ids,
                behavior_logprobs=completion.logprobs,
                versions=completion.versions,
                reward=0.0,
                state_key=moment.state_key,
                finish_reason=completion.finish_reason,
                observation=moment.messages,
                message=message,
            )
            if completion.finish_reason is not FinishReason.STOP:  # an unfinished action is never carried out
                self._turns.append(turn)
                is_full = room <= min(config.max_turn_tokens, budget)
                reason = StopReason.CONTEXT_OVERFLOW if is_full else StopReason.MAX_TOKENS
                return self.result(reason, truncated=True)
            moment = await self._on_thread("step()", partial(_step, env, base, message))
            self._final_info = moment.info
            self._turns.append(
                replace(
                    turn,
                    reward=moment.reward,
                    next_state_key=moment.state_key,
                    action_key=moment.action_key,
                    extras=moment.info,
                )
            )
            if moment.terminated or moment.truncated:
                return self.result(StopReason.TERMINATED, truncated=not moment.terminated)
            if len(self._turns) >= config.max_turns:
                return self.result(StopReason.MAX_TURNS, truncated=True)
            history += [message, *moment.messages]
            context_ids = before + completion.token_ids
            added = self._renderer.extend(before, completion.token_ids, moment.messages)
            extends = added is not None
            observation_ids = added if added is not None else self._renderer.start(history, base.tools)

    async def _sample(self, prompt_ids: tuple[int, ...], max_tokens: int) -> Completion:
        """Sample one action; where the engine was paused, go on from what there is."""
        config, task, turn = self._config, self._task, len(self._turns)
        done = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORTED)
        while done.finish_reason is FinishReason.ABORTED:
            sampling = Sampling(
                max_tokens=max_tokens - len(done.token_ids),
                stop_token_ids=self._renderer.stop_token_ids,
                temperature=config.temperature,
                seed=derive_seed(task.sampling_seed, task.trajectory_id, task.attempt, turn),
            )
            try:
                async with asyncio.timeout(config.engine_timeout_s):
                    part = await self._engine.generate(
                        prompt_ids + done.token_ids, sampling, f"{task.trajectory_id}#{task.attempt}"
                    )
            except TimeoutError:
                raise EngineError(
                    f"no completion within rollout.engine_timeout_s: {config.engine_timeout_s:g}"
                ) from None
            done = Completion(
                token_ids=done.token_ids + part.token_ids,
                logprobs=done.logprobs + part.logprobs,
                versions=done.versions + part.versions,
                finish_reason=part.finish_reason,
            )
        return done

    async def _on_thread(self, what: str, function: Callable[[], Any]) -> Any:
        """Call into the environment; whatever goes wrong there is an EnvError with its words."""
        timeout_s, begin = self._config.env_timeout_s, time.perf_counter()
        where = f"environment {self._env_id}: {what}" if self._env_id else f"environment: {what}"
        try:
            return await self._thread.call(function, timeout_s=timeout_s)
        except (AgentRLError, asyncio.CancelledError):
            raise
        except Exception as error:
            if self._thread.is_lost:
                raise EnvError(f"{where} did not return within rollout.env_timeout_s: {timeout_s:g} s") from error
            raise EnvError(f"{where} raised {type(error).__name__}: {error}") from error
        finally:
            self._env_s += time.perf_counter() - begin

    def result(self, reason: StopReason, *, truncated: bool = False, error: str | None = None) -> Trajectory:
        metrics = {key: float(value) for key, value in self._final_info.items() if _is_number(value)}
        errors = [turn.extras.get("tool_errors", 0) for turn in self._turns]
        return Trajectory(
            group_id=self._task.group_id,
            trajectory_id=self._task.trajectory_id,
            env_id=self._env_id,
            seed=self._task.seed,
            turns=tuple(self._turns),
            stop_reason=reason,
            truncated=truncated,
            metrics=metrics | {"tool_errors": float(sum(errors)), "env_s": self._env_s},
            error=error,
        )


def _construct(make_env: MakeEnv) -> gym.Env[tuple[Message, ...], str | Message]:
    """Make the environment; what its constructor raises is a failure like any other.

    `agentrl.env.make_env` blames the recipe for it. When a run begins that is right; in an episode, the same recipe has
    made environments before.
    """
    try:
        return make_env()
    except AgentRLError as error:
        cause = error.__cause__ or error
        raise EnvError(f"environment: construction raised {type(cause).__name__}: {cause}") from error


def _reset(env: gym.Env[Any, Any], base: MessageEnv, task: Task) -> _Moment:
    result = env.reset(seed=task.seed, options={"rollout_index": task.rollout_index})
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvError(f"reset() of {type(base).__name__} must return (messages, info), got {_shape(result)}")
    _check_info(result[1], base, "reset()")
    return _Moment(_checked_messages(result[0], base, "reset()"), _checked_key(base.state_key(), base, "state_key()"))


def _step(env: gym.Env[Any, Any], base: MessageEnv, action: Message) -> _Moment:
    action_key = _checked_key(base.action_key(action), base, "action_key()")
    result: Any = env.step(action)
    name = type(base).__name__
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(
            f"step() of {name} must return (messages, reward, terminated, truncated, info), got {_shape(result)}"
        )
    messages, reward, terminated, truncated, info = result
    if not _is_number(reward) or not math.isfinite(reward):
        raise EnvError(f"step() of {name} returned the reward {reward!r}; it must be a finite number")
    _check_info(info, base, "step()")
    messages = _checked_messages(messages, base, "step()")
    return _Moment(
        messages=messages,
        state_key=_checked_key(base.state_key(), base, "state_key()"),
        action_key=action_key,
        reward=float(reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=dict(info),
    )


def _checked_messages(messages: object, base: MessageEnv, method: str) -> tuple[Message, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not all(map(is_message, messages)):
        raise EnvError(
            f"{method} of {type(base).__name__} must return a tuple of messages like "
            f"{{'role': 'user', 'content': '...'}}, got {_shape(messages)}"
        )
    return tuple(messages)


def _checked_key(key: object, base: MessageEnv, method: str) -> str | None:
    if key is not None and not isinstance(key, str):
        raise EnvError(f"{method} of {type(base).__name__} must return a string or None, got {_shape(key)}")
    return key


def _check_info(info: object, base: MessageEnv, method: str) -> None:
    name = type(base).__name__
    if not isinstance(info, dict):
        raise EnvError(f"{method} of {name} returned info of type {type(info).__name__}; it must be a dict")
    for key in info:
        if not isinstance(key, str):
            raise EnvError(f"{method} of {name} returned info with the key {_shape(key)}; its keys must be strings")


def _is_number(value: object) -> bool:
    return isinstance(value, Real | np.bool_)


def _shape(value: object) -> str:
    """Describe a value in a few words."""
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"
