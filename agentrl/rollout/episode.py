"""One episode: messages to tokens, tokens to an action, an action to messages, until something ends it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, TypeVar

from agentrl.chat import Renderer
from agentrl.engine import Sampler
from agentrl.env import base_env
from agentrl.errors import AgentRLError, EngineError
from agentrl.plain_data import abbreviated, line_of, printable
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.deadline import EngineClock
from agentrl.rollout.env_calls import (
    Env,
    EnvError,
    EnvReply,
    MakeEnv,
    check_restored,
    construct,
    copy_env,
    env_id,
    is_number,
    reset,
    restore,
    step,
)
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.fault import fault_of, raised_words
from agentrl.rollout.seeds import derive_seed
from agentrl.types import Completion, Fault, FinishReason, Message, Sampling, StopReason, Trajectory, Turn, Turns

R = TypeVar("R")


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
    turns: Turns = ()
    """What was played to the end of a step of the environment."""
    observation: tuple[Message, ...] | None = None
    """What the environment said last. None: not known."""
    snapshot: str | None = None
    """The environment after the last turn, pickled, in base64. None: it is played again."""
    partial: Completion | None = None
    """What was sampled of the next action, whole or in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """Where an episode stands before an action."""

    env: Env
    reply: EnvReply
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
        on_change: Callable[[LiveEpisode], object] | None = None,
        on_fault: Callable[[Trajectory], object] = lambda _: None,
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
            on_change: told where the episode stands after each turn that was not recorded before; before the end, its last
                action is still under way.
            on_fault: told of this episode, and of each rollout that is forked from it, if its environment fails.
        """
        self._task, self._engine, self._renderer = task, engine, renderer
        self._config, self._thread, self._fork = config, thread, fork
        self._recorded = recorded or LiveEpisode(task=task)
        self._clock, self._on_change, self._on_fault = clock or EngineClock(), on_change, on_fault
        self._partial: Completion | None = None
        self._reply: EnvReply | None = None
        self._before_end: LiveEpisode | None = None
        self._request_id = f"{task.trajectory_id}#{task.attempt}"
        self._turns: list[Turn] = []
        self._acting: Turn | None = None
        """The turn whose action the environment is carrying out."""
        self._forks: dict[int, _Position] = {}
        self._env_id = ""
        self._env_s = 0.0
        self._final_info: dict[str, Any] = {}
        self._gold_answer: str | None = None
        self._tools: Sequence[dict[str, Any]] = ()

    async def play(self, make_env: MakeEnv) -> Trajectory:
        """Play to the end; a failure of the environment or the engine is returned as data.

        So is a first prompt that fills the context: a trajectory without turns.
        """
        try:
            trajectory = await self._with_forks(make_env)
        except EnvError as error:
            trajectory = self._failed(error)
        except EngineError as error:
            return self.result(StopReason.ENGINE_ERROR, error=str(error))
        if trajectory.failed:
            self._on_fault(trajectory)
        return trajectory

    def live(self) -> LiveEpisode:
        """Return where the episode stands."""
        if self._before_end is not None:
            return self._before_end
        played, recorded = len(self._turns), self._recorded
        if played < len(recorded.turns) or (played == len(recorded.turns) and self._partial is None):
            return recorded  # still being played again
        return LiveEpisode(
            task=self._task,
            turns=tuple(self._turns),
            observation=None if self._reply is None else self._reply.messages,
            snapshot=None if self._reply is None else self._reply.snapshot,
            partial=self._partial,
        )

    async def _with_forks(self, make_env: MakeEnv) -> Trajectory:
        try:
            # No await between two conversations: in lockstep, the engine goes on without who has none.
            with self._engine.conversation(self._request_id):
                trajectory = await self._play(make_env)
            return await self._with_branches(trajectory) if self._forks else trajectory
        finally:
            for position in self._forks.values():
                self._thread.call_unattended(partial(_close, position.env))

    async def _play(self, make_env: MakeEnv) -> Trajectory:
        env = await self._on_thread("construction", partial(construct, make_env))
        snapshot = None if self._fork else self._recorded.snapshot  # forks are made of every reply
        if snapshot is not None and not base_env(env).can_snapshot:
            snapshot = None  # unpickling runs code, which a file cannot ask for: the environment is played again
        if snapshot is not None:
            async with self._closing(env):
                restored = await self._on_thread("its snapshot", partial(restore, snapshot))
            env = restored
        async with self._closing(env):
            self._env_id = await self._on_thread("construction", partial(env_id, env))
            return await self._continue(await (self._begin(env) if snapshot is None else self._take_up(env)))

    @asynccontextmanager
    async def _closing(self, env: Env) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            if self._thread.is_lost:  # hanging, or cancelled within a call
                self._thread.call_unattended(partial(_close, env))
            else:
                with suppress(EnvError):  # what went wrong first says more
                    await self._on_thread("close()", partial(_close, env))
            raise
        await self._on_thread("close()", partial(_close, env))

    async def _begin(self, env: Env) -> _Position | None:
        base = base_env(env)
        task = self._task
        beginning = partial(reset, env, base, seed=task.seed, rollout_index=task.rollout_index)
        reply = await self._on_thread("reset()", beginning)
        self._gold_answer, self._tools = reply.gold_answer, reply.tools
        if recorded := self._recorded.turns:
            observation_ids = recorded[0].observation_ids
        elif self._cannot_fit(reply):
            return None
        else:
            observation_ids = await self._rendered(partial(self._renderer.start, reply.messages, self._tools))
        return _Position(
            env=env,
            reply=reply,
            history=reply.messages,
            context_ids=observation_ids,
            observation_ids=observation_ids,
        )

    async def _take_up(self, env: Env) -> _Position:
        """Go on with an environment that was restored: what was said before is known."""
        base, recorded = base_env(env), self._recorded
        *_, last = turns = recorded.turns
        known = EnvReply(
            messages=recorded.observation or (),
            state_key=last.next_state_key,
            info=dict(last.extras),
            snapshot=recorded.snapshot,
        )
        reply = await self._on_thread("its snapshot", partial(check_restored, base, known))
        self._gold_answer, self._tools = reply.gold_answer, reply.tools
        self._final_info, self._turns = reply.info, list(turns)
        history, context_ids = turns[0].observation, turns[0].observation_ids
        for turn, following in pairwise(turns):
            history = (*history, turn.message, *following.observation)
            kept = context_ids + turn.action_ids if following.extends else ()
            context_ids = kept + following.observation_ids
        position = _Position(
            env=env,
            reply=reply,
            turns=turns,
            history=history,
            context_ids=context_ids,
            observation_ids=last.observation_ids,
        )
        return await self._after(position, last, reply)

    def _cannot_fit(self, reply: EnvReply) -> bool:
        """Tell whether a context cannot hold what the environment said, whatever its tokens are."""
        texts = (message.get("content") for message in reply.messages)
        num_chars = sum(len(text.strip()) for text in texts if isinstance(text, str))  # some templates strip
        longest = self._renderer.max_token_chars
        return longest is not None and num_chars > longest * self._config.max_context_tokens

    async def _after(self, position: _Position, turn: Turn, reply: EnvReply) -> _Position:
        """Return where the episode stands after a turn, given what the environment said to it.

        The tokens of a turn that is played again are those recorded, whatever the renderer would make of it today.
        """
        before = position.context_ids
        history = (*position.history, turn.message, *reply.messages)

        def render() -> tuple[bool, tuple[int, ...]]:
            added = self._renderer.extend(before, turn.action_ids, reply.messages)
            return (True, added) if added is not None else (False, self._renderer.start(history, self._tools))

        if following := self._recorded.turns[len(self._turns) :]:
            extends, observation_ids = following[0].extends, following[0].observation_ids
        else:
            extends, observation_ids = await self._rendered(render)
        return _Position(
            env=position.env,
            reply=reply,
            turns=position.turns,
            history=history,
            context_ids=before + turn.action_ids + observation_ids if extends else observation_ids,
            observation_ids=observation_ids,
            extends=extends,
        )

    async def _rendered(self, render: Callable[[], R]) -> R:
        """Render what the environment said; what a chat template cannot make of it is the environment's fault.

        That is done on the environment's thread, beside the event loop, where other episodes go on.
        """

        def carefully() -> R:
            try:
                return render()
            except Exception as error:
                words = error if isinstance(error, AgentRLError) else line_of(error)
                raise EnvError(f"environment {self._env_id}: its messages cannot be rendered: {words}") from error

        rendered: R = await self._on_thread("rendering", carefully)
        return rendered

    async def _continue(self, position: _Position | None) -> Trajectory:
        """Play from a position to the end; None: the first prompt cannot fit into a context."""
        if position is None:
            return self._overflow(f"more than {self._config.max_context_tokens}")
        config, env, base = self._config, position.env, base_env(position.env)
        self._turns = list(position.turns)
        while True:
            if self._fork and len(self._turns) % config.branches.every == 0:
                copied = await self._on_thread("fork()", partial(copy_env, env))
                self._forks[len(self._turns)] = replace(position, env=copied, turns=tuple(self._turns))
            before, reply = position.context_ids, position.reply
            self._reply = reply
            room = config.max_context_tokens - len(before)
            budget = config.max_episode_tokens - sum(len(turn.action_ids) for turn in self._turns)
            if room < 1:
                return self._overflow(str(len(before)))
            if budget < 1:
                return self.result(StopReason.MAX_TOKENS, truncated=True)
            self._check_observation(reply)
            completion = await self._sample(before, min(config.max_turn_tokens, budget, room))
            message = self._renderer.parse(completion.token_ids)
            turn = Turn(
                observation_ids=position.observation_ids,
                extends=position.extends,
                action_ids=completion.token_ids,
                behavior_logprobs=completion.logprobs,
                versions=completion.versions,
                reward=0.0,
                state_key=reply.state_key,
                finish_reason=completion.finish_reason,
                observation=reply.messages,
                message=message,
            )
            if completion.finish_reason is not FinishReason.STOP:  # an unfinished action is never carried out
                self._add(turn, reply, is_last=True)
                is_full = room <= min(config.max_turn_tokens, budget)
                reason = StopReason.CONTEXT_OVERFLOW if is_full else StopReason.MAX_TOKENS
                return self.result(reason, truncated=True)
            self._acting = turn
            reply = await self._on_thread("step()", partial(step, env, base, message))
            self._acting, self._final_info = None, reply.info
            turn = replace(
                turn,
                reward=reply.reward,
                next_state_key=reply.state_key,
                action_key=reply.action_key,
                extras=reply.info,
            )
            is_over, is_too_long = reply.terminated or reply.truncated, self._cannot_fit(reply)
            self._add(turn, reply, is_last=is_over or is_too_long or len(self._turns) + 1 >= config.max_turns)
            if is_over:
                return self.result(StopReason.TERMINATED, truncated=not reply.terminated)
            if len(self._turns) >= config.max_turns:
                return self.result(StopReason.MAX_TURNS, truncated=True)
            if is_too_long:
                return self._overflow(f"more than {config.max_context_tokens}")
            position = await self._after(position, turn, reply)

    def _overflow(self, length: str) -> Trajectory:
        """Return an episode whose context is full, of this length; without a turn, that is the task's fault."""
        if self._turns:
            return self.result(StopReason.CONTEXT_OVERFLOW, truncated=True)
        words = (
            f"rollout.max_context_tokens: {self._config.max_context_tokens} leaves no room after the first prompt of "
            f"{length} tokens; raise it"
        )
        fault = Fault(kind="the first prompt is too long")
        return self.result(StopReason.CONTEXT_OVERFLOW, truncated=True, error=words, fault=fault)

    def _check_observation(self, reply: EnvReply) -> None:
        """Refuse to go on with an action that was begun after other words."""
        recorded = self._recorded
        if recorded.partial is None or len(self._turns) != len(recorded.turns):
            return
        if recorded.observation is not None and reply.messages != recorded.observation:
            raise EnvError(
                f"environment {self._env_id}: played again, it says before turn {len(self._turns)} "
                f"{abbreviated(reply.messages)}, and was recorded with {abbreviated(recorded.observation)}; {_DEPEND}"
            )

    def _add(self, turn: Turn, reply: EnvReply, *, is_last: bool) -> None:
        """Add a turn, after which the environment says this; one that was recorded must have come out again as it was."""
        number = len(self._turns)
        is_new = number >= len(self._recorded.turns)
        if not is_new:
            recorded = self._recorded.turns[number]
            for name in _REPLAYED:
                found, expected = getattr(turn, name), getattr(recorded, name)
                if found != expected:
                    raise EnvError(
                        f"environment {self._env_id}: played again, turn {number} has another {name}: "
                        f"{abbreviated(found)}, and was recorded with {abbreviated(expected)}; {_DEPEND}"
                    )
        if is_last:
            self._before_end = (
                self.live()
            )  # until it is closed; from there, the environment takes its last action again
        self._turns.append(turn)
        self._partial, self._reply = None, reply
        if is_new and self._on_change is not None:
            self._on_change(self.live())

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
        episode._env_id, episode._tools, episode._request_id = self._env_id, self._tools, name
        with self._engine.conversation(name):
            try:
                env = await episode._on_thread("fork()", partial(copy_env, position.env, seed=seed))
                async with episode._closing(env):
                    return await episode._continue(replace(position, env=env))
            except EnvError as error:
                failed = episode._failed(error)
                self._on_fault(failed)
                return failed
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
        except (EnvError, asyncio.CancelledError):
            raise
        except Exception as error:
            if self._thread.is_lost:
                raise EnvError(f"{where} did not return within rollout.env_timeout_s: {timeout_s:g} s") from error
            raise EnvError(f"{where} raised {raised_words(error)}") from error
        finally:
            self._env_s += time.perf_counter() - begin

    def _failed(self, error: EnvError) -> Trajectory:
        """Return what was played, with the action at which the environment failed."""
        if self._acting is not None:
            self._turns.append(self._acting)
        hanging = self._thread.stack if self._thread.is_lost else None
        fault = fault_of(error.__cause__ or error, hanging=hanging)
        return self.result(StopReason.ENV_ERROR, error=str(error), fault=fault)

    def result(
        self, reason: StopReason, *, truncated: bool = False, error: str | None = None, fault: Fault | None = None
    ) -> Trajectory:
        """Return what was played so far as a trajectory that ended."""
        metrics = {key: float(value) for key, value in self._final_info.items() if is_number(value)}
        errors = [turn.extras.get("tool_errors") for turn in self._turns]
        num_errors = sum(float(count) for count in errors if is_number(count))
        return Trajectory(
            group_id=self._task.group_id,
            trajectory_id=self._task.trajectory_id,
            env_id=self._env_id,
            seed=self._task.seed,
            turns=tuple(self._turns),
            stop_reason=reason,
            truncated=truncated,
            metrics=metrics | {"tool_errors": num_errors, "env_s": self._env_s},
            error=None if error is None else printable(error),
            fault=fault,
            gold_answer=self._gold_answer,
        )


_DEPEND = "make it depend on its seed and the actions alone, or set can_snapshot"
_REPLAYED = ("observation", "reward", "state_key", "next_state_key", "action_key")
"""What a turn that is played again must have in common with the recorded one, beside the action."""


def _close(env: Env) -> None:
    env.close()


def _completion(turn: Turn) -> Completion:
    """Return what was sampled for a turn."""
    return Completion(
        token_ids=turn.action_ids,
        logprobs=turn.behavior_logprobs,
        versions=turn.versions,
        finish_reason=turn.finish_reason,
    )
