"""One episode: messages to tokens, tokens to an action, an action to messages, until something ends it."""

import asyncio
import copy
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
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
from agentrl.rollout.deadline import EngineClock
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.seeds import derive_seed
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason, Trajectory, Turn

Env = gym.Env[tuple[Message, ...], str | Message]
MakeEnv = Callable[[], Env]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEpisode:
    """An episode under way: all that is needed to go on with it elsewhere, but for the environment, which is played again."""

    task: Task
    turns: tuple[Turn, ...] = ()
    """What was played to the end of a step of the environment."""
    partial: Completion | None = None
    """What was sampled of the next action, whole or in part."""


class EnvError(AgentRLError):
    """The environment raised, hung or broke its contract."""


class _Moment(NamedTuple):
    """What the environment said last."""

    messages: tuple[Message, ...]
    state_key: str | None
    gold_answer: str | None = None
    action_key: str | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}  # noqa: RUF012 - never written to


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """Where an episode stands before an action."""

    env: Env
    moment: _Moment
    turns: tuple[Turn, ...] = ()
    history: tuple[Message, ...]
    context_ids: tuple[int, ...]
    """The whole context of the next action, the generation prompt included."""
    observation_ids: tuple[int, ...]
    extends: bool = True


class Episode:
    """An episode; grows by one turn at a time."""

    def __init__(
        self,
        task: Task,
        *,
        engine: Sampler,
        renderer: Renderer,
        config: RolloutConfig,
        thread: EnvThread,
        fork: bool = False,
        recorded: LiveEpisode | None = None,
        clock: EngineClock | None = None,
        on_turn: Callable[[Turn], object] | None = None,
    ) -> None:
        """Begin before the first turn.

        Args:
            task: what fixes the episode.
            engine: samples the actions.
            renderer: of messages and tokens.
            config: limits and deadlines.
            thread: of the environment.
            fork: fork rollouts from its turns as `config.branches` says, and record their rewards with the turns.
            recorded: the same episode, interrupted: its actions are taken again, and what the environment makes of them is
                compared with what was recorded, before it goes on.
            clock: of the engine's deadlines. None: one that never stands still.
            on_turn: told of each turn that was not recorded before.
        """
        self._task, self._engine, self._renderer = task, engine, renderer
        self._config, self._thread, self._fork = config, thread, fork
        self._recorded = recorded or LiveEpisode(task=task)
        self._clock, self._on_turn = clock or EngineClock(), on_turn
        self._partial: Completion | None = None
        self._request_id = f"{task.trajectory_id}#{task.attempt}"
        self._turns: list[Turn] = []
        self._forks: dict[int, _Position] = {}
        self._env_id = ""
        self._env_s = 0.0
        self._final_info: dict[str, Any] = {}
        self._gold_answer: str | None = None

    async def play(self, make_env: MakeEnv) -> Trajectory:
        """Play to the end; a failure of the environment or the engine is returned as data.

        Raises:
            UserError: for what no retry can mend, such as a first prompt longer than the context limit.
        """
        try:
            return await self._with_forks(make_env)
        except EnvError as error:
            return self.result(StopReason.ENV_ERROR, error=str(error))
        except EngineError as error:
            return self.result(StopReason.ENGINE_ERROR, error=str(error))

    def live(self) -> LiveEpisode:
        """Return where the episode stands."""
        played, recorded = len(self._turns), self._recorded
        if played < len(recorded.turns) or (played == len(recorded.turns) and self._partial is None):
            return recorded  # still being played again
        return LiveEpisode(task=self._task, turns=tuple(self._turns), partial=self._partial)

    async def _with_forks(self, make_env: MakeEnv) -> Trajectory:
        try:
            # No await between two conversations: in lockstep, the engine goes on without who has none.
            with self._engine.conversation(self._request_id):
                trajectory = await self._play(make_env)
            return await self._with_branches(trajectory) if self._forks else trajectory
        finally:
            for position in self._forks.values():
                self._thread.call_unattended(position.env.close)

    async def _play(self, make_env: MakeEnv) -> Trajectory:
        env = await self._on_thread("construction", partial(_construct, make_env))
        self._env_id = env.spec.id if env.spec else type(base_env(env)).__name__
        async with self._closing(env):
            return await self._go_on(await self._begin(env))

    @asynccontextmanager
    async def _closing(self, env: Env) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            if self._thread.is_lost:  # hanging, or cancelled within a call
                self._thread.call_unattended(env.close)
            else:
                with suppress(EnvError):  # what went wrong first says more
                    await self._on_thread("close()", env.close)
            raise
        await self._on_thread("close()", env.close)

    async def _begin(self, env: Env) -> _Position:
        base = base_env(env)
        moment = await self._on_thread("reset()", lambda: _reset(env, base, self._task))
        self._gold_answer = moment.gold_answer
        observation_ids = self._renderer.start(moment.messages, base.tools)
        if len(observation_ids) >= self._config.max_context_tokens:
            raise ConfigError(
                f"rollout.max_context_tokens: {self._config.max_context_tokens} leaves no room after the first prompt of "
                f"{len(observation_ids)} tokens; raise it"
            )
        return _Position(
            env=env,
            moment=moment,
            history=moment.messages,
            context_ids=observation_ids,
            observation_ids=observation_ids,
        )

    async def _go_on(self, position: _Position) -> Trajectory:
        """Play from a position to the end."""
        config, env, base = self._config, position.env, base_env(position.env)
        self._turns = list(position.turns)
        while True:
            if self._fork and len(self._turns) % config.branches.every == 0:
                copied = await self._on_thread("fork()", partial(_copy, env))
                self._forks[len(self._turns)] = replace(position, env=copied, turns=tuple(self._turns))
            before, moment = position.context_ids, position.moment
            room = config.max_context_tokens - len(before)
            budget = config.max_episode_tokens - sum(len(turn.action_ids) for turn in self._turns)
            if room < 1:
                return self.result(StopReason.CONTEXT_OVERFLOW, truncated=True)
            if budget < 1:
                return self.result(StopReason.MAX_TOKENS, truncated=True)
            completion = await self._sample(before, min(config.max_turn_tokens, budget, room))
            message = self._renderer.parse(completion.token_ids)
            turn = Turn(
                observation_ids=position.observation_ids,
                extends=position.extends,
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
                self._add(turn)
                is_full = room <= min(config.max_turn_tokens, budget)
                reason = StopReason.CONTEXT_OVERFLOW if is_full else StopReason.MAX_TOKENS
                return self.result(reason, truncated=True)
            moment = await self._on_thread("step()", partial(_step, env, base, message))
            self._final_info = moment.info
            self._add(
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
            history = (*position.history, message, *moment.messages)
            added = self._renderer.extend(before, completion.token_ids, moment.messages)
            observation_ids = added if added is not None else self._renderer.start(history, base.tools)
            position = _Position(
                env=env,
                moment=moment,
                history=history,
                context_ids=observation_ids if added is None else before + completion.token_ids + added,
                observation_ids=observation_ids,
                extends=added is not None,
            )

    def _add(self, turn: Turn) -> None:
        """Add a turn; one that was recorded must have come out again as it was."""
        number = len(self._turns)
        if number < len(self._recorded.turns):
            recorded = self._recorded.turns[number]
            for name in _REPLAYED:
                found, expected = getattr(turn, name), getattr(recorded, name)
                if found != expected:
                    raise EnvError(
                        f"environment {self._env_id}: played again, turn {number} has another {name}: {_shape(found)}, and "
                        f"was recorded with {_shape(expected)}; make it depend on its seed and the actions alone"
                    )
        elif self._on_turn is not None:
            self._on_turn(turn)
        self._turns.append(turn)
        self._partial = None

    async def _with_branches(self, trajectory: Trajectory) -> Trajectory:
        """Play the forks, one rollout a turn, then a second, within the budget; record what each turn of them earned."""
        forks = {k: position for k, position in self._forks.items() if k < len(trajectory.turns)}
        found: dict[int, list[tuple[float, ...]]] = {k: [] for k in range(len(trajectory.turns))}
        counts = {"branches": 0.0, "branch_tokens": 0.0, "failed_branches": 0.0}
        for number, (k, position) in product(range(self._config.branches.num), forks.items()):
            if counts["branch_tokens"] >= self._config.branches.budget_tokens or self._thread.is_lost:
                break
            branch = await self._play_branch(k, position, number)
            played = branch.turns[k:]
            counts["branches"] += 1
            counts["branch_tokens"] += sum(len(turn.action_ids) for turn in played)
            counts["failed_branches"] += branch.failed
            if not branch.failed:
                found[k].append(tuple(turn.reward for turn in played))
        turns = tuple(replace(t, branch_rewards=tuple(found[k])) for k, t in enumerate(trajectory.turns))
        return replace(trajectory, turns=turns, metrics={**trajectory.metrics, **counts})

    async def _play_branch(self, turn: int, position: _Position, number: int) -> Trajectory:
        """Play one rollout from a position, with chance of its own."""
        name = f"{self._request_id}/{turn}/{number}"
        seed = derive_seed(self._task.sampling_seed, "branch", name)
        task = replace(self._task, sampling_seed=seed)
        episode = Episode(
            task,
            engine=self._engine,
            renderer=self._renderer,
            config=self._config,
            thread=self._thread,
            clock=self._clock,
        )
        episode._env_id, episode._request_id = self._env_id, name
        with self._engine.conversation(name):
            try:
                env = await episode._on_thread("fork()", partial(_copy, position.env, seed=seed))
                async with episode._closing(env):
                    return await episode._go_on(replace(position, env=env))
            except EnvError as error:
                return episode.result(StopReason.ENV_ERROR, error=str(error))
            except EngineError as error:
                return episode.result(StopReason.ENGINE_ERROR, error=str(error))

    async def _sample(self, prompt_ids: tuple[int, ...], max_tokens: int) -> Completion:
        """Sample one action; where the engine was paused, go on from what there is."""
        config, task, turn, recorded = self._config, self._task, len(self._turns), self._recorded
        done = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORTED)
        if turn < len(recorded.turns):
            return _completion(recorded.turns[turn])
        if turn == len(recorded.turns) and recorded.partial is not None:
            done = recorded.partial
        self._partial = done
        while done.finish_reason is FinishReason.ABORTED:
            sampling = Sampling(
                max_tokens=max_tokens - len(done.token_ids),
                stop_token_ids=self._renderer.stop_token_ids,
                temperature=config.temperature,
                seed=derive_seed(task.sampling_seed, task.trajectory_id, task.attempt, turn),
                drawn=len(done.token_ids),
            )
            try:
                async with self._clock.timeout(config.engine_timeout_s):
                    part = await self._engine.generate(prompt_ids + done.token_ids, sampling, self._request_id)
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
            self._partial = done
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
        """Return what was played so far as a trajectory that ended."""
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
            gold_answer=self._gold_answer,
        )


_REPLAYED = ("observation", "observation_ids", "extends", "reward", "state_key", "next_state_key", "action_key")
"""What a turn that is played again must have in common with the recorded one, beside the action."""


def _completion(turn: Turn) -> Completion:
    """Return what was sampled for a turn."""
    return Completion(
        token_ids=turn.action_ids,
        logprobs=turn.behavior_logprobs,
        versions=turn.versions,
        finish_reason=turn.finish_reason,
    )


def _copy(env: Env, *, seed: int | None = None) -> Env:
    """Copy an environment with its wrappers, by its own `fork()`; with a seed, what chance brings next is new."""
    base = base_env(env)
    forked = base.fork()
    if seed is not None:
        forked.np_random = np.random.default_rng(seed)
    return copy.deepcopy(env, {id(base): forked})


def _construct(make_env: MakeEnv) -> Env:
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
    return _Moment(
        messages=_checked_messages(result[0], base, "reset()"),
        state_key=_checked_key(base.state_key(), base, "state_key()"),
        gold_answer=_checked_key(base.gold_answer(), base, "gold_answer()"),
    )


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
