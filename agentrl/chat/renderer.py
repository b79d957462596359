"""Seam between messages and tokens, and the recipe's section `chat`.

`HistoryConfig` and `Thinking` decide how much of earlier turns, and which of their thoughts, a context still shows.
`Dialogue` is a conversation, as the messages of which it is made and as the tokens that the policy reads.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias

from pydantic import BaseModel, ConfigDict

from agentrl.recipe.plugin import Plugin, Seam
from agentrl.types import Count, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Thinking: TypeAlias = Literal["keep", "drop_at_user", "drop"]
"""`keep`: a context holds every thought. `drop_at_user`: those since a user last spoke. `drop`: none but that which is
being thought."""


def without_dropped(messages: Sequence[Message], thinking: Thinking) -> list[Message]:
    """Return the messages with the thoughts that the next context holds."""
    if thinking == "keep":
        return list(messages)
    last = len(messages) if thinking == "drop" else _last_user(messages)
    return [_plain(message) if index < last else message for index, message in enumerate(messages)]


def drops_thoughts(history: Sequence[Message], replies: Sequence[Message], thinking: Thinking) -> bool:
    """Return whether a thought that stands in the context of `history` is gone once `replies` are added.

    The history is then rewritten: the next turn begins a segment of its own.
    """
    if thinking == "keep":
        return False
    before, after = without_dropped(history[:-1], thinking), without_dropped((*history, *replies), thinking)
    standing = [*before, *history[-1:]]  # the last action stands as it was sampled
    return any(_thinks(old) and not _thinks(new) for old, new in zip(standing, after, strict=False))


def _last_user(messages: Sequence[Message]) -> int:
    return max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)


def _thinks(message: Message) -> bool:
    return bool(message.get("reasoning_content"))


def _plain(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


LEFT_OUT = "(an earlier result, left out)"
"""Text in the place of a tool result that is no longer shown."""


class HistoryConfig(BaseModel):
    """History that the next context shows. The opening and the replies to the last action are always shown.

    If less is shown than before, history is rewritten: the turn that follows begins a segment of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_results: Count | None = None
    """So many of the newest tool results are shown; of an older one, a short line. Null: all."""
    turns: Count | None = None
    """So many of the last turns, actions with the replies to them, are shown beside the opening. Null: all."""

    @property
    def rewrites(self) -> bool:
        """Return whether history may be rewritten."""
        return self != HistoryConfig()

    def shown(self, messages: Sequence[Message], *, num_opening: int) -> list[Message]:
        """Return the messages that the next context shows.

        Args:
            messages: all that was said, the replies to the last action included.
            num_opening: how many of them were said before the first action.
        """
        opening, later = list(messages[:num_opening]), list(messages[num_opening:])
        actions = [index for index, message in enumerate(later) if message["role"] == "assistant"]
        if not actions:
            return opening + later
        results = [index for index, message in enumerate(later) if message["role"] == "tool"]
        for index in results[: -self.tool_results] if self.tool_results else ():
            if index < actions[-1]:
                later[index] = {**later[index], "content": LEFT_OUT}
        first = 0 if self.turns is None else actions[-self.turns :][0]
        return opening + later[first:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Description of how a renderer writes dialogues."""

    facts: dict[str, str]
    """Behaviour by subject: calls, thoughts, system messages, ..."""
    notes: tuple[str, ...] = ()
    """Lines that a run prints once when it begins, because somebody would be surprised."""


@dataclass(frozen=True, slots=True)
class RendererCandidate:
    """A renderer that was considered."""

    name: str
    reason: str
    """Why it was taken, or why not."""
    renderer: "Renderer | None" = None
    """None: it was not taken."""


def describe(renderer: "Renderer") -> Description:
    """Return what a renderer says of itself by a method `describe`, which it need not have."""
    own = getattr(renderer, "describe", None)
    description = own() if callable(own) else None
    if isinstance(description, Description):
        return description
    return Description(facts={"thoughts": renderer.thinking})


Tools = Sequence[dict[str, Any]]


class Renderer(Protocol):
    """Turns messages into the tokens a model reads, and sampled tokens into a message.

    `start` and `extend` are called from many threads at once. A method `describe() -> Description`, if there is one, tells
    `agentrl chat` what there is to say, and what a run says when it begins.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""

    @property
    def max_token_chars(self) -> int | None:
        """Longest text that one token stands for, in characters. None: not known.

        Messages of more text than so many times the limit of a context are refused before they are rendered.
        """

    @property
    def thinking(self) -> Thinking:
        """Return which thoughts of earlier turns a context holds. If one is dropped, `start` renders what is left."""

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context, from the first message to the generation prompt."""

    def extend(
        self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Return the tokens to append after `context_ids + action_ids`: what closes the turn, messages, generation prompt.

        None: the template rewrites history and cannot extend; the caller renders everything again with `start`.
        """

    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        """Return the assistant message of sampled tokens; never raises, a malformed call is data.

        Args:
            action_ids: what was sampled.
            context_ids: what it was sampled in: its end may have opened a thought. Empty: as after a user's message.
            tools: what may be called: their schemas give types to arguments that are written as text alone.
        """

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return the tokens of an assistant message as an action, its stop token included (for demonstrations)."""


class RendererConfig(Plugin):
    """Renderer: messages to tokens; the fields of the renderer that it names stand beside the name."""

    seam = Seam("agentrl.renderers", "chat", "renderer")

    renderer: str = "auto"
    """An installed renderer, or `module:Class` of a `RendererConfig`. `template`: the tokenizer's own chat template.
    `chatml`: agentrl's small ChatML form, for models made locally. `auto`: where the tokenizer has
    one, what the package `renderers` makes of it, if that is installed and proven to write the same, else `template`; without
    a template `chatml`."""

    @abstractmethod
    def build(self, tokenizer: "PreTrainedTokenizerBase", *, name: str = "") -> Renderer:
        """Return the renderer of a tokenizer.

        Args:
            tokenizer: of the policy.
            name: of the model, for error messages.

        Raises:
            RendererError: when it cannot be used with this tokenizer; the message names the field and the fix.
        """
        raise NotImplementedError

    def tried(self, tokenizer: "PreTrainedTokenizerBase", *, name: str = "") -> Iterator[RendererCandidate]:
        """Yield what is considered in its order; the last is what `build` returns.

        Raises:
            RendererError: as `build`.
        """
        yield RendererCandidate(self.renderer, "the recipe names it (chat.renderer)", self.build(tokenizer, name=name))

    def exported_template(self, tokenizer: "PreTrainedTokenizerBase") -> str | None:
        """Return the chat template with which other programs render the dialogues of a model. None: there is none."""
        return own_template(tokenizer)


def own_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the chat template that a tokenizer brings; of several the one with tools. None: it has none."""
    template = tokenizer.chat_template
    return template.get("tool_use") or template.get("default") if isinstance(template, dict) else template


def stop_ids(tokenizer: "PreTrainedTokenizerBase", *, template: Iterable[int | None] = ()) -> tuple[int, ...]:
    """Return every token at which sampling ends: those of the template, of the tokenizer and of the generation config.

    Args:
        tokenizer: tokenizer of a model; `pretrained_tokenizer` has read the generation config beside it.
        template: tokens with which the chat template ends an assistant's turn.
    """
    named = (*template, tokenizer.eos_token_id, *getattr(tokenizer, GENERATION_ENDS, ()))
    return tuple(dict.fromkeys(i for i in named if isinstance(i, int)))


GENERATION_ENDS = "generation_ends"
"""Attribute of a tokenizer: ids of the tokens at which the model's generation config ends sampling."""


class DialogueConfig(RendererConfig):
    """Fields that agentrl's own renderers share."""

    system: str | None = None
    """A system prompt. Where the environment has one of its own, it follows after a blank line."""
    thinking: Thinking | None = None
    """Thoughts of earlier turns that a context holds. `keep`: all; the context grows and nothing is rewritten.
    `drop_at_user`: those since a user last spoke. `drop`: none. If one is dropped, history is rewritten, and the turn
    that follows begins a segment of its own. Null: as the model's family does."""


def prepared(messages: Sequence[Message], *, system: str | None, thinking: Thinking) -> list[Message]:
    """Return the messages of a whole context: with the recipe's system prompt, without thoughts that are dropped."""
    said = without_dropped(messages, thinking)
    if system is None:
        return said
    own, rest = (said[0].get("content"), said[1:]) if said and said[0]["role"] == "system" else (None, said)
    return [{"role": "system", "content": "\n\n".join(filter(None, [system, own]))}, *rest]


_ALL = HistoryConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The tokens of one turn, as a policy reads and samples them."""

    observation_ids: tuple[int, ...]
    """Tokens added before the action; the whole context if `extends` is False."""
    extends: bool
    """False: history was rewritten, and a new context begins."""
    action_ids: tuple[int, ...]
    parent: int | None = None
    """See `Turn.parent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation that waits for its next action.

    With `P0` the tokens of the first messages, `A0` an action and `E0` what the replies to it add, the context of the second
    action is `P0 + A0 + E0`. Where history is rewritten, because less of it is shown, a thought is dropped or a template will
    have it so, it is whatever the renderer makes of all messages that are shown.
    """

    history: tuple[Message, ...]
    """Messages so far, of all roles."""
    num_opening: int
    """Number of these messages before the first action."""
    observation: tuple[Message, ...]
    """Messages since the last action."""
    tools: Tools
    """JSON schemas of the tools that the policy may call."""
    context_ids: tuple[int, ...]
    """The whole context of the next action, the generation prompt included."""
    observation_ids: tuple[int, ...]
    """Tokens that the observation added; all of the context if history was rewritten."""
    extends: bool = True
    """False: history was rewritten, and the context does not begin with the one before it."""
    view: HistoryConfig = _ALL
    """Part of the history that a context shows."""

    @classmethod
    def begin(
        cls, messages: Sequence[Message], tools: Tools, renderer: Renderer, *, view: HistoryConfig = _ALL
    ) -> Self:
        """Return the conversation that begins with these messages."""
        return cls.of_record(messages, tools, renderer.start(messages, tools), view=view)

    @classmethod
    def of_record(
        cls, messages: Sequence[Message], tools: Tools, observation_ids: tuple[int, ...], *, view: HistoryConfig = _ALL
    ) -> Self:
        """Return the conversation that began with these messages, whose tokens are known."""
        said = tuple(messages)
        return cls(
            history=said,
            num_opening=len(said),
            observation=said,
            tools=tools,
            context_ids=observation_ids,
            observation_ids=observation_ids,
            view=view,
        )

    def turn(self, action_ids: tuple[int, ...]) -> TurnTokens:
        """Return the turn that an action completes."""
        return TurnTokens(observation_ids=self.observation_ids, extends=self.extends, action_ids=action_ids)

    def after(
        self, action_ids: tuple[int, ...], message: Message, replies: Sequence[Message], renderer: Renderer
    ) -> Self:
        """Return the conversation after an action and the replies to it."""
        standing = [*self._shown(self.history), message]
        shown = self._shown((*self.history, message, *replies))
        is_rewritten = shown != [*standing, *replies] or drops_thoughts(standing, replies, renderer.thinking)
        added = None if is_rewritten else renderer.extend(self.context_ids, action_ids, replies)
        if added is not None:
            return self.after_record(action_ids, message, replies, added)
        whole = renderer.start(shown, self.tools)
        return self.after_record(action_ids, message, replies, whole, extends=False)

    def after_record(
        self,
        action_ids: tuple[int, ...],
        message: Message,
        replies: Sequence[Message],
        observation_ids: tuple[int, ...],
        *,
        extends: bool = True,
    ) -> Self:
        """Return the conversation after an action and the replies to it, whose tokens are known."""
        return type(self)(
            history=(*self.history, message, *replies),
            num_opening=self.num_opening,
            observation=tuple(replies),
            tools=self.tools,
            context_ids=self.context_ids + action_ids + observation_ids if extends else observation_ids,
            observation_ids=observation_ids,
            extends=extends,
            view=self.view,
        )

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        return self.view.shown(messages, num_opening=self.num_opening)
