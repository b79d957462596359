"""Wrappers of environments: a limit of turns, long messages cut, every episode as one line of a file."""

import copy
import json
import os
import warnings
from typing import Any, Self, SupportsFloat

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import TimeLimit as StepLimit

from agentrl.data.files import absolute
from agentrl.env.message_env import close_env
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


class Record(
    gym.Wrapper[tuple[Message, ...], str | Message, tuple[Message, ...], str | Message], RecordConstructorArgs
):
    """Appends each episode to a JSONL file: how it was begun, all messages, rewards, how it ended, what `info` said last.

    An episode is written when it ends, or else when the next one begins or the environment is closed. Each line is one
    write at the end of the file, so that many environments, in many processes, may share it.
    """

    def __init__(self, env: Env, *, path: str, max_bytes: int = 100_000_000) -> None:
        """Put it around an environment.

        Args:
            env: what is wrapped.
            path: of the file; it and its folders are made where they are missing.
            max_bytes: length of the file beyond which no episode is added; a warning says so.
        """
        if not isinstance(path, str) or not path:
            raise ValueError(f"path: {path!r} names no file")
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise ValueError(f"max_bytes: {max_bytes!r} is no positive whole number")
        RecordConstructorArgs.__init__(self, path=path, max_bytes=max_bytes)
        super().__init__(env)
        self._path, self._max_bytes = absolute(path), max_bytes
        self._episode: dict[str, Any] | None = None
        """Episode that was played and is not written yet."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Begin a task."""
        self._write()
        messages, info = self.env.reset(seed=seed, options=options)
        self._episode = {
            "env": type(self.unwrapped).__name__,
            "seed": seed,
            "options": options or {},
            "messages": list(messages),
            "rewards": [],
            "terminated": False,
            "truncated": False,
            "info": info,
        }
        return messages, info

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], SupportsFloat, bool, bool, dict[str, Any]]:
        """Carry out an action."""
        said = {"role": "assistant", "content": action} if isinstance(action, str) else action
        messages, reward, terminated, truncated, info = self.env.step(action)
        if (episode := self._episode) is not None:
            episode["messages"] += [said, *messages]
            episode["rewards"].append(reward)
            episode |= {"terminated": terminated, "truncated": truncated, "info": info}
        if terminated or truncated:
            self._write()
        return messages, reward, terminated, truncated, info

    def close(self) -> None:
        """Write what was played, and close the environment."""
        try:
            self._write()
        finally:
            close_env(self.env)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy for a fork, whose episode is none that was played from its beginning: it is not written."""
        copied = copy.copy(self)
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy({**vars(self), "_episode": None}, memo))
        return copied

    def _write(self) -> None:
        """Append the present episode, if any: in one write."""
        episode, self._episode = self._episode, None
        if episode is None:
            return
        line = json.dumps(episode, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(file).st_size + len(line) > self._max_bytes:
                warnings.warn(
                    f"env.wrappers: {self._path} is full (max_bytes: {self._max_bytes}), and episodes are left out of it",
                    stacklevel=2,
                )
                return
            os.write(file, line)
        finally:
            os.close(file)


class TimeLimit(StepLimit[tuple[Message, ...], str | Message]):
    """Gymnasium's `TimeLimit`: an episode that is not over after so many turns is truncated.

    The environment has answered the last of them: with `rollout.max_turns`, which ends an episode before that, it has not.
    """

    def __init__(self, env: gym.Env[tuple[Message, ...], str | Message], *, max_turns: int) -> None:
        """Put it around an environment.

        Args:
            env: what is wrapped.
            max_turns: largest number of turns.
        """
        if not isinstance(max_turns, int) or isinstance(max_turns, bool) or max_turns < 1:
            raise ValueError(f"max_turns: {max_turns!r} is no positive whole number")
        RecordConstructorArgs.__init__(self, max_turns=max_turns)
        super().__init__(env, max_episode_steps=max_turns)
