"""A conversation, as the messages of which it is made and as the tokens that the policy reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from agentrl.chat.renderer import HistoryConfig, Renderer, Tools, drops_thoughts
from agentrl.types import Message

_ALL = HistoryConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The tokens of one turn, as a policy reads and samples them."""

    observation_ids: tuple[int, ...]
    """Tokens added before the action; the whole context if `extends` is False."""
    extends: bool
    """False: history was rewritten, and a new context begins."""
    action_ids: tuple[int, ...]


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
