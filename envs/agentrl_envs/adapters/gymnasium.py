"""Gymnasium's environments with few actions, or with text, as a dialogue."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from agentrl import Message, Need, ToolEnv, UserError
from agentrl_envs.adapters.common import draw
from agentrl_envs.options import finite_number, whole_number

_COLORED = re.compile(r"\x1b\[([0-9;]*)m([^\x1b]*)\x1b\[0m")
_MARKS = {"34": "()", "35": "<>", "42": "{}"}
"""Brackets around a colored letter: for blue, magenta and on green; else `[]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Facts that Gymnasium does not give about an environment of its own."""

    actions: tuple[str, ...]
    goal: float = 0.5
    """Reward of the last step, from which on the task is solved."""
    prompt: str = ""


_KNOWN = {
    "Taxi": _Known(
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        prompt="Drive the taxi [ ] to where the passenger waits ( ), pickup, drive { } to the destination < >, and dropoff.",
    ),
    "FrozenLake": _Known(actions=("left", "down", "right", "up"), prompt="Walk over the ice from S to G; H is a hole."),
    "CliffWalking": _Known(
        actions=("up", "right", "down", "left"), goal=-1.0, prompt="Walk from x to T; C is the cliff."
    ),
    "Blackjack": _Known(actions=("stick", "hit"), prompt="Your sum, the dealer's card, whether you hold a usable ace:"),
}


class GymnasiumEnv(ToolEnv):
    """`left`: the last name of an action in a turn is taken; the reply is what the environment shows then.

    The reward is the environment's. A turn that names no action is answered with the names, and nothing happens. The task is
    solved where it ends with a reward of `goal` or more.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        prompt: str | None = None,
        goal: float | None = None,
        observation_is_state: bool | None = None,
        max_chars: int = 2_000,
    ) -> None:
        """Make the environment.

        Args:
            id: Gymnasium's id: `FrozenLake-v1`; `module:id` imports the module that registers it.
            kwargs: of `gymnasium.make`.
            actions: names of the actions, in their order. None: known ones, else their numbers.
            prompt: what the first message begins with. None: a known one, or nothing.
            goal: least last reward of a solved task. None: a known one, or 0.5.
            observation_is_state: whether equal observations have equal futures, so that they can be keys of situations. None:
                where they are numbers (`Discrete`).
            max_chars: longest observation.

        Raises:
            UserError: for an environment whose actions have no names, or that cannot be made.
        """
        super().__init__()
        given = dict(kwargs or {})
        self.source = _make(id, given)
        known = _KNOWN.get(self.source.spec.name if self.source.spec else "", _Known(actions=()))
        space = self.source.action_space
        self.actions: list[str] | None = None  # None: text
        if isinstance(space, gym.spaces.Discrete):
            self.actions = list(
                actions or known.actions or map(str, range(int(space.start), int(space.start + space.n)))
            )
            if len(self.actions) != space.n:
                raise UserError(f"actions: {id!r} has {space.n} actions, got {len(self.actions)} names")
        elif not isinstance(space, gym.spaces.Text):
            raise UserError(f"id: the actions of {id!r} are {space}; give an environment with Discrete or Text actions")
        self.prompt = known.prompt if prompt is None else prompt
        self.goal = known.goal if goal is None else finite_number("goal", goal)
        is_number = isinstance(self.source.observation_space, gym.spaces.Discrete)
        self.observation_is_state = is_number if observation_is_state is None else observation_is_state
        self.max_chars = whole_number("max_chars", max_chars, at_least=1)
        self.seen: Any = None
        self.is_cut = False

    def start(self, options: dict[str, Any]) -> str:
        """Reset the source with a seed of its own."""

        def begin(seed: int) -> tuple[str, int]:
            observation, _ = self.source.reset(seed=seed)
            return str(observation) + self._shown(observation), seed

        self.is_cut = False
        self.seen, _ = self.source.reset(seed=draw(self.np_random, options, begin))
        names = "" if self.actions is None else f"Actions: {', '.join(self.actions)}."
        return "\n".join(filter(None, (self.prompt, names, self._shown(self.seen))))

    def answer(self, text: str) -> str | None:
        """Take the action that the text names last."""
        action: Any = text.strip()
        if self.actions is not None:
            named = re.findall("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in self.actions), text)
            if not named:
                return f"Actions: {', '.join(self.actions)}."
            action = self.actions.index(named[-1]) + int(getattr(self.source.action_space, "start", 0))
        elif not self.source.action_space.contains(action):
            return f"That is none of {self.source.action_space}."
        self.seen, reward, terminated, truncated, _ = self.source.step(action)
        self.reward(float(reward), "environment")
        if terminated or truncated:
            self.is_cut = not terminated
            self.finish(success=bool(terminated) and float(reward) >= self.goal)
        return self._shown(self.seen)

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], Any, bool, bool, dict[str, Any]]:
        """Take a turn; an end by the source's limit of steps is reported as one."""
        messages, reward, is_over, _, info = super().step(action)
        return messages, reward, is_over and not self.is_cut, self.is_cut, info

    def reseed(self, seed: int) -> None:
        """Let the source draw from a new generator too."""
        super().reseed(seed)
        self.source.unwrapped.np_random, _ = gym.utils.seeding.np_random(seed)

    def provides(self) -> frozenset[Need]:
        """Return what credit schemes may read."""
        has_none = type(self).state_key is GymnasiumEnv.state_key and not self.observation_is_state
        return super().provides() - ({Need.STATE_KEYS} if has_none else set())

    def state_key(self) -> str | None:
        """Return the observation, where it is the state."""
        return str(self.seen) if self.observation_is_state else None

    def close(self) -> None:
        """Close the source."""
        self.source.close()
        super().close()

    def _shown(self, observation: Any) -> str:
        """Return the source's own picture in text where it has one (colors as brackets), else what is observed."""
        text = observation if isinstance(observation, str) else _text(observation)
        if self.source.render_mode == "ansi":
            text = _without_colors(str(self.source.render())).strip("\n")
        return (
            text
            if len(text) <= self.max_chars
            else f"{text[: self.max_chars]}\n[{len(text) - self.max_chars} characters cut]"
        )


def _make(id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    try:
        source = gym.make(id, disable_env_checker=True, **kwargs)
        if "render_mode" in kwargs or "ansi" not in source.metadata.get("render_modes", ()):
            return source
        source.close()
        return gym.make(id, disable_env_checker=True, render_mode="ansi", **kwargs)
    except (gym.error.Error, ImportError, TypeError, ValueError) as error:
        raise UserError(f"id: {id!r} could not be made: {' '.join(str(error).split())}") from error


def _without_colors(picture: str) -> str:
    def marked(found: re.Match[str]) -> str:
        marks = next((_MARKS[code] for code in found[1].split(";") if code in _MARKS), "[]")
        return marks[0] + found[2] + marks[1]

    while (plain := _COLORED.sub(marked, picture)) != picture:  # one color may lie within another
        picture = plain
    return plain


def _text(observation: Any) -> str:
    if isinstance(observation, np.ndarray):
        return np.array2string(observation, threshold=200, precision=3)
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_text(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(map(_text, observation))
    return str(observation)
