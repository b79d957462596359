"""One episode played by a function of messages, without a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from agentrl.data.plain import printable
from agentrl.env import MessageEnv, as_message, base_env
from agentrl.rollout.env_driver import Env
from agentrl.types import Message

Policy: TypeAlias = Callable[[MessageEnv, Sequence[Message], np.random.Generator], str | Message]
"""Function from environment, dialogue so far and random generator to the next action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode played by a `Policy`."""

    messages: list[Message]
    """Dialogue, including the actions."""
    rewards: list[float]
    """Reward of each turn."""
    is_over: bool
    """False if the limit of turns ended it."""
    success: bool
    """True if the environment reported success at the end."""
    score: float
    """Score from 0 to 1; 0 if the environment gave none."""

    def __str__(self) -> str:
        """Return the dialogue, one message per line."""
        lines = [
            f"{m['role']}: {' '.join(filter(None, [str(m.get('content') or ''), *_calls(m)]))}" for m in self.messages
        ]
        end = f"reward {sum(self.rewards):g}, success {self.success}, score {self.score:g}, {len(self.rewards)} turns"
        return "\n".join([*map(printable, lines), f"[{end}]"])


def _calls(message: Message) -> list[str]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [f"{function.get('name')}({function.get('arguments')})" for function in functions]


def play(
    env: Env,
    policy: Policy,
    *,
    seed: int,
    max_turns: int,
    rng: np.random.Generator,
    split: str = "eval",
    index: int | None = None,
) -> Played:
    """Play an episode of at most `max_turns` turns; of a table, the task with that index (None: chosen by the seed)."""
    base = base_env(env)
    num_tasks = base.num_tasks(split)
    task = None if num_tasks is None else seed % num_tasks if index is None else index
    first, _ = env.reset(seed=seed, options={"rollout_index": 0, "split": split, "task_index": task})
    messages, is_over = list(first), False
    rewards: list[float] = []
    info: dict[str, Any] = {}
    while not is_over and len(rewards) < max_turns:
        action = policy(base, messages, rng)
        observation, reward, terminated, truncated, info = env.step(action)
        messages += [as_message(action), *observation]
        rewards.append(float(reward))
        is_over = bool(terminated or truncated)
    return Played(
        messages=messages,
        rewards=rewards,
        is_over=is_over,
        success=bool(is_over and info.get("success")),
        score=float(info.get("score") or 0.0) if is_over else 0.0,
    )
