"""Evaluation tasks, played by a model behind an OpenAI-compatible API: messages alone, no tokens, no weights, no torch."""

import asyncio
import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.chat.renderer import Tools
from agentrl.data.plain import PlainDataError, abbreviated, is_number, merged, plain_data, printable
from agentrl.env import base_env, close_env
from agentrl.env.endpoint import ChatClient, ChatCompletion, Endpoint, Refusal
from agentrl.env.make import EnvConfig
from agentrl.env.message_env import is_message
from agentrl.errors import ConfigError, EngineError, EnvError, EnvironmentFailure
from agentrl.recipe.plugin import explain
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.conversation import End, Task, episode_metrics
from agentrl.rollout.env_driver import CLOSING_S, Env, EnvReply, EnvThread, MakeEnv, construct, env_id, reset, step
from agentrl.rollout.evaluation import Evaluation, EvaluationConfig, summarize_evaluation
from agentrl.rollout.faults import RaisedError, describe_fault
from agentrl.rollout.stream import group_tasks, make_group
from agentrl.rollout.tasks import Tasks
from agentrl.rollout.trial import describe_env
from agentrl.types import FinishReason, Message, StopReason, Trajectory, TrajectoryGroup, Turn

_MAX_RETRIES = 6
"""Retries of a request after a fault: they take half a minute, and what a server asks for (`Retry-After`)."""
_MAX_SILENT = 3
"""Requests without an answer, one after the other, after which nothing more is asked."""
_TOO_LONG = re.compile(r"context.{0,20}(length|size|window)|maximum model length|prompt is too long", re.IGNORECASE)
"""Words with which servers refuse a dialogue that does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModel:
    """A model behind an OpenAI-compatible API."""

    url: str
    """Base of the API, with its version: `http://127.0.0.1:8000/v1`."""
    name: str
    """Name of the model there."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key. It need not be set for a server that asks for none."""
    prices: tuple[float, float] | None = None
    """Price of a million tokens read, and of a million written. None: not known."""


class Playing(BaseModel):
    """The sections of a recipe that playing reads, without those of training."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    seed: int = Field(default=0, ge=0, lt=2**32)
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @classmethod
    def read(cls, *layers: Mapping[str, Any]) -> Self:
        """Return the sections of a recipe, each layer over the one before; another `env.id` drops the options of the former.

        Environments that have an option `prompt: agentrl.Prompt` get `full`, unless a layer gives it.

        Raises:
            ConfigError: naming each field at fault.
        """
        sections: dict[str, Any] = {}
        for layer in layers:
            if layer.get("agent") is not None:
                raise ConfigError(
                    "agent: with an endpoint only an environment is played; give its address to the program itself, or leave "
                    "--endpoint out"
                )
            env = layer.get("env")
            if isinstance(env, Mapping) and env.get("id") not in (None, _nested_id(sections)):
                sections = {**sections, "env": {}}
            sections = merged(sections, layer)
        try:
            playing = cls.model_validate(sections)
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error, cls))) from error
        full = {"env": playing.env.with_prompt("full"), "evaluation": playing.evaluation.with_prompt("full")}
        return playing.model_copy(update=full)


def _nested_id(sections: Mapping[str, Any]) -> object:
    env = sections.get("env")
    return env.get("id") if isinstance(env, Mapping) else None


OnEnd = Callable[[Trajectory], object]


async def evaluate_endpoint(
    playing: Playing,
    model: ChatModel,
    *,
    first: int = 0,
    on_end: OnEnd = lambda _: None,
    on_warning: Callable[[str], object] = lambda _: None,
) -> dict[str, Evaluation]:
    """Play the evaluation tasks of each environment; return the figures, by the prefix of their metrics.

    An episode to which the endpoint gives no answer in spite of retries, or whose environment fails, is counted as failed and
    is in no mean. Its metrics `prompt_tokens`, `completion_tokens` and (with prices) `cost` are of each episode.

    Args:
        playing: environments, limits and tasks.
        model: that plays.
        first: of a table, which task comes first.
        on_end: called with each finished episode.
        on_warning: called with what a user should know.

    Raises:
        EnvironmentFailure: when the endpoint refuses everything, or does not answer at all, with the reason.
    """
    player = _Player(model, playing)
    found = {}
    try:
        envs = playing.evaluation.env or {"": playing.env}
        described = [await describe_env(env.make, timeout_s=playing.rollout.env_timeout_s) for env in envs.values()]
        await player.client.check_reachable()
        for (name, env), description in zip(envs.items(), described, strict=True):
            tasks = Tasks(
                seed=playing.seed, evaluation_seed=playing.evaluation.seed, num=description.num_tasks, first=first
            )
            if (words := tasks.fewer_tasks_warning(playing.evaluation.num_tasks)) is not None:
                on_warning(words)
            prefix = f"eval/{name}/" if name else "eval/"
            groups = await player.play(env.make, tasks, prefix=prefix, on_end=on_end)
            evaluation = summarize_evaluation(groups, playing.evaluation)
            evaluation.metrics.pop("action_tokens", None)  # an endpoint shows no tokens: completion_tokens counts them
            found[prefix] = evaluation
    finally:
        await player.client.close()
    return found


class _ContextFullError(Exception):
    """The dialogue does not fit into the model's context."""


class _Player:
    """Plays many episodes at once against one endpoint."""

    def __init__(self, model: ChatModel, playing: Playing) -> None:
        self.model = model
        self.rollout = playing.rollout
        self._evaluation = playing.evaluation
        given = playing.rollout.model_fields_set
        # Limits that training needs hold here if somebody wrote them down.
        self.max_turn_tokens = playing.rollout.max_turn_tokens if "max_turn_tokens" in given else None
        """Largest number of tokens of a turn. None: the endpoint's own limit."""
        self.max_episode_tokens = playing.rollout.max_episode_tokens if "max_episode_tokens" in given else None
        self.client = ChatClient(
            Endpoint(
                url=model.url,
                api_key_env=model.api_key_env,
                requests_per_minute=math.inf,
                max_concurrent=playing.rollout.live_episodes(playing.rollout.num_groups),
                timeout_s=playing.rollout.engine_timeout_s,
                max_retries=_MAX_RETRIES,
                cache=None,
            )
        )
        self._has_answered = False
        self._num_silent = 0
        self._end_of_asking: str | None = None
        """Reason for which nothing more is asked. None: it is."""

    async def play(self, make_env: MakeEnv, tasks: Tasks, *, prefix: str, on_end: OnEnd) -> list[TrajectoryGroup]:
        """Play every evaluation task, `RolloutConfig.live_episodes` at once."""
        named = {
            f"{prefix}{place:06d}": task for place, task in enumerate(tasks.evaluation(self._evaluation.num_tasks))
        }
        queue = deque(
            one
            for name, task in named.items()
            for one in group_tasks(name, task, size=self._evaluation.samples, run_seed=tasks.seed)
        )
        done: dict[str, list[Trajectory]] = {name: [] for name in named}

        async def work() -> None:
            thread = EnvThread()
            try:
                while queue:
                    if thread.is_lost:
                        thread.close()
                        thread = EnvThread()
                    trajectory = await _Episode(self, queue.popleft(), thread).play(make_env)
                    done[trajectory.group_id].append(trajectory)
                    on_end(trajectory)
            finally:
                thread.close()
                threads.append(thread)

        threads: list[EnvThread] = []
        num_live = self.rollout.live_episodes(self.rollout.num_groups)
        workers = [asyncio.create_task(work()) for _ in range(min(len(queue), num_live))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            deadline = time.monotonic() + CLOSING_S
            for thread in threads:
                if not thread.is_hanging:
                    thread.join(timeout_s=max(0.0, deadline - time.monotonic()))
        return [make_group(name, trajectories) for name, trajectories in done.items()]

    async def ask(self, messages: Sequence[Message], tools: Tools, *, max_tokens: int | None) -> ChatCompletion:
        """Return the model's next message.

        Raises:
            _ContextFullError: if the dialogue is too long for the model.
            EngineError: when there is no answer, or there were too few for this endpoint to be asked again.
            EnvironmentFailure: for a key, a model or an address that the endpoint does not know.
        """
        if self._end_of_asking is not None:
            raise EngineError(self._end_of_asking)
        body: dict[str, Any] = {
            "model": self.model.name,
            "messages": list(map(_sent, messages)),
            "temperature": self._evaluation.temperature,
        }
        body |= {"tools": list(tools)} if tools else {}
        body |= {} if max_tokens is None else {"max_tokens": max_tokens}
        limit_s = self.rollout.engine_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                completion = await self.client.complete(body, check=received)
        except TimeoutError:
            words = f"{self.model.url} did not answer within rollout.engine_timeout_s: {limit_s:g} s"
        except Refusal as refusal:
            words = str(refusal)
            if refusal.status in (400, 413, 422) and _TOO_LONG.search(words):
                raise _ContextFullError(words) from refusal
            if not self._has_answered and refusal.status in (401, 403, 404):
                raise EnvironmentFailure(words) from refusal
            if self._has_answered:  # this dialogue is refused, and another may not be
                raise EngineError(words) from refusal
        except EnvironmentFailure as failure:
            words = str(failure)
        else:
            self._has_answered, self._num_silent = True, 0
            return completion
        self._num_silent += 1
        if self._num_silent >= _MAX_SILENT:
            self._end_of_asking = f"{words}; nothing more was asked"
        raise EngineError(words)


class _Episode:
    """One episode, played again with a fresh environment if its environment fails."""

    def __init__(self, player: _Player, task: Task, thread: EnvThread) -> None:
        self._player = player
        self._task = task
        self._thread = thread
        self._name = ""
        self._turns: list[Turn] = []
        self._tools: Tools = ()
        self._gold_answer: str | None = None
        self._info: dict[str, Any] = {}
        self._prompt_tokens = self._completion_tokens = 0
        self._env_s = 0.0

    async def play(self, make_env: MakeEnv) -> Trajectory:
        """Play to the end. A failure of the environment or the endpoint is returned as data."""
        end = await self._attempt(make_env)
        for _ in range(self._player.rollout.max_retries):
            if end.reason is not StopReason.ENV_ERROR or self._thread.is_lost:
                break
            end = await self._attempt(make_env)
        return self._trajectory(end)

    async def _attempt(self, make_env: MakeEnv) -> End:
        self._turns, self._info = [], {}
        made: list[Env] = []

        def make() -> str:
            made.append(construct(make_env))
            return env_id(made[0])

        try:
            self._name = await self._call("construction", make)
            end = await self._converse(made[0])
            await self._call("close()", partial(close_env, made.pop()))
        except EnvError as error:
            cause = error.__cause__
            hanging = self._thread.stack if self._thread.is_lost else None
            fault = cause.fault if isinstance(cause, RaisedError) else describe_fault(cause or error, hanging=hanging)
            return End(reason=StopReason.ENV_ERROR, error=str(error), fault=fault)
        except EngineError as error:
            return End(reason=StopReason.ENGINE_ERROR, error=str(error))
        finally:
            for env in made if self._thread.is_lost else ():
                base_env(env).abandon()
            self._thread.call_unattended(partial(_close_all, made))
        return end

    async def _converse(self, env: Env) -> End:
        """Ask and act until the episode ends."""
        player, rollout = self._player, self._player.rollout
        base = base_env(env)
        begin = partial(reset, env, base, self._task.env_task, rollout_index=self._task.rollout_index)
        reply: EnvReply = await self._call("reset()", begin)
        self._gold_answer, self._tools = reply.gold_answer, reply.tools
        messages = list(reply.messages)
        num_opening, num_sampled = len(messages), 0
        while True:
            limits = [player.max_turn_tokens, (player.max_episode_tokens or math.inf) - num_sampled]
            max_tokens = min(limit for limit in limits if limit is not None)
            if max_tokens < 1:
                return End(reason=StopReason.MAX_TOKENS, truncated=True)
            shown = rollout.history.shown(messages, num_opening=num_opening)
            try:
                answer = await player.ask(
                    shown, self._tools, max_tokens=None if max_tokens == math.inf else int(max_tokens)
                )
            except _ContextFullError as error:
                words = None if self._turns else f"the first prompt is too long: {error}"
                return End(reason=StopReason.CONTEXT_OVERFLOW, truncated=True, error=words)
            self._prompt_tokens += answer.prompt_tokens
            self._completion_tokens += answer.completion_tokens
            num_sampled += answer.completion_tokens
            message = received(answer.message, number=len(self._turns))
            is_cut = answer.finish_reason == "length"
            turn = partial(_turn, message, is_cut=is_cut, before=reply)
            if is_cut and rollout.cut_off == "end":
                self._turns.append(turn(EnvReply(messages=(), state_key=None)))
                return End(reason=StopReason.MAX_TOKENS, truncated=True)
            try:
                after: EnvReply = await self._call("step()", partial(step, env, base, message))
            except EnvError:
                self._turns.append(turn(EnvReply(messages=(), state_key=None)))
                raise
            self._turns.append(turn(after))
            self._info = after.info
            if (end := self._end(after)) is not None:
                return end
            messages += [message, *after.messages]
            reply = after

    def _end(self, reply: EnvReply) -> End | None:
        if reply.reward is None:
            words = f"environment {self._name}: nothing could score it"
            return End(reason=StopReason.UNSCORED, error=words)
        if reply.terminated or reply.truncated:
            return End(reason=StopReason.TERMINATED, truncated=not reply.terminated)
        if len(self._turns) >= self._player.rollout.max_turns:
            return End(reason=StopReason.MAX_TURNS, truncated=True)
        return None

    async def _call(self, what: str, function: Callable[[], Any]) -> Any:
        """`EnvThread.call_env` of this environment, timed."""
        begin = time.perf_counter()
        try:
            return await self._thread.call_env(self._name, what, function, timeout_s=self._player.rollout.env_timeout_s)
        finally:
            self._env_s += time.perf_counter() - begin

    def _trajectory(self, end: End) -> Trajectory:
        prices = self._player.model.prices
        metrics = {key: float(value) for key, value in self._info.items() if is_number(value)}
        metrics |= {"env_s": self._env_s, **episode_metrics(self._turns, self._tools)}
        metrics |= {
            "prompt_tokens": float(self._prompt_tokens),
            "completion_tokens": float(self._completion_tokens),
        }
        if prices is not None:
            metrics["cost"] = (self._prompt_tokens * prices[0] + self._completion_tokens * prices[1]) / 1e6
        task = self._task
        return Trajectory(
            group_id=task.group_id,
            trajectory_id=task.trajectory_id,
            env_id=self._name,
            seed=task.seed,
            split=task.split,
            task_index=task.task_index,
            turns=tuple(self._turns),
            stop_reason=end.reason,
            truncated=end.truncated,
            metrics=metrics,
            error=None if end.error is None else printable(end.error),
            fault=end.fault,
            gold_answer=self._gold_answer,
        )


def _close_all(envs: Sequence[Env]) -> None:
    for env in envs:
        close_env(env)


def _turn(message: Message, after: EnvReply, *, is_cut: bool, before: EnvReply) -> Turn:
    """Return a turn without tokens: an endpoint shows none."""
    return Turn(
        observation_ids=(),
        action_ids=(),
        behavior_logprobs=(),
        versions=(),
        reward=after.reward or 0.0,
        state_key=before.state_key,
        next_state_key=after.state_key,
        action_key=after.action_key,
        finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        observation=before.messages,
        message=message,
        extras=after.info,
    )


def received(given: Message, *, number: int = 0) -> Message:
    """Return an endpoint's message as environments take it: arguments as an object, if they are one, and an id for each call.

    Raises:
        ValueError: for what is no message. A call whose arguments are malformed is one.
    """
    try:
        message = plain_data(given)
    except PlainDataError as error:
        raise ValueError(f"no chat completion: {error}") from error
    said: Message = {"role": "assistant", "content": message.get("content") or ""}
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    said |= {"reasoning_content": thoughts} if isinstance(thoughts, str) else {}
    if calls := message.get("tool_calls"):
        said["tool_calls"] = calls
    if not is_message(said):
        raise ValueError(f"no chat completion: {abbreviated(given)}")
    for place, call in enumerate(said.get("tool_calls", ())):
        if not isinstance(call.get("id"), str) or not call["id"]:
            call["id"] = f"call_{number}_{place}"
        call["type"] = "function"
        call["function"] = {**call["function"], "arguments": _parsed(call["function"].get("arguments"))}
    return said


def _parsed(arguments: Any) -> Any:
    """Return the arguments that a text holds as an object; else what was given, which is malformed."""
    if arguments is None or arguments == "":
        return {}
    with suppress(ValueError, TypeError, RecursionError):
        found = json.loads(arguments)
        if isinstance(found, dict):
            return found
    return arguments


def _sent(message: Message) -> Message:
    """Return a message as endpoints take it: without thoughts, and the arguments of calls an object in text.

    Servers refuse a dialogue in which arguments are no JSON, so that malformed ones are quoted in an object.
    """
    plain = {key: value for key, value in message.items() if key != "reasoning_content"}
    if not message.get("tool_calls"):
        return plain
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = _parsed(function.get("arguments"))
        text = json.dumps(arguments if isinstance(arguments, dict) else {"malformed": arguments})
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**plain, "tool_calls": calls}
