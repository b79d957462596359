"""What a renderer is examined with: an opening, and turns of words and of calls."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.renderer import Renderer, Tools
from agentrl.errors import RendererError
from agentrl.types import Message


@dataclass(frozen=True, slots=True)
class Episode:
    """The renderer under test, and turns to render."""

    renderer: Renderer
    tools: list[dict[str, Any]]
    opening: tuple[Message, ...] = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find the key."},
    )
    seen_ids: set[int] = field(default_factory=set)
    """Every token id met so far: what is known of the vocabulary."""

    def turns(self, counts: Sequence[int]) -> Iterator[tuple[Message, list[Message]]]:
        """Yield what the assistant says and what it hears: a turn for each number of calls."""
        for turn, count in enumerate(counts):
            names = [tool["function"]["name"] for tool in self.tools[:count]]
            message = says("" if names else f"Text-{turn}", *((name, {"n": turn}) for name in names))
            replies = [
                {"role": "tool", "name": name, "tool_call_id": f"call_{i}", "content": f"result {turn} of {name}"}
                for i, name in enumerate(names)
            ]
            yield message, replies or [{"role": "user", "content": f"Go on, {turn}."}]

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context."""
        ids = self.renderer.start(messages, tools)
        self.seen_ids.update(ids)
        return tuple(ids)

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return a message as an action."""
        ids = self.renderer.encode(message)
        self.seen_ids.update(ids)
        return tuple(ids)

    def can(self, message: Message) -> bool:
        """Tell whether the renderer can write a message; where it says that it cannot, it is not asked to."""
        try:
            self.encode(message)
        except RendererError:
            return False
        return True

    def need_tools(self) -> None:
        """Tell that a claim is about tools, and there are none.

        Raises:
            RendererError: where there are none.
        """
        if not self.tools:
            raise RendererError("there are no tools")

    def spelled(self, text: str) -> tuple[int, ...]:
        """Return a plain message in tokens that its text as a whole is not encoded to: one letter after the other."""
        letters = [self.encode(says(letter))[:-1] for letter in text]
        return (*(i for ids in letters for i in ids), self.renderer.stop_token_ids[0])

    def rng(self) -> random.Random:
        """Return random numbers, the same each time."""
        return random.Random(0)


def says(content: str, *calls: tuple[str, object]) -> Message:
    """Return an assistant's message."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def functions(message: Message) -> list[dict[str, Any]]:
    """Return what a message calls."""
    return [call["function"] for call in message.get("tool_calls") or []]


def is_same(parsed: Message, message: Message) -> bool:
    """Tell whether a message was read as it was written, its thought aside."""
    return (parsed.get("content") or "") == message["content"] and functions(parsed) == functions(message)
