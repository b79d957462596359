"""The built-in environments, the settings with which each is measured, and how often a policy solves them.

The page of an environment may say with which settings it is measured, in a line of its own; `{}` where there is none:

    <!-- measured: [{"options": {"num_boxes": 12}, "oracle": 0.9, "max_turns": 30, "episodes": 50}] -->

`options` of the environment; `oracle`, the share that its oracle solves at least (default 0.95); `max_turns` of an episode
(64); `episodes` of each policy (200). The constant policy is the best of several that each repeat one action, in a quarter
of the episodes; `random` calls random tools with arguments of the right types, taken from the dialogue.
"""

import json
import re
import statistics
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.env import MessageEnv, base_env, make_env
from agentrl.types import Message
from tests.support.baselines import Policy, always, constant_actions, oracle, play

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "environments"
_MAX_CHARS = 1500
"""Of one message in a sample episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an environment is measured."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of its constructor."""
    oracle: float = 0.95
    """Share of episodes that the oracle solves at least."""
    max_turns: int = 64
    """Turns after which an episode is cut off."""
    episodes: int = 200
    """Of each policy."""


def built_in() -> dict[str, str]:
    """Map the names under which this distribution's environments are installed to their classes.

    A `TaskEnv` is none, and no adapter is: they play whatever table or source they are given.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        points: dict[str, str] = tomllib.load(file)["project"]["entry-points"]["agentrl.envs"]
    return {name: cls for name, cls in points.items() if cls.startswith("agentrl_envs.") and ".adapters." not in cls}


def settings(name: str) -> list[Setting]:
    """Return how an environment is measured, which its page says."""
    said = re.search(r"<!-- measured: (.*?) -->", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    return [Setting(**setting) for setting in (json.loads(said[1]) if said else [{}])]


def make(name: str, options: dict[str, Any]) -> MessageEnv:
    """Build a built-in environment, installed or not."""
    return base_env(make_env(built_in()[name], options))


def success(env: MessageEnv, policy: Policy, *, episodes: int, max_turns: int) -> float:
    """Return the share of episodes that a policy solves."""
    rng = np.random.default_rng(0)
    return statistics.mean(
        play(env, policy, seed=seed, max_turns=max_turns, rng=rng).success for seed in range(episodes)
    )


def constant_success(env: MessageEnv, *, episodes: int, max_turns: int) -> float:
    """Return the share of episodes that the best of several constant actions solves.

    A quarter of the episodes for each, of at most 24 turns: what repetition does not solve by then, it does not solve.
    """
    env.reset(seed=0)
    actions, limits = list(constant_actions(env)), {"episodes": max(episodes // 4, 1), "max_turns": min(max_turns, 24)}
    return max(success(env, always(action), **limits) for action in actions)


def sample_episode(name: str) -> str:
    """Return the dialogue of the oracle's episode with seed 0, as the page shows it."""
    setting = settings(name)[0]
    env = make(name, setting.options)
    rng = np.random.default_rng(0)
    played = play(env, oracle, seed=0, max_turns=setting.max_turns, rng=rng)
    rewards = iter(played.rewards)
    lines, reward = [], 0.0
    for message in played.messages:
        if message["role"] == "assistant":
            lines += [f"  reward {reward:g}"] if reward else []
            reward = next(rewards)
        lines.append(_line(message))
    lines.append(f"  reward {reward:g}; success {str(played.success).lower()}, score {played.score:g}")
    env.close()
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _line(message: Message) -> str:
    text = str(message.get("content") or "")
    calls = [
        f"{call['function']['name']}({', '.join(f'{k}={v!r}' for k, v in call['function']['arguments'].items())})"
        for call in message.get("tool_calls", ())
    ]
    said = "\n".join([text] * bool(text) + calls)
    said = said if len(said) <= _MAX_CHARS else f"{said[:_MAX_CHARS]} ..."
    return f"{message['role']}: {said}".replace("\n", "\n    ")
