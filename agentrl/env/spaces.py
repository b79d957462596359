"""Gymnasium spaces for what environments and agents say. Gymnasium's vector environments take them as they are."""

from typing import Any

import gymnasium as gym

from agentrl.types import Message

ROLES = ("system", "user", "assistant", "tool")


def is_message(value: object) -> bool:
    """Tell whether `value` is one chat message: a dict with a known role and with text content or tool calls."""
    if not isinstance(value, dict) or value.get("role") not in ROLES or not _has_sound_calls(value):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def _has_sound_calls(message: Message) -> bool:
    """Tell whether `tool_calls`, where a message has them, are a list of dicts, each with a function that has a name."""
    calls = message.get("tool_calls")
    return calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class MessagesSpace(gym.Space[tuple[Message, ...]]):
    """Observations: a tuple of messages, the ones that are new since the last action."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Messages cannot be flattened to an array."""
        return False

    def sample(
        self,
        mask: Any | None = None,  # noqa: ARG002 - Gymnasium's signature
        probability: Any | None = None,  # noqa: ARG002
    ) -> tuple[Message, ...]:
        """Return one user message with a random number in it."""
        return ({"role": "user", "content": str(int(self.np_random.integers(1000)))},)

    def contains(self, x: Any) -> bool:
        """Tell whether `x` is a tuple of messages."""
        return isinstance(x, tuple) and all(is_message(m) for m in x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace)

    def __hash__(self) -> int:
        return hash(MessagesSpace)

    def __repr__(self) -> str:
        return "MessagesSpace()"


class ActionSpace(gym.Space[str | Message]):
    """Actions: text, or an assistant message (with tool calls where there are some)."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Messages cannot be flattened to an array."""
        return False

    def sample(
        self,
        mask: Any | None = None,  # noqa: ARG002 - Gymnasium's signature
        probability: Any | None = None,  # noqa: ARG002
    ) -> str | Message:
        """Return a random number as text."""
        return str(int(self.np_random.integers(1000)))

    def contains(self, x: Any) -> bool:
        """Tell whether `x` is text or an assistant message."""
        return isinstance(x, str) or (is_message(x) and x["role"] == "assistant")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace)

    def __hash__(self) -> int:
        return hash(ActionSpace)

    def __repr__(self) -> str:
        return "ActionSpace()"
