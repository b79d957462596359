"""Episodes that a program plays: each call for an answer of the policy is a turn.

`AgentPlayer` plays many: the program runs on threads of its own and calls the endpoint, whose loop is another one again.
`ClientRun` is one run of the program: its calls cross over to the pool's loop, and wait there for as long as that stands still
for an update. `CallRecord` is what is known of the episode, so that a later run of the program gets the same answers to the same
calls.
"""

import asyncio
import copy
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

from agentrl.agent.clients import AgentError
from agentrl.agent.config import AgentConfig
from agentrl.agent.session import AgentSession
from agentrl.chat import Dialogue
from agentrl.data.plain import abbreviated, is_number, line_of, printable
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
from agentrl.env.rewards.functions import Answered, grade
from agentrl.errors import AgentRLError, EngineError
from agentrl.rollout.conversation import End, LiveEpisode, Partial, Task, episode_metrics
from agentrl.rollout.faults import RaisedError
from agentrl.rollout.player import Listeners
from agentrl.rollout.sample_action import NOTHING, Action, EpisodeContext
from agentrl.types import (
    Completion,
    Fault,
    FinishReason,
    Message,
    StopReason,
    Trajectory,
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
class _Call:
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
class _Crash:
    """A program ended in an error, or hung."""

    words: str
    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Result that a program reports at its end."""

    reward: float | None
    """None: nothing can be said."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Entries that are None: nothing can be said about them."""


class ClientRun:
    """One run of a program on a task, in a session of its own. Everything happens on the pool's loop."""

    def __init__(
        self,
        player: "AgentPlayer",
        task: Task,
        record: CallRecord,
        *,
        context: EpisodeContext[Sampler],
        on_change: Callable[[], object],
        name: str,
    ) -> None:
        """Begin without calls.

        Args:
            player: knows the program and its endpoint.
            task: fixes the episode.
            record: calls that earlier runs have made; it grows.
            context: parts that all episodes share.
            on_change: called after each call that was not recorded before.
            name: of the episode at the engine.
        """
        self.limit: End | None = None
        """Limit of the episode that refused a call. None: none did."""
        self.calls: list[_Call] = []
        """Calls that were not refused, in the order in which they were asked."""
        self.counts: Counter[str] = Counter()
        self.rewards: dict[int, float] = {}
        """Rewards paid so far, by the number of the call in the session."""
        self.state_key: str | None = None
        self.undelivered: frozenset[int] = frozenset()
        """Numbers in the session of the calls whose answer the program never read."""
        self._player = player
        self._task = task
        self._record = record
        self._recorded = record.numbers()
        self._context = context
        self._on_change = on_change
        self._name = name
        self._tree = tree.CallTree(thoughts=player.config.thoughts)
        self._by_number: dict[int, _Call] = {}
        self._waiting: deque[_Call] = deque()
        """Calls that have no turn yet."""
        self._names: Counter[str] = Counter()
        self._lines: Counter[int] = Counter()
        self._engine_error: EngineError | None = None
        self._is_over = False
        self._num_running = 0
        self._loop = asyncio.get_running_loop()
        self._change: asyncio.Future[None] = self._loop.create_future()
        """Done at the next change of the calls under way."""
        self._open = ExitStack()
        """Conversations at the engine."""

    async def play(self, row: dict[str, Any]) -> _Verdict | _Crash:
        """Run the program to its end.

        Raises:
            EngineError: when the engine cannot sample.
        """
        endpoint = self._player.endpoint
        session = endpoint.open_session(self._over(self._answer), count=self._over(self._count), report=self._report)
        given = AgentSession(
            base_url=session.base_url,
            api_key=session.api_key,
            anthropic_url=session.anthropic_url,
            seed=self._task.seed,
            split=self._task.split,
            report=self._report,
        )
        work = BackgroundWork(_described(self._player.client.run(row, given)))
        client = asyncio.wrap_future(work.future)
        try:
            await self._wait(client)
            return _verdict(client.result())
        except RaisedError as error:
            raised = error.raised
            kind = f"{type(raised).__name__}: {raised.kind}" if isinstance(raised, AgentError) else error.fault.kind
            return _Crash(words=f"agent {self._player.name}: {error.line}", fault=replace(error.fault, kind=kind))
        except TimeoutError:
            return await self._given_up(work)
        finally:
            self._is_over = True
            client.cancel()
            self.undelivered = frozenset(endpoint.close_session(session))
            self._open.close()

    async def _given_up(self, work: BackgroundWork) -> _Crash:
        """Return the end of a program that hangs."""
        self._is_over = True
        seconds, why = self._player.config.timeout_s, ""
        try:
            await asyncio.to_thread(work.give_up)
        except BlockedLoopError:
            why = (
                "; a coroutine blocks the event loop that all share: write it as `def`, or await asyncio.to_thread(...)"
            )
        words = f"it neither called nor ended for agent.timeout_s: {seconds:g} s{why}"
        return _Crash(words=f"agent {self._player.name}: {words}", fault=Fault(kind="hangs"))

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
                async with self._context.clock.timeout(self._player.config.timeout_s):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._engine_error is not None:
            raise self._engine_error

    def _changed(self) -> None:
        if not self._change.done():
            self._change.set_result(None)

    def _over(self, function: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
        """Return a function that is awaited on the endpoint's loop and runs on the pool's."""

        async def cross(asked: Asked) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(asked), self._loop))

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

    def _arrived(self, whole: Asked, asked: Asked) -> _Call:
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
        extras: dict[str, Any] = {}
        if asked.ignored:
            extras["ignored"] = dict(asked.ignored)
        if placed.kind is not tree.Kind.CONTINUES and placed.number:
            extras["call"] = placed.kind.value
        if placed.difference is not None:
            extras["difference"] = str(placed.difference)
        call = _Call(asked=placed, name=f"{placed.digest}.{nth}", state_key=self.state_key, extras=extras)
        call.agent = asked.model if asked.model in self._player.config.roles else ""
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
        self._player.note_ignored(asked.ignored)

    def _line(self, call: _Call) -> str:
        """Return the id of its line at the engine, which keeps what it has computed for one: forks begin others."""
        parent = call.asked.parent
        if call.asked.kind is tree.Kind.CONTINUES and parent is not None and parent in self._by_number:
            return self._by_number[parent].line
        name = f"{self._name}/{call.asked.number}"
        self._open.enter_context(self._context.engine.conversation(name))
        return name

    async def _prepare(self, call: _Call, asked: Asked) -> Action:
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

    def _recorded_turn(self, call: _Call) -> int | None:
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

    def _dialogue(self, call: _Call) -> Dialogue:
        asked, renderer, view = call.asked, self._context.renderer, self._context.config.history
        if asked.kind.extends and asked.parent is not None:
            base = self._by_number[asked.parent]
            assert base.dialogue is not None, "it was answered"
            return base.dialogue.after(base.completion.token_ids, base.message, asked.replies, renderer)
        return Dialogue.begin(asked.history, asked.tools, renderer, view=view)

    def _known_dialogue(self, call: _Call, turn: Turn, context_ids: tuple[int, ...]) -> Dialogue:
        asked = call.asked
        if asked.kind.extends and asked.parent is not None:
            base = self._by_number[asked.parent]
            assert base.dialogue is not None, "it was answered"
            said = base.completion.token_ids, base.message, asked.replies
            return base.dialogue.after_record(*said, turn.observation_ids, extends=turn.extends)
        view = self._context.config.history
        return Dialogue.of_record(asked.history, asked.tools, context_ids, view=view)

    def _said(self, call: _Call, asked: Asked) -> Said:
        """Record the answer, and return it as the client gets it."""
        dialogue, completion = call.dialogue, call.completion
        assert dialogue is not None, "its context is known"
        renderer, decode, number = self._context.renderer, self._context.decode, call.asked.number
        call.message = renderer.parse(completion.token_ids, dialogue.context_ids, dialogue.tools)
        as_text = decode(completion.token_ids) if asked.calls_as_text and call.message.get("tool_calls") else None
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

    def _turn(self, call: _Call, number: int) -> Turn:
        dialogue, completion, asked = call.dialogue, call.completion, call.asked
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

    def delivered(self) -> list[_Call]:
        """Return the calls whose answers the program has read, in the order in which they were asked."""
        return [call for call in self.calls if call.turn is not None and call.asked.number not in self.undelivered]

    def counted(self, record: CallRecord) -> dict[str, float]:
        """Return numbers about the calls of the episode."""
        names = ("forked_calls", "rewritten_calls", "new_lines", "unsaid_thoughts")
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


async def _described(work: Awaitable[object]) -> object:
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


def _verdict(returned: object) -> _Verdict | _Crash:
    """Return what a program says at its end."""
    given = returned if isinstance(returned, Mapping) else {"reward": returned}
    reward = given.get("reward")
    numbers = {str(name): value for name, value in given.items() if name != "reward" and value is not None}
    if (reward is None or is_number(reward)) and all(map(is_number, numbers.values())):
        if all(map(math.isfinite, [reward or 0.0, *numbers.values()])):
            metrics = {name: float(value) for name, value in numbers.items()}
            unknown = {str(name): None for name, value in given.items() if name != "reward" and value is None}
            return _Verdict(reward=None if reward is None else float(reward), metrics=metrics, extras=unknown)
    words = f"it returned {abbreviated(returned)}; return a finite number, None, or a mapping with reward and further numbers"
    return _Crash(words=words, fault=Fault(kind="returned something else"))


class AgentPlay:
    """An episode that a program plays."""

    def __init__(
        self, player: "AgentPlayer", start: LiveEpisode, *, context: EpisodeContext[Sampler], listeners: Listeners
    ) -> None:
        """Take the parts; see `Player.new`."""
        self._player = player
        self._start = start
        self._context = context
        self._listeners = listeners
        self._record = CallRecord(
            turns=list(start.turns), partials={each.call: each.completion for each in start.partials}
        )
        self._run: ClientRun | None = None

    def live(self) -> LiveEpisode:
        """Return the state of the episode."""
        waiting = () if self._run is None else self._run.partials()
        unclaimed = (Partial(completion=each, call=name) for name, each in self._record.partials.items())
        return LiveEpisode(
            task=self._start.task, turns=tuple(self._record.turns), partials=tuple([*waiting, *unclaimed])
        )

    async def play(self) -> Trajectory:
        """Play to the end; see `Play.play`."""
        task, row = self._start.task, self._player.row(self._start.task)
        try:
            outcome = await self._played(row)
            if isinstance(outcome, _Crash) and self._is_open and self._player.config.on_error == "result":
                outcome = await self._played_again(row, outcome)
            end, verdict = await self._ended(outcome, row)
        except EngineError as error:
            end, verdict = End(reason=StopReason.ENGINE_ERROR, error=str(error)), _Verdict(reward=None)
        trajectory = self._trajectory(task, row, end, verdict)
        if trajectory.failed and trajectory.stop_reason not in (StopReason.UNSCORED, StopReason.ENGINE_ERROR):
            self._listeners.on_fault(trajectory)
        return trajectory

    @property
    def _is_open(self) -> bool:
        """True if no limit has refused a call."""
        return self._run is None or self._run.limit is None

    async def _played(self, row: dict[str, Any]) -> _Verdict | _Crash:
        """Run the program once."""
        task = self._start.task
        on_change = self._listeners.on_change
        self._run = ClientRun(
            self._player,
            task,
            self._record,
            context=self._context,
            on_change=lambda: on_change and on_change(self.live()),
            name=f"{task.trajectory_id}#{task.attempt}",
        )
        return await self._run.play(copy.deepcopy(row))

    async def _played_again(self, row: dict[str, Any], first: _Crash) -> "_Verdict | _Crash | End":
        """Run a program that failed once more on the same answers: the same failure follows from what the policy said."""
        assert self._run is not None, "it was run"
        asked = Counter(call.name for call in self._run.calls)
        second = await self._played(row)
        is_same = isinstance(second, _Crash) and second.fault.kind == first.fault.kind
        if is_same and asked and asked == Counter(call.name for call in self._run.calls):
            return End(reason=StopReason.AGENT_ERROR, error=first.words)
        return second

    async def _ended(self, outcome: "_Verdict | _Crash | End", row: dict[str, Any]) -> tuple[End, _Verdict]:
        """Return why the episode is over, and what it earned."""
        run, nothing = self._run, _Verdict(reward=0.0)
        assert run is not None, "it was run"
        if isinstance(outcome, End):
            return outcome, nothing
        if isinstance(outcome, _Crash):
            return run.limit or End(reason=StopReason.ENV_ERROR, error=outcome.words, fault=outcome.fault), nothing
        if not run.delivered():
            words = f"agent {self._player.name}: it ended without an answer of the policy; its client must call session.base_url"
            return run.limit or End(reason=StopReason.ENV_ERROR, error=words, fault=Fault(kind="no call")), nothing
        if self._player.rewards:
            try:
                outcome = await asyncio.to_thread(self._player.grade, run.delivered()[-1].said(), row)
            except Exception as error:  # noqa: BLE001 - foreign code: it becomes data
                raised = RaisedError(error)
                words = f"agent {self._player.name}: agent.reward raised {raised.line}"
                return End(reason=StopReason.ENV_ERROR, error=words, fault=raised.fault), nothing
        if outcome.reward is None and not run.rewards:
            words = f"agent {self._player.name}: nothing could score it"
            return End(reason=StopReason.UNSCORED, error=words), outcome
        limit = run.limit
        return End(reason=StopReason.TERMINATED) if limit is None else replace(limit, error=None, fault=None), outcome

    def _trajectory(self, task: Task, row: Mapping[str, Any], end: End, verdict: _Verdict) -> Trajectory:
        run = self._run
        assert run is not None, "it was run"
        turns = _in_order(self._record.turns, run, verdict)
        answer = self._player.config.tasks.answer
        return Trajectory(
            group_id=task.group_id,
            trajectory_id=task.trajectory_id,
            env_id=self._player.name,
            seed=task.seed,
            split=task.split,
            task_index=task.task_index,
            turns=turns,
            stop_reason=end.reason,
            truncated=end.truncated,
            metrics={**episode_metrics(turns, ()), **run.counted(self._record), **verdict.metrics},
            error=None if end.error is None else printable(end.error),
            fault=end.fault,
            gold_answer=None if answer is None else str(row[answer]),
        )


def _in_order(turns: Sequence[Turn], run: ClientRun, verdict: _Verdict) -> tuple[Turn, ...]:
    """Return the turns that the program has read, in the order in which they were asked, with all that they earned."""
    calls = {call.turn: call for call in run.delivered()}
    kept = sorted(calls)
    numbers = {old: new for new, old in enumerate(kept)}
    found: list[Turn] = []
    for new, old in enumerate(kept):
        turn, call = turns[old], calls[old]
        parent = numbers.get(parent_of(turn, old), -1)
        reward = run.rewards.get(call.asked.number, 0.0)
        is_last = new == len(kept) - 1
        following = next((calls[k].state_key for k in kept if k > old and parent_of(turns[k], k) == old), None)
        found.append(
            replace(
                turn,
                parent=None if parent in (-1, new - 1) else parent,
                extends=new == 0 or turn.extends,
                reward=reward + (verdict.reward or 0.0) * is_last,
                next_state_key=run.state_key if is_last else following,
                extras={**turn.extras, **verdict.extras} if is_last and verdict.extras else turn.extras,
            )
        )
    return tuple(found)


class AgentPlayer:
    """Plays episodes by a program, many at once, and has the endpoint that it calls."""

    def __init__(self, config: AgentConfig, *, on_warning: Callable[[str], object] = lambda _: None) -> None:
        """Find the program and its tasks; nothing runs yet.

        Args:
            config: section `agent` of the recipe.
            on_warning: called once for each parameter that a client gives and that is not taken over.

        Raises:
            UserError: for a program that is none, and for tasks that cannot be played.
        """
        self.config = config
        self.name = config.name
        self.client = config.client()
        self.rewards = config.rewards()
        self.on_warning = on_warning
        self._ignored: set[str] = set()
        self._endpoint: Endpoint | None = None
        self._open = ExitStack()

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of the program; it listens from the first episode on.

        Raises:
            ConfigError: for an address that is not free.
        """
        if self._endpoint is None:
            config = self.config
            endpoint = Endpoint(
                ("policy", *config.roles),
                host=config.host,
                port=config.port,
                public_host=config.public_host,
                heartbeat_s=config.heartbeat_s,
            )
            self._endpoint = self._open.enter_context(endpoint)
        return self._endpoint

    def new(
        self,
        start: LiveEpisode,
        *,
        context: EpisodeContext[Sampler],
        listeners: Listeners,
        fork: bool = False,  # noqa: ARG002 - refused before: a program cannot be forked
    ) -> AgentPlay:
        """Return an episode; see `Player.new`."""
        return AgentPlay(self, start, context=context, listeners=listeners)

    def row(self, task: Task) -> dict[str, Any]:
        """Return the row of a task."""
        rows = self.config.table.splits[task.split]
        return rows[(task.task_index or 0) % len(rows)]

    def note_ignored(self, ignored: Mapping[str, str]) -> None:
        """Tell once of each parameter that is not taken over."""
        for name, value in ignored.items():
            if name not in self._ignored:
                self._ignored.add(name)
                self.on_warning(
                    f"agent {self.name}: {name}: {value} is not taken over: the recipe decides how the policy samples"
                )

    def grade(self, said: Sequence[Message], row: Mapping[str, Any]) -> _Verdict:
        """Grade the last answer; called on a thread of its own.

        Raises:
            Exception: whatever a reward function raises.
        """
        tasks, task = self.config.tasks, copy.deepcopy(dict(row))
        answered = Answered(
            prompt=task[tasks.prompt] if tasks.prompt else None,
            completion=said[-1].get("content") or "",
            messages=list(said),
            answer=task[tasks.answer] if tasks.answer else None,
            task=task,
            info={},
        )
        graded = grade(self.rewards, answered, timeout_s=_REWARD_TIMEOUT_S)
        paying = [reward for reward in self.rewards if reward.name in graded and reward.weight]
        first = graded.get(self.rewards[0].name)
        metrics = {} if first is None else {"success": float(first >= 1.0), "score": min(1.0, max(0.0, first))}
        reward = sum(each.weight * graded[each.name] for each in paying) if paying else None
        return _Verdict(reward=reward, metrics=metrics)

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint = None
        self._open.close()
