"""Long messages, cut."""

from typing import Any, SupportsFloat

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs

from agentrl.types import Message

Env = gym.Env[tuple[Message, ...], str | Message]


class LimitObservation(
    gym.Wrapper[tuple[Message, ...], str | Message, tuple[Message, ...], str | Message], RecordConstructorArgs
):
    """Cuts what is longer than a number of characters; the last line then says how much is left out."""

    def __init__(self, env: Env, *, max_chars: int) -> None:
        """Put it around an environment.

        Args:
            env: what is wrapped.
            max_chars: longest content of a message that stays whole.
        """
        if not isinstance(max_chars, int) or isinstance(max_chars, bool) or max_chars < 1:
            raise ValueError(f"max_chars: {max_chars!r} is no positive whole number")
        RecordConstructorArgs.__init__(self, max_chars=max_chars)
        super().__init__(env)
        self._max_chars = max_chars

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Begin a task."""
        messages, info = self.env.reset(seed=seed, options=options)
        return self._cut(messages), info

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], SupportsFloat, bool, bool, dict[str, Any]]:
        """Carry out an action."""
        messages, reward, terminated, truncated, info = self.env.step(action)
        return self._cut(messages), reward, terminated, truncated, info

    def _cut(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(map(self._cut_one, messages)) if isinstance(messages, tuple | list) else messages

    def _cut_one(self, message: Message) -> Message:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or len(content) <= self._max_chars:
            return message
        left_out = len(content) - self._max_chars
        return {**message, "content": f"{content[: self._max_chars]}\n({left_out:,} more characters are left out)"}
