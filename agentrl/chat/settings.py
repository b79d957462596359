"""What a recipe says of the dialogue, whichever form it is written in."""

from collections.abc import Sequence

from agentrl.chat.renderer import RendererConfig
from agentrl.chat.thinking import Thinking, without_dropped
from agentrl.types import Message


class DialogueConfig(RendererConfig):
    """Fields that agentrl's own renderers share."""

    system: str | None = None
    """A system prompt. Where the environment has one of its own, it follows after a blank line."""
    thinking: Thinking | None = None
    """Which thoughts of earlier turns a context holds. `keep`: all; the context grows and nothing is rewritten.
    `drop_at_user`: those since a user last spoke. `drop`: none. Where one is dropped, history is rewritten, and the turn
    that follows begins a segment of its own. Null: as the model's family does."""


def prepared(messages: Sequence[Message], *, system: str | None, thinking: Thinking) -> list[Message]:
    """Return the messages of a whole context: with the recipe's system prompt, without thoughts that are dropped."""
    said = without_dropped(messages, thinking)
    if system is None:
        return said
    own, rest = (said[0].get("content"), said[1:]) if said and said[0]["role"] == "system" else (None, said)
    return [{"role": "system", "content": "\n\n".join(filter(None, [system, own]))}, *rest]
