"""An episode as the policy knows it: what it hears, what it says, and the record of both, whoever answers it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat import Dialogue
from agentrl.chat.renderer import Tools
from agentrl.engine import Sampler
from agentrl.errors import EngineError
from agentrl.plain_data import printable
from agentrl.rollout.context import EpisodeContext
from agentrl.rollout.episode_metrics import episode_metrics
from agentrl.rollout.live_episode import LiveEpisode, Task
from agentrl.rollout.replay import Record
from agentrl.rollout.seeds import derive_seed
from agentrl.types import Completion, Fault, FinishReason, Message, Sampling, StopReason, Trajectory, Turn

_NOTHING = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why an episode does not continue."""

    reason: StopReason
    truncated: bool = False
    """A limit ended the episode, not the task."""
    error: str | None = None
    """What went wrong."""
    fault: Fault | None = None
    """Where, if the environment failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an action led to, beside the words that answer it."""

    reward: float = 0.0
    state_key: str | None = None
    """Of the situation after it."""
    action_key: str | None = None
    """None: it was never carried out."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str | None = None
    """Of whatever answers, for `LiveEpisode.snapshot`."""


class Conversation:
    """An episode under way, one turn at a time; it does not know who answers the policy.

    Its driver makes a dialogue of the first messages (`opening`) and begins with it. Then it lets the policy act, makes
    a dialogue of the replies (`after`) and tells what came of the action (`reply`), until there is an `end`. `opening`
    and `after` render, which takes its time, and change nothing: they may be called on any thread. All else belongs on
    the event loop.

    An action that the engine did not finish, because it was paused, is continued, each token with the version that
    sampled it. One that came to no end within the limits is never carried out.
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
        """Stand before the first words.

        Args:
            context: what all episodes are played with.
            task: what fixes the episode.
            name: of the conversation with the engine. None: the task's.
            recorded: the same episode, interrupted: its actions are taken again, and what comes of them is compared
                with what was recorded, before it is continued.
            on_change: told where the episode stands after each turn that was not recorded before; before the end, its
                last action is still under way.
        """
        self.context, self.task = context, task
        self.name = name or f"{task.trajectory_id}#{task.attempt}"
        self.turns: list[Turn] = []
        self.dialogue: Dialogue | None = None
        """What the next action is sampled in."""
        self.end: End | None = None
        """Why there is no further action. None: there is."""
        self._record, self._on_change = (
            Record(recorded or LiveEpisode(task=task), view=context.config.history),
            on_change,
        )
        self._state_key: str | None = None
        self._snapshot: str | None = None
        self._completion: Completion | None = None
        """What was sampled so far of the present action."""
        self._message: Message | None = None
        """The present action, while it is carried out."""
        self._before_end: LiveEpisode | None = None

    def opening(self, messages: Sequence[Message], tools: Tools) -> Dialogue | End:
        """Return the dialogue that begins with these messages, or why there is none."""
        if (recorded := self._record.opening(messages, tools)) is not None:
            return recorded
        if self._cannot_fit(messages):
            return self._no_room(f"more than {self.context.config.max_context_tokens}")
        return Dialogue.begin(messages, tools, self.context.renderer, view=self.context.config.history)

    def begin(self, opening: Dialogue | End, *, state_key: str | None = None) -> None:
        """Stand before the first action."""
        self._state_key = state_key
        self._hear(opening)

    def restored(self, tools: Tools) -> Dialogue:
        """Return the dialogue after all that was recorded. As `opening`, it may be called on any thread."""
        return self._record.restored(tools, self.context.renderer)

    def resume(self, restored: Dialogue | End) -> None:
        """Stand after all that was recorded, without playing it again."""
        recorded = self._record.live
        self.turns, self._snapshot = list(recorded.turns), recorded.snapshot
        self._state_key = recorded.turns[-1].next_state_key
        self._hear(restored)

    def branch(self, number: int, dialogue: Dialogue, *, task: Task, name: str) -> "Conversation":
        """Return another that stands before a turn of this one, in the dialogue that it had then.

        It is as this one would be, had it been interrupted there and resumed.
        """
        recorded = LiveEpisode(task=task, turns=tuple(self.turns[:number]))
        forked = Conversation(self.context, task, name=name, recorded=recorded)
        if number:
            forked.resume(dialogue)
        else:
            forked.begin(dialogue, state_key=self.turns[0].state_key)
        return forked

    async def act(self) -> Message | None:
        """Let the policy act; return its message. None: it cannot, or came to no end within the limits: see `end`.

        Raises:
            EngineError: when the engine cannot sample.
            ReplayError: where an action was started after other words than now.
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
        completion = await self._sample(dialogue, min(config.max_turn_tokens, budget, room))
        self._message = message = self.context.renderer.parse(
            completion.token_ids, dialogue.context_ids, dialogue.tools
        )
        if completion.finish_reason is FinishReason.STOP:
            return message
        is_full = room <= min(config.max_turn_tokens, budget)
        reason = StopReason.CONTEXT_OVERFLOW if is_full else StopReason.MAX_TOKENS
        self.reply(End(reason=reason, truncated=True), Outcome())
        return None

    def after(self, replies: Sequence[Message]) -> Dialogue | End:
        """Return the dialogue after the present action and these replies, or why there is none."""
        dialogue, completion, message = self._present_action()
        number = len(self.turns) + 1
        if number >= self.context.config.max_turns:
            return End(reason=StopReason.MAX_TURNS, truncated=True)
        if self._cannot_fit(replies):
            return End(reason=StopReason.CONTEXT_OVERFLOW, truncated=True)
        recorded = self._record.after(number, dialogue, completion.token_ids, message, replies)
        return recorded or dialogue.after(completion.token_ids, message, replies, self.context.renderer)

    def reply(self, following: Dialogue | End, outcome: Outcome) -> None:
        """Record what came of the present action, and stand before the next one.

        Raises:
            ReplayError: where it was recorded otherwise.
        """
        number, turn = len(self.turns), self._turn(outcome)
        is_new = not self._record.has(number)
        self._record.check_turn(number, turn)
        if isinstance(following, End):
            self._record.check_end(number)
            self._before_end = self.live()  # until it is closed; from there, the last action is taken again
        self.turns.append(turn)
        self._completion = self._message = None
        self._state_key, self._snapshot = outcome.state_key, outcome.snapshot
        self._hear(following)
        if is_new and self._on_change is not None:
            self._on_change(self.live())

    def fail(self, end: End) -> None:
        """End with a failure, where there was none before; the action that was being carried out is the last turn's."""
        if self._message is not None:
            self.turns.append(self._turn(Outcome()))
            self._message = None
        if self.end is None or not self.end.reason.failed:
            self.end = end

    def live(self) -> LiveEpisode:
        """Return where the episode stands."""
        if self._before_end is not None:
            return self._before_end
        played, recorded = len(self.turns), self._record.live
        if played < len(recorded.turns) or (played == len(recorded.turns) and self._completion is None):
            return recorded  # still being played again
        return LiveEpisode(
            task=self.task,
            turns=tuple(self.turns),
            observation=None if self.dialogue is None else self.dialogue.observation,
            snapshot=self._snapshot,
            partial=self._completion,
        )

    def trajectory(self, *, env_id: str, metrics: Mapping[str, float], gold_answer: str | None = None) -> Trajectory:
        """Return the episode, which has ended."""
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

    def _hear(self, following: Dialogue | End) -> None:
        if isinstance(following, End):
            self.end = following
        else:
            self.dialogue = following

    def _present_action(self) -> tuple[Dialogue, Completion, Message]:
        """Return the dialogue before the action that is carried out, what was sampled and what it says."""
        if self.dialogue is None or self._completion is None or self._message is None:
            raise RuntimeError("the policy has not acted")
        return self.dialogue, self._completion, self._message

    def _turn(self, outcome: Outcome) -> Turn:
        """Return the present action and what came of it."""
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

    def _cannot_fit(self, messages: Sequence[Message]) -> bool:
        """Tell whether a context cannot hold these messages, whatever their tokens are."""
        texts = (message.get("content") for message in messages)
        num_chars = sum(len(text.strip()) for text in texts if isinstance(text, str))  # some templates strip
        longest = self.context.renderer.max_token_chars
        return longest is not None and num_chars > longest * self.context.config.max_context_tokens

    def _no_room(self, length: str) -> End:
        """Say that the first prompt, of this length, fills the context: the task's fault."""
        words = (
            f"rollout.max_context_tokens: {self.context.config.max_context_tokens} leaves no room after the first prompt of "
            f"{length} tokens; raise it"
        )
        fault = Fault(kind="the first prompt is too long")
        return End(reason=StopReason.CONTEXT_OVERFLOW, truncated=True, error=words, fault=fault)

    async def _sample(self, dialogue: Dialogue, max_tokens: int) -> Completion:
        """Sample one action; where the engine was paused, continue what there is."""
        context, task, number = self.context, self.task, len(self.turns)
        prompt_ids = dialogue.context_ids
        begins = number == 0 or not dialogue.extends  # a context, of which no token was computed before
        first = 0 if begins else len(prompt_ids) - len(dialogue.observation_ids) - 1
        done = self._record.completion(number) or _NOTHING
        if self._record.has(number):
            self._completion = done
            return done
        self._completion = done
        while done.finish_reason is FinishReason.ABORTED:
            sampling = Sampling(
                max_tokens=max_tokens - len(done.token_ids),
                stop_token_ids=context.renderer.stop_token_ids,
                temperature=context.config.temperature,
                seed=derive_seed(task.sampling_seed, task.trajectory_id, task.attempt, number),
                drawn=len(done.token_ids),
                experts_from=len(prompt_ids) + len(done.token_ids) - 1 if done.token_ids else first,
            )
            part = await self._generate(prompt_ids + done.token_ids, sampling)
            self._completion = done = Completion(
                token_ids=done.token_ids + part.token_ids,
                logprobs=done.logprobs + part.logprobs,
                versions=done.versions + part.versions,
                finish_reason=part.finish_reason,
                experts=done.experts + part.experts if done.experts or not done.token_ids else b"",
            )
        return done

    async def _generate(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Completion:
        timeout_s = self.context.config.engine_timeout_s
        try:
            async with self.context.clock.timeout(timeout_s):
                return await self.context.engine.generate(prompt_ids, sampling, self.name)
        except TimeoutError:
            raise EngineError(f"no completion within rollout.engine_timeout_s: {timeout_s:g}") from None
