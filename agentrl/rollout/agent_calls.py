"""Calls of a program that plays an episode: from the endpoint to the pool's loop, to a sampled answer and its turn.

`ClientRun` is one run of the program: its calls cross over to the pool's loop, and wait there for as long as that stands still
for an update. `CallRecord` is what is known of the episode: a later run of the program gets the same answers to the same calls.
"""

import asyncio
import math
import re
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentrl.agent.clients import AgentError, Client
from agentrl.agent.config import AgentConfig
from agentrl.agent.session import AgentSession
from agentrl.chat import Dialogue
from agentrl.data.plain import abbreviated, is_number, line_of
from agentrl.endpoint import tree
from agentrl.endpoint.call import (
    Asked,
    RefusalKind,
    RefusedError,
    Report,
    Said,
    TokenLogprob,
    too_long,
    wire_message,
)
from agentrl.endpoint.canonical import after_answer
from agentrl.endpoint.server import Endpoint
from agentrl.engine import Sampler
from agentrl.env.background import BackgroundWork, BlockedLoopError
from agentrl.errors import AgentRLError, EngineError
from agentrl.rollout.conversation import End, Partial, Task
from agentrl.rollout.faults import RaisedError
from agentrl.rollout.sample_action import NOTHING, Action, EpisodeContext
from agentrl.types import (
    Completion,
    Fault,
    FinishReason,
    Message,
    StopReason,
    Turn,
    context_of,
    parent_of,
)

_REWARD_TIMEOUT_S = 55.0
"""Deadline of reward functions that are coroutines."""


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """Calls of an episode, in the order in which they were asked, over all runs of its program. It grows."""

    turns: list[Turn]
    """Turns of the calls that were answered, and before which none waits for its answer."""
    partials: dict[str, Completion]
    """Tokens sampled of further calls, by their names."""

    def numbers(self) -> dict[str, int]:
        """Return the number of each turn, by the name of its call."""
        return {turn.call: number for number, turn in enumerate(self.turns)}


@dataclass(slots=True, kw_only=True, eq=False)
class AgentCall:
    """A call of a run. It changes."""

    asked: tree.Call
    name: str
    """Name of the call in the episode: the digest of its request, and how many equal ones came before."""
    state_key: str | None
    extras: dict[str, Any]
    agent: str = ""
    """Role that the program named, as the model that it asked for."""
    line: str = ""
    """Id at the engine of the line of calls that it continues."""
    dialogue: Dialogue | None = None
    action: Action | None = None
    message: Message = field(default_factory=dict)
    turn: int | None = None
    """Number of its turn. None: it has none yet."""

    def said(self) -> list[Message]:
        """Return the dialogue up to its answer."""
        return [*self.asked.history, self.message]

    @property
    def completion(self) -> Completion:
        """Tokens sampled so far."""
        return NOTHING if self.action is None else self.action.completion

    @property
    def is_done(self) -> bool:
        """True if it is sampled whole."""
        return self.completion.finish_reason is not FinishReason.ABORTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A program ended in an error, or hung."""

    words: str
    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result that a program reports at its end."""

    reward: float | None
    """None: nothing can be said."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Entries that are None: nothing can be said about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program, and the endpoint that it calls."""

    config: AgentConfig
    client: Client
    endpoint: Endpoint
    on_ignored: Callable[[Mapping[str, str]], object]
    """Called with the parameters of each call that are not taken over."""

    @property
    def name(self) -> str:
        """Name of the program."""
        return self.config.name


class ClientRun:
    """One run of a program on a task, in a session of its own. Everything happens on the pool's loop."""

    def __init__(
        self,
        program: Program,
        task: Task,
        record: CallRecord,
        *,
        context: EpisodeContext[Sampler],
        on_change: Callable[[], object],
        name: str,
    ) -> None:
        """Begin without calls.

        Args:
            program: plays, and its endpoint.
            task: fixes the episode.
            record: calls that earlier runs have made; it grows.
            context: parts that all episodes share.
            on_change: called after each call that was not recorded before.
            name: of the episode at the engine.
        """
        self.limit: End | None = None
        """Limit of the episode that refused a call. None: none did."""
        self.calls: list[AgentCall] = []
        """Calls that were not refused, in the order in which they were asked."""
        self.counts: Counter[str] = Counter()
        self.rewards: dict[int, float] = {}
        """Rewards paid so far, by the number of the call in the session."""
        self.state_key: str | None = None
        self.undelivered: frozenset[int] = frozenset()
        """Numbers in the session of the calls whose answer the program never read."""
        self._program = program
        self._task = task
        self._record = record
        self._recorded = record.numbers()
        self._context = context
        self._on_change = on_change
        self._name = name
        self._tree = tree.CallTree(thoughts=program.config.thoughts)
        self._by_number: dict[int, AgentCall] = {}
        self._waiting: deque[AgentCall] = deque()
        """Calls that have no turn yet."""
        self._names: Counter[str] = Counter()
        self._engine_error: EngineError | None = None
        self._is_over = False
        self._num_running = 0
        self._loop = asyncio.get_running_loop()
        self._change: asyncio.Future[None] = self._loop.create_future()
        """Done at the next change of the calls under way."""
        self._open = ExitStack()
        """Conversations at the engine."""
        self._answering: set[asyncio.Task[Any]] = set()

    async def play(self, row: dict[str, Any]) -> Verdict | Crash:
        """Run the program to its end.

        Raises:
            EngineError: when the engine cannot sample.
        """
        endpoint = self._program.endpoint
        session = endpoint.open_session(self._over(self._answer), count=self._over(self._count), report=self._report)
        given = AgentSession(
            base_url=session.base_url,
            api_key=session.api_key,
            anthropic_url=session.anthropic_url,
            seed=self._task.seed,
            split=self._task.split,
            report=self._report,
        )
        work = BackgroundWork(described(self._program.client.run(row, given)))
        client = asyncio.wrap_future(work.future)
        try:
            await self._wait(client)
            if client.cancelled():  # with all that shared its event loop
                words = "another coroutine blocked the event loop that all share: write that as `def`"
                return Crash(words=f"agent {self._program.name}: {words}", fault=Fault(kind="a blocked event loop"))
            return _verdict(client.result())
        except RaisedError as error:
            raised = error.raised
            kind = f"{type(raised).__name__}: {raised.kind}" if isinstance(raised, AgentError) else error.fault.kind
            if self._answering:  # its next run gets the answers that it did not wait for
                await asyncio.wait(self._answering)
            return Crash(words=f"agent {self._program.name}: {error.line}", fault=replace(error.fault, kind=kind))
        except TimeoutError:
            return await self._given_up(work)
        finally:
            self._is_over = True
            client.cancel()
            self.undelivered = frozenset(endpoint.close_session(session))
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            self._open.close()

    async def _given_up(self, work: BackgroundWork) -> Crash:
        """Return the end of a program that hangs."""
        self._is_over = True
        seconds, why = self._program.config.timeout_s, ""
        try:
            await asyncio.to_thread(work.give_up)
        except BlockedLoopError:
            why = (
                "; a coroutine blocks the event loop that all share: write it as `def`, or await asyncio.to_thread(...)"
            )
        words = f"it neither called nor ended for agent.timeout_s: {seconds:g} s{why}"
        return Crash(words=f"agent {self._program.name}: {words}", fault=Fault(kind="hangs"))

    async def _wait(self, client: "asyncio.Future[Any]") -> None:
        """Wait for the end of the program.

        Raises:
            TimeoutError: after a silence that is too long.
            EngineError: when the engine cannot sample.
        """
        while not client.done():
            self._change = self._loop.create_future()
            if self._engine_error is not None:
                raise self._engine_error
            ends = {client, self._change}
            if self._num_running:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            else:
                async with self._context.clock.timeout(self._program.config.timeout_s):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._engine_error is not None:
            raise self._engine_error

    def _changed(self) -> None:
        if not self._change.done():
            self._change.set_result(None)

    def _over(self, function: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
        """Return a function that is awaited on the endpoint's loop and runs on the pool's."""

        async def cross(asked: Asked) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(noted(asked), self._loop))

        async def noted(asked: Asked) -> Any:
            task = asyncio.current_task()
            assert task is not None, "a task runs it"
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return await function(asked)

        return cross

    def _report(self, report: Report) -> None:
        """Take a report on any thread; it counts before each call that is asked after it."""
        number = None
        if report.reward is not None and report.call is not None:
            number = _number(report.call)
            if number is None or number not in self._by_number:
                raise RefusedError(RefusalKind.INVALID, f"call: no answer of this session has the id {report.call!r}")
        if report.reward is not None and not self._by_number:
            raise RefusedError(RefusalKind.INVALID, "reward: the policy has said nothing yet that it could pay for")
        self._loop.call_soon_threadsafe(self._take, report, number)

    def _take(self, report: Report, number: int | None) -> None:
        if report.state is not None:
            self.state_key = report.state
        if report.reward is not None:
            number = max(self._by_number) if number is None else number
            self.rewards[number] = self.rewards.get(number, 0.0) + report.reward

    async def _count(self, asked: Asked) -> int:
        asked = self._whole(asked)
        start = partial(self._context.renderer.start, asked.messages, asked.tools)
        return len(await asyncio.to_thread(_rendered, start))

    async def _answer(self, asked: Asked) -> Said:
        """Answer a call.

        Raises:
            RefusedError: for what is refused, with the reason.
        """
        call = self._arrived(self._whole(asked), asked)
        self._waiting.append(call)
        self._num_running += 1
        self._changed()
        try:
            action = await self._prepare(call, asked)
            await action.sample(self._context, name=call.line)
            if call.turn is None and asked.stop:
                num_entries = len(action.context_ids) + len(action.completion.token_ids) - 1 - action.experts_from
                action.completion = cut_at(action.completion, asked.stop, self._context.decode, num_entries=num_entries)
            return self._said(call, asked)
        except EngineError as error:
            self._engine_error = error
            raise RefusedError(RefusalKind.FAILED, "the engine failed") from error
        except BaseException:
            if call in self._waiting:
                self._waiting.remove(call)
                self.calls.remove(call)
                if call.completion.token_ids:  # another run of the program may ask for it again
                    self._record.partials[call.name] = call.completion
                self._commit()
            raise
        finally:
            self._num_running -= 1
            self._changed()

    def _whole(self, asked: Asked) -> Asked:
        """Return a request with all of its dialogue."""
        if not asked.previous:
            return asked
        number = _number(asked.previous)
        earlier = None if number is None else self._by_number.get(number)
        if earlier is None:
            raise RefusedError(RefusalKind.NOT_FOUND, f"no answer of this session has the id {asked.previous!r}")
        wire = wire_message(earlier.message, number=earlier.asked.number)
        return after_answer(asked, [*earlier.asked.history, wire])

    def _arrived(self, whole: Asked, asked: Asked) -> AgentCall:
        """Return a call in its place among the others.

        Raises:
            RefusedError: if the episode has no room for it.
        """
        config = self._context.config
        if self._is_over:
            raise RefusedError(RefusalKind.ENDED, "the episode is over")
        if len(self.calls) >= config.max_turns:
            self._refuse(StopReason.MAX_TURNS, f"it has had rollout.max_turns: {config.max_turns} calls")
        placed = self._tree.ask(whole)
        nth = self._names[placed.digest]
        self._names[placed.digest] += 1
        self._note(placed, asked)
        extras: dict[str, Any] = {"dialect": asked.dialect + ", streamed" * asked.form.stream}
        if asked.ignored:
            extras["ignored"] = dict(asked.ignored)
        if placed.kind is not tree.Kind.CONTINUES and placed.number:
            extras["call"] = placed.kind.value
        if placed.difference is not None:
            extras["difference"] = str(placed.difference)
        call = AgentCall(asked=placed, name=f"{placed.digest}.{nth}", state_key=self.state_key, extras=extras)
        call.agent = asked.model if asked.model in self._program.config.roles else ""
        call.line = self._line(call)
        self.calls.append(call)
        return call

    def _refuse(self, reason: StopReason, words: str) -> None:
        self.limit = End(reason=reason, truncated=True)
        raise RefusedError(RefusalKind.ENDED, f"the episode is over: {words}")

    def _note(self, placed: tree.Call, asked: Asked) -> None:
        """Count what happens to calls."""
        if placed.kind is tree.Kind.FORKS:
            self.counts["forked_calls"] += 1
        elif placed.kind is tree.Kind.REWRITES:
            self.counts["rewritten_calls"] += 1
        elif placed.kind is tree.Kind.ROOT and placed.number:
            self.counts["new_lines"] += 1
        self.counts["unsaid_thoughts"] += placed.is_unsaid
        self.counts["ignored_parameters"] += bool(asked.ignored)
        self._program.on_ignored(asked.ignored)

    def _line(self, call: AgentCall) -> str:
        """Return the id of its line at the engine, which keeps what it has computed for one: forks begin others."""
        parent = call.asked.parent
        if call.asked.kind is tree.Kind.CONTINUES and parent is not None and parent in self._by_number:
            return self._by_number[parent].line
        name = f"{self._name}/{call.asked.number}"
        self._open.enter_context(self._context.engine.conversation(name))
        return name

    async def _prepare(self, call: AgentCall, asked: Asked) -> Action:
        """Find or render its context, and return its action as far as it is known.

        Raises:
            RefusedError: if it does not fit.
        """
        config, recorded = self._context.config, self._recorded_turn(call)
        if recorded is not None:
            call.turn, turn = recorded, self._record.turns[recorded]
            call.dialogue = self._known_dialogue(call, turn, context_of(self._record.turns, recorded))
            call.action = Action(context_ids=(), max_tokens=0, seed=0, completion=_completion(turn))
            self._waiting.remove(call)
            self._commit()
            return call.action
        if self._context.cannot_hold(call.asked.history):
            raise self._no_room(2 * config.max_context_tokens)
        call.dialogue = dialogue = await asyncio.to_thread(_rendered, partial(self._dialogue, call))
        room = config.max_context_tokens - len(dialogue.context_ids)
        spent = sum(len(each.completion.token_ids) for each in self.calls if each.is_done)
        budget = config.max_episode_tokens - spent
        if room < 1:
            raise self._no_room(len(dialogue.context_ids))
        if budget < 1:
            self._refuse(
                StopReason.MAX_TOKENS, f"it has sampled rollout.max_episode_tokens: {config.max_episode_tokens}"
            )
        wanted = config.max_turn_tokens if asked.max_tokens is None else max(asked.max_tokens, 1)
        limit = min(config.max_turn_tokens, wanted, budget, room)
        begins = not (call.asked.kind.extends and dialogue.extends)
        call.action = Action(
            context_ids=dialogue.context_ids,
            max_tokens=limit,
            seed=self._task.call_seed(dialogue.context_ids, call.asked.sibling),
            experts_from=0 if begins else len(dialogue.context_ids) - len(dialogue.observation_ids) - 1,
            completion=self._record.partials.pop(call.name, NOTHING),
        )
        return call.action

    def _recorded_turn(self, call: AgentCall) -> int | None:
        """Return the number of the turn that a call is recorded as. None: it was not made before in this place."""
        number = self._recorded.get(call.name)
        if number is None or not call.asked.kind.extends or call.asked.parent is None:
            return number
        parent = self._by_number[call.asked.parent].turn
        return number if parent_of(self._record.turns[number], number) == parent else None

    def _no_room(self, num_tokens: int) -> RefusedError:
        most = self._context.config.max_context_tokens
        fault = None
        words = None
        if not any(call.is_done for call in self.calls):
            words = f"rollout.max_context_tokens: {most} leaves no room after the first prompt of {num_tokens} tokens; raise it"
            fault = Fault(kind="the first prompt is too long")
        self.limit = End(reason=StopReason.CONTEXT_OVERFLOW, truncated=True, error=words, fault=fault)
        return too_long(num_tokens=num_tokens, max_tokens=most)

    def _dialogue(self, call: AgentCall) -> Dialogue:
        asked, renderer = call.asked, self._context.renderer
        if asked.kind.extends and asked.parent is not None:
            base = self._by_number[asked.parent]
            assert base.dialogue is not None, "it was answered"
            return base.dialogue.after(base.completion.token_ids, base.message, asked.replies, renderer)
        return Dialogue.begin(asked.history, asked.tools, renderer, view=self._context.config.history)

    def _known_dialogue(self, call: AgentCall, turn: Turn, context_ids: tuple[int, ...]) -> Dialogue:
        asked = call.asked
        if asked.kind.extends and asked.parent is not None:
            base = self._by_number[asked.parent]
            assert base.dialogue is not None, "it was answered"
            said = base.completion.token_ids, base.message, asked.replies
            return base.dialogue.after_record(*said, turn.observation_ids, extends=turn.extends)
        view = self._context.config.history
        return Dialogue.of_record(asked.history, asked.tools, context_ids, view=view)

    def _said(self, call: AgentCall, asked: Asked) -> Said:
        """Record the answer, and return it as the client gets it."""
        dialogue, completion = call.dialogue, call.completion
        assert dialogue is not None, "its context is known"
        decode, number = self._context.decode, call.asked.number
        call.message = self._context.renderer.parse(completion.token_ids, dialogue.context_ids, dialogue.tools)
        as_text = None
        if asked.calls_as_text and call.message.get("tool_calls"):
            ends = completion.token_ids[-1:] if completion.finish_reason is FinishReason.STOP and not asked.stop else ()
            as_text = decode(completion.token_ids[: len(completion.token_ids) - len(ends)])
        wire = wire_message(call.message, number=number, calls_as_text=as_text)
        stopped_by = ""
        content = wire.get("content") or ""
        if found := sorted((content.index(stop), stop) for stop in asked.stop if stop in content):
            end, stopped_by = found[0]
            wire = {**wire, "content": content[:end]}
        self._tree.answer(number, call.message, wire=wire, stopped_by=stopped_by)
        self._by_number[number] = call
        if call.turn is None:
            self._commit()
            self._on_change()
        return Said(
            number=number,
            message=wire,
            is_cut=completion.finish_reason is FinishReason.LENGTH,
            stopped_by=stopped_by,
            prompt_tokens=len(dialogue.context_ids),
            completion_tokens=len(completion.token_ids),
            cached_tokens=completion.num_cached_tokens,
            logprobs=tuple(
                TokenLogprob(text=decode([token]), logprob=logprob)
                for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
            )
            if asked.logprobs
            else (),
            created=int(time.time()),
        )

    def _commit(self) -> None:
        """Turn each call into a turn that is sampled, as are all that were asked before it."""
        while self._waiting and self._waiting[0].is_done and self._waiting[0].message:
            call = self._waiting.popleft()
            call.turn = len(self._record.turns)
            self._record.turns.append(self._turn(call, call.turn))

    def _turn(self, call: AgentCall, number: int) -> Turn:
        dialogue, asked = call.dialogue, call.asked
        completion = call.completion
        assert dialogue is not None, "it was sampled"
        parent = None if asked.parent is None else self._by_number[asked.parent].turn
        return Turn(
            observation_ids=dialogue.observation_ids,
            extends=number == 0 or (asked.kind.extends and dialogue.extends),
            parent=None if parent in (None, number - 1) else parent,
            agent=call.agent,
            call=call.name,
            action_ids=completion.token_ids,
            behavior_logprobs=completion.logprobs,
            versions=completion.versions,
            reward=self.rewards.get(asked.number, 0.0),
            state_key=call.state_key,
            finish_reason=completion.finish_reason,
            experts=completion.experts,
            observation=asked.replies,
            message=call.message,
            extras=call.extras,
        )

    def delivered(self) -> list[AgentCall]:
        """Return the calls whose answers the program has read, in the order in which they were asked."""
        return [call for call in self.calls if call.turn is not None and call.asked.number not in self.undelivered]

    def counted(self, record: CallRecord) -> dict[str, float]:
        """Return numbers about the calls of the episode."""
        names = ("forked_calls", "rewritten_calls", "new_lines", "unsaid_thoughts", "ignored_parameters")
        return {
            **{name: float(self.counts[name]) for name in names},
            "unread_calls": float(len(self.undelivered)),
            "diverged_calls": float(len(record.turns) - len({call.turn for call in self.calls} - {None})),
        }

    def partials(self) -> tuple[Partial, ...]:
        """Return what is sampled of the calls that have no turn yet."""
        return tuple(Partial(completion=call.completion, call=call.name) for call in self._waiting)


def cut_at(
    completion: Completion, stop: Sequence[str], decode: Callable[[Sequence[int]], str], *, num_entries: int
) -> Completion:
    """Return a completion up to the token that completes the first match of a stop string; whole if there is none.

    `num_entries` is the number of tokens whose experts it holds, if it holds any.
    """
    ids = completion.token_ids
    if not any(text in decode(ids) for text in stop):
        return completion
    num = 1 + bisect_left(range(1, len(ids)), True, key=lambda count: any(text in decode(ids[:count]) for text in stop))
    entry = len(completion.experts) // max(num_entries, 1)
    return replace(
        completion,
        token_ids=ids[:num],
        logprobs=completion.logprobs[:num],
        versions=completion.versions[:num],
        finish_reason=FinishReason.STOP,
        experts=completion.experts[: (num_entries - (len(ids) - num)) * entry],
    )


def _rendered(render: Callable[[], Any]) -> Any:
    """Render; messages that a chat template rejects are the client's mistake."""
    try:
        return render()
    except Exception as error:
        words = error if isinstance(error, AgentRLError) else line_of(error)
        raise RefusedError(
            RefusalKind.INVALID, f"the messages cannot be rendered: {words}", param="messages"
        ) from error


async def described(work: Awaitable[object]) -> object:
    """Await the program, and describe its error where it was raised."""
    try:
        return await work
    except (Exception, SystemExit) as error:
        raise RaisedError(error) from error


def _completion(turn: Turn) -> Completion:
    return Completion(
        token_ids=turn.action_ids,
        logprobs=turn.behavior_logprobs,
        versions=turn.versions,
        finish_reason=turn.finish_reason,
        experts=turn.experts,
    )


def _number(answer_id: str) -> int | None:
    """Return the number of a call from the id of its answer, in whatever dialect."""
    digits = re.search(r"_?-?(\d+)\Z", answer_id)
    return int(digits[1]) if digits else None


def _verdict(returned: object) -> Verdict | Crash:
    """Return what a program says at its end."""
    given: Mapping[Any, Any] = returned if isinstance(returned, Mapping) else {"reward": returned}
    known = {str(name): float(value) for name, value in given.items() if is_number(value) and math.isfinite(value)}
    unknown = {str(name): None for name, value in given.items() if value is None}
    if len(known) + len(unknown) == len(given):
        reward = known.pop("reward", None)
        unknown.pop("reward", None)
        return Verdict(reward=reward, metrics=known, extras=unknown)
    words = f"it returned {abbreviated(returned)}; return a finite number, None, or a mapping with reward and further numbers"
    return Crash(words=words, fault=Fault(kind="returned something else"))
