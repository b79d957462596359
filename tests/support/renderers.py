"""Renderers under which random weights end their turns."""

from collections.abc import Sequence
from typing import Any

from agentrl.chat import ChatMLRenderer
from agentrl.types import Message


class OftenStops(ChatMLRenderer):
    """Every fourth token ends a turn: random weights sample the one end token too rarely."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted({self._end_id, *range(5, 261, 4)}))


class StartsAgain(OftenStops):
    """Cannot extend a dialogue by messages with a word; by default that of KeyDoor's third question."""

    def __init__(self, tokenizer: Any, *, word: str = "cat") -> None:
        super().__init__(tokenizer)
        self._word = word

    def extend(
        self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        if any(self._word in message["content"] for message in messages):
            return None  # type: ignore[return-value]  # as the protocol allows
        return super().extend(context_ids, action_ids, messages)
