"""The core of an episode: messages in, sampled actions out, and the record of both, whoever answers the policy.

`Task` fixes an episode before it begins. `Conversation` plays it turn by turn. `LiveEpisode` is its state as data, which
journals and checkpoints store; `RecordedEpisode` replays one, and verifies that it comes out as it was recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from agentrl.chat import Dialogue, HistoryConfig, Renderer
from agentrl.chat.renderer import Tools
from agentrl.data.plain import abbreviated, is_number, printable
from agentrl.engine import Sampler
from agentrl.errors import AgentRLError
from agentrl.rollout.sample_action import NOTHING, Action, EpisodeContext
from agentrl.rollout.tasks import EnvTask, derive_seed
from agentrl.types import (
    Completion,
    Fault,
    FinishReason,
    Message,
    Split,
    StopReason,
    Trajectory,
    Turn,
    Turns,
    pack_integers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything that fixes an episode before it begins."""

    group_id: str
    rollout_index: int
    """Number of this episode within its group."""
    seed: int
    """Seed of the environment, shared by the group."""
    sampling_seed: int
    """Seed from which the seed of each action follows."""
    attempt: int = 0
    """Number of earlier starts of this episode."""
    split: Split = "train"
    task_index: int | None = None
    """Number of the task within its split, shared by the group. None: unknown."""
    stage: int = 0
    """Entry of `env.schedule` with which the environment is made, from 1. 0: none."""

    @property
    def env_task(self) -> EnvTask:
        """Arguments of the environment and its reset, besides `rollout_index`."""
        return EnvTask(seed=self.seed, split=self.split, index=self.task_index, stage=self.stage)

    @property
    def trajectory_id(self) -> str:
        """Name of the episode."""
        return f"{self.group_id}/{self.rollout_index}"

    def turn_seed(self, number: int) -> int:
        """Return the seed of the action of a turn, in an episode of one turn after the other."""
        return derive_seed(self.sampling_seed, self.trajectory_id, self.attempt, number)

    def call_seed(self, context_ids: Sequence[int], sibling: int) -> int:
        """Return the seed of an action, in an episode whose calls may come in any order.

        Args:
            context_ids: tokens before the action.
            sibling: number of earlier actions after these very tokens.
        """
        context = pack_integers(context_ids)
        return derive_seed(self.sampling_seed, self.trajectory_id, self.attempt, "call", context, sibling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """An action that is sampled in part, or in whole without an answer to it."""

    completion: Completion
    call: str = ""
    """Name of the call that it will answer, unique in the episode. Empty: it is the one action that comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEpisode:
    """Everything needed to continue an episode elsewhere, except the environment, which is replayed."""

    task: Task
    turns: Turns = ()
    """Turns that the environment has answered."""
    observation: tuple[Message, ...] | None = None
    """Last messages of the environment. None: unknown."""
    snapshot: str | None = None
    """Environment after the last turn, pickled, in base64. None: it is replayed."""
    partials: tuple[Partial, ...] = ()
    """Actions under way: in an environment one at most, in a program as many as it has calls that wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Reason why an episode has ended."""

    reason: StopReason
    truncated: bool = False
    """A limit ended the episode, not the task."""
    error: str | None = None
    """Message of the failure."""
    fault: Fault | None = None
    """Location of the failure in the environment's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of an action, besides the messages that answer it."""

    reward: float = 0.0
    state_key: str | None = None
    """Key of the state after the action."""
    action_key: str | None = None
    """Key of the action. None: it was not executed."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str | None = None
    """Environment after the action, for `LiveEpisode.snapshot`."""


class Conversation:
    """An episode played one turn at a time; it does not know who answers the policy.

    Its driver calls, in this order: `first_dialogue` and `begin`; then `act`, `next_dialogue` and `record_outcome` for each
    turn until there is an `end`; then `trajectory`. `first_dialogue`, `next_dialogue` and `restored_dialogue` render, which
    is slow, and change no state: any thread may call them. Everything else belongs on the event loop.

    An action interrupted by a pause of the engine is continued; each token keeps the version that sampled it. An action
    cut off by a limit is not executed, unless that is the limit of a turn and `config.cut_off` is `act`.
    """

    def __init__(
        self,
        context: EpisodeContext[Sampler],
        task: Task,
        *,
        name: str | None = None,
        recorded: LiveEpisode | None = None,
        on_change: Callable[[LiveEpisode], object] | None = None,
    ) -> None:
        """Create an episode that has not started.

        Args:
            context: parts that all episodes share.
            task: fixes the episode.
            name: id of the conversation at the engine. None: from the task.
            recorded: the same episode, interrupted: its actions are replayed and their outcomes compared with the recorded
                ones before it continues.
            on_change: called with the state after each turn that was not recorded before. In the call for the last turn,
                that turn's action is still pending.
        """
        self.context = context
        self.task = task
        self.name = name or f"{task.trajectory_id}#{task.attempt}"
        self.turns: list[Turn] = []
        self.dialogue: Dialogue | None = None
        """Dialogue in which the next action is sampled."""
        self.end: End | None = None
        """Reason why there is no further action. None: there is one."""
        self._record = RecordedEpisode(recorded or LiveEpisode(task=task), view=context.config.history)
        self._on_change = on_change
        self._state_key: str | None = None
        self._snapshot: str | None = None
        self._action: Action | None = None
        """Current action, as far as it is sampled."""
        self._message: Message | None = None
        """Current action, while it is executed."""
        self._before_end: LiveEpisode | None = None

    def first_dialogue(self, messages: Sequence[Message], tools: Tools) -> Dialogue | End:
        """Return the dialogue that begins with these messages, or an `End` if the prompt is too long."""
        if (recorded := self._record.first_dialogue(messages, tools)) is not None:
            return recorded
        if self.context.cannot_hold(messages):
            return self._no_room(f"more than {self.context.config.max_context_tokens}")
        return Dialogue.begin(messages, tools, self.context.renderer, view=self.context.config.history)

    def begin(self, opening: Dialogue | End, *, state_key: str | None = None) -> None:
        """Start with the first dialogue."""
        self._state_key = state_key
        self._proceed(opening)

    def restored_dialogue(self, tools: Tools) -> Dialogue:
        """Return the dialogue after all recorded turns."""
        return self._record.restored_dialogue(tools, self.context.renderer)

    def resume(self, restored: Dialogue | End) -> None:
        """Continue after all recorded turns, without replaying them."""
        recorded = self._record.live
        self.turns, self._snapshot = list(recorded.turns), recorded.snapshot
        self._state_key = recorded.turns[-1].next_state_key
        self._proceed(restored)

    def branch(self, number: int, dialogue: Dialogue, *, task: Task, name: str) -> "Conversation":
        """Return a copy of this conversation that continues from before a turn, in the dialogue that it had then."""
        recorded = LiveEpisode(task=task, turns=tuple(self.turns[:number]))
        forked = Conversation(self.context, task, name=name, recorded=recorded)
        if number:
            forked.resume(dialogue)
        else:
            forked.begin(dialogue, state_key=self.turns[0].state_key)
        return forked

    async def act(self) -> Message | None:
        """Sample the next action and return its message. None: a limit was reached, see `end`.

        Raises:
            EngineError: when the engine cannot sample.
            ReplayError: if the recorded action was started after other messages.
        """
        if self.end is not None or self.dialogue is None:
            return None
        config, dialogue = self.context.config, self.dialogue
        room = config.max_context_tokens - len(dialogue.context_ids)
        budget = config.max_episode_tokens - sum(len(turn.action_ids) for turn in self.turns)
        if room < 1:
            full = End(reason=StopReason.CONTEXT_OVERFLOW, truncated=True)
            self.end = full if self.turns else self._no_room(str(len(dialogue.context_ids)))
            return None
        if budget < 1:
            self.end = End(reason=StopReason.MAX_TOKENS, truncated=True)
            return None
        self._record.check_observation(len(self.turns), dialogue.observation)
        limit = min(config.max_turn_tokens, budget, room)
        self._action = action = self._next_action(dialogue, limit)
        completion = await action.sample(self.context, name=self.name)
        self._message = message = self.context.renderer.parse(
            completion.token_ids, dialogue.context_ids, dialogue.tools
        )
        may_act = config.cut_off == "act" and limit < min(budget, room)
        if completion.finish_reason is FinishReason.STOP or may_act:
            return message
        is_full = room <= limit
        reason = StopReason.CONTEXT_OVERFLOW if is_full else StopReason.MAX_TOKENS
        self.record_outcome(End(reason=reason, truncated=True), Outcome())
        return None

    def next_dialogue(self, replies: Sequence[Message]) -> Dialogue | End:
        """Return the dialogue after the current action and these replies, or an `End` if a limit was reached."""
        dialogue, completion, message = self._present_action()
        number = len(self.turns) + 1
        if number >= self.context.config.max_turns:
            return End(reason=StopReason.MAX_TURNS, truncated=True)
        if self.context.cannot_hold(replies):
            return End(reason=StopReason.CONTEXT_OVERFLOW, truncated=True)
        recorded = self._record.next_dialogue(number, dialogue, completion.token_ids, message, replies)
        return recorded or dialogue.after(completion.token_ids, message, replies, self.context.renderer)

    def record_outcome(self, following: Dialogue | End, outcome: Outcome) -> None:
        """Record the outcome of the current action, and proceed to the next one.

        Raises:
            ReplayError: if it differs from what was recorded.
        """
        number, turn = len(self.turns), self._turn(outcome)
        is_new = not self._record.has_turn(number)
        self._record.check_turn(number, turn)
        if isinstance(following, End):
            self._record.check_end(number)
            self._before_end = self.live()  # resumed from here, the last action is executed again
        self.turns.append(turn)
        self._action = self._message = None
        self._state_key, self._snapshot = outcome.state_key, outcome.snapshot
        self._proceed(following)
        if is_new and self._on_change is not None:
            self._on_change(self.live())

    def fail(self, end: End) -> None:
        """End with a failure, unless there was one before. The action being executed becomes the last turn."""
        if self._message is not None:
            self._before_end = self.live()  # resumed elsewhere, the action is executed again
            self.turns.append(self._turn(Outcome()))
            self._message = None
        if self.end is None or not self.end.reason.failed:
            self.end = end

    def live(self) -> LiveEpisode:
        """Return the state of the episode."""
        if self._before_end is not None:
            return self._before_end
        played, recorded = len(self.turns), self._record.live
        if played < len(recorded.turns) or (played == len(recorded.turns) and self._action is None):
            return recorded  # still being replayed
        return LiveEpisode(
            task=self.task,
            turns=tuple(self.turns),
            observation=None if self.dialogue is None else self.dialogue.observation,
            snapshot=self._snapshot,
            partials=() if self._action is None else (Partial(completion=self._action.completion),),
        )

    def trajectory(self, *, env_id: str, metrics: Mapping[str, float], gold_answer: str | None = None) -> Trajectory:
        """Return the finished episode."""
        end = self.end
        assert end is not None, "the episode is under way"
        tools = () if self.dialogue is None else self.dialogue.tools
        return Trajectory(
            group_id=self.task.group_id,
            trajectory_id=self.task.trajectory_id,
            env_id=env_id,
            seed=self.task.seed,
            split=self.task.split,
            task_index=self.task.task_index,
            stage=self.task.stage,
            turns=tuple(self.turns),
            stop_reason=end.reason,
            truncated=end.truncated,
            metrics={**metrics, **episode_metrics(self.turns, tools)},
            error=None if end.error is None else printable(end.error),
            fault=end.fault,
            gold_answer=gold_answer,
        )

    def _proceed(self, following: Dialogue | End) -> None:
        if isinstance(following, End):
            self.end = following
        else:
            self.dialogue = following

    def _present_action(self) -> tuple[Dialogue, Completion, Message]:
        """Return the dialogue before the action being executed, its tokens and its message."""
        if self.dialogue is None or self._action is None or self._message is None:
            raise RuntimeError("the policy has not acted")
        return self.dialogue, self._action.completion, self._message

    def _turn(self, outcome: Outcome) -> Turn:
        """Return the current action and its outcome as a turn."""
        dialogue, completion, message = self._present_action()
        return Turn(
            observation_ids=dialogue.observation_ids,
            extends=dialogue.extends,
            action_ids=completion.token_ids,
            behavior_logprobs=completion.logprobs,
            versions=completion.versions,
            reward=outcome.reward,
            state_key=self._state_key,
            next_state_key=outcome.state_key,
            action_key=outcome.action_key,
            finish_reason=completion.finish_reason,
            experts=completion.experts,
            observation=dialogue.observation,
            message=message,
            extras=outcome.extras,
        )

    def _no_room(self, length: str) -> End:
        """Return the end of an episode whose first prompt, of this length, fills the context."""
        words = (
            f"rollout.max_context_tokens: {self.context.config.max_context_tokens} leaves no room after the first prompt of "
            f"{length} tokens; raise it"
        )
        fault = Fault(kind="the first prompt is too long")
        return End(reason=StopReason.CONTEXT_OVERFLOW, truncated=True, error=words, fault=fault)

    def _next_action(self, dialogue: Dialogue, max_tokens: int) -> Action:
        """Return the next action, with what was recorded of it."""
        number = len(self.turns)
        begins = number == 0 or not dialogue.extends  # no token of this context was computed before
        return Action(
            context_ids=dialogue.context_ids,
            max_tokens=max_tokens,
            seed=self.task.turn_seed(number),
            experts_from=0 if begins else len(dialogue.context_ids) - len(dialogue.observation_ids) - 1,
            completion=self._record.completion(number) or NOTHING,
        )


_COMPARED = ("observation", "reward", "state_key", "next_state_key", "action_key")
"""Fields of a replayed turn that must equal the recorded ones, besides the action."""


class ReplayError(AgentRLError):
    """A replayed episode differs from the recorded one."""


class RecordedEpisode:
    """The recorded part of an interrupted episode.

    A replayed turn keeps its recorded tokens, whatever engine and renderer would produce today.
    """

    def __init__(self, live: LiveEpisode, *, view: HistoryConfig) -> None:
        """Take the episode as far as it was played, and how much of its history a context shows."""
        self.live = live
        self._view = view

    def has_turn(self, number: int) -> bool:
        """Return whether a turn was recorded."""
        return number < len(self.live.turns)

    def completion(self, number: int) -> Completion | None:
        """Return the recorded action of a turn, whole or in part. None: there is none."""
        if not self.has_turn(number):
            is_next = number == len(self.live.turns) and self.live.partials
            return self.live.partials[0].completion if is_next else None
        turn = self.live.turns[number]
        return Completion(
            token_ids=turn.action_ids,
            logprobs=turn.behavior_logprobs,
            versions=turn.versions,
            finish_reason=turn.finish_reason,
            experts=turn.experts,
        )

    def first_dialogue(self, messages: Sequence[Message], tools: Tools) -> Dialogue | None:
        """Return the recorded dialogue before the first action. None: no action was recorded."""
        if not self.has_turn(0):
            return None
        return Dialogue.of_record(messages, tools, self.live.turns[0].observation_ids, view=self._view)

    def next_dialogue(
        self, number: int, dialogue: Dialogue, action_ids: tuple[int, ...], message: Message, replies: Sequence[Message]
    ) -> Dialogue | None:
        """Return the recorded dialogue before a turn, given the one before the last action. None: it was not recorded."""
        if not self.has_turn(number):
            return None
        turn = self.live.turns[number]
        return dialogue.after_record(action_ids, message, replies, turn.observation_ids, extends=turn.extends)

    def restored_dialogue(self, tools: Tools, renderer: Renderer) -> Dialogue:
        """Return the dialogue after all recorded turns, without replaying them."""
        turns = self.live.turns
        dialogue = Dialogue.of_record(turns[0].observation, tools, turns[0].observation_ids, view=self._view)
        for turn, following in pairwise(turns):
            dialogue = dialogue.after_record(
                turn.action_ids,
                turn.message,
                following.observation,
                following.observation_ids,
                extends=following.extends,
            )
        return dialogue.after(turns[-1].action_ids, turns[-1].message, self.live.observation or (), renderer)

    def check_turn(self, number: int, turn: Turn) -> None:
        """Raise ReplayError if a recorded turn comes out differently."""
        if not self.has_turn(number):
            return
        for name in _COMPARED:
            found, expected = getattr(turn, name), getattr(self.live.turns[number], name)
            if found != expected:
                raise ReplayError(
                    f"replayed, turn {number} has another {name}: {abbreviated(found)}, and was recorded with "
                    f"{abbreviated(expected)}"
                )

    def check_end(self, number: int) -> None:
        """Raise ReplayError if the episode ends although more was recorded."""
        if number + 1 < len(self.live.turns) or (number + 1 == len(self.live.turns) and self.live.partials):
            raise ReplayError(f"replayed, it ends with turn {number}, and was recorded with more")

    def check_observation(self, number: int, observation: tuple[Message, ...]) -> None:
        """Raise ReplayError if the recorded action was started after other messages."""
        live = self.live
        if not live.partials or live.observation is None or number != len(live.turns):
            return
        if observation != live.observation:
            raise ReplayError(
                f"replayed, it has before turn {number} {abbreviated(observation)}, and was recorded with "
                f"{abbreviated(live.observation)}"
            )


MAX_TOOLS = 64
"""Largest number of tools counted by name; calls of further tools are counted as `tool/other`."""


def episode_metrics(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return sums over the turns: `tool_errors`, `tool/NAME` of each tool offered, `tool/other`, and `log/NAME`.

    `tool/other` counts calls of unknown tools. Calls in a turn that was cut off were not executed and are not counted.
    """
    errors = [turn.extras.get("tool_errors") for turn in turns]
    found = {"tool_errors": sum(float(count) for count in errors if is_number(count))}
    if tools:
        names = islice((str(tool["function"]["name"]) for tool in tools), MAX_TOOLS)
        found |= dict.fromkeys([f"tool/{name}" for name in names] + ["tool/other"], 0.0)
    for turn in turns:
        for name in _called(turn) if tools else ():
            key = f"tool/{name}"
            found[key if key in found else "tool/other"] += 1.0
        logged = turn.extras.get("logged")
        for name, number in logged.items() if isinstance(logged, dict) else ():
            if is_number(number):
                found[f"log/{name}"] = found.get(f"log/{name}", 0.0) + float(number)
    return found


def _called(turn: Turn) -> list[str]:
    """Return the tool names that a turn calls, as the model wrote them."""
    if turn.finish_reason is not FinishReason.STOP:
        return []
    calls = turn.message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function.get("name")) if isinstance(function, dict) else "" for function in functions]
