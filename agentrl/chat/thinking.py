"""What becomes of thoughts once they were thought: which of them later contexts still hold."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from agentrl.types import Message

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
    """Tell whether a thought that stands in the context of `history` is gone once `replies` are heard.

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
