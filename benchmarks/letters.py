"""The smallest task that a policy learns in seconds, and not on every seed: answer a letter with the same letter."""

from typing import Any

import numpy as np

from agentrl import Message, ToolEnv

LETTERS = "abcd"


class Letters(ToolEnv):
    """One turn: the answer earns 1 where it is the letter that was asked. All runs have the same 64 evaluation tasks."""

    def num_tasks(self, split: str) -> int:
        """Return how many tasks there are."""
        return {"train": len(LETTERS), "eval": 64}[split]

    def start(self, options: dict[str, Any]) -> str:
        """Ask a letter."""
        self.letter = LETTERS[options["task_index"] % len(LETTERS)]
        return self.letter

    def answer(self, text: str) -> None:
        """Compare it."""
        is_right = text.strip() == self.letter
        self.reward(float(is_right))
        self.finish(success=is_right)

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Answer the letter, or any."""
        is_right = rng is None or rng.random() < skill
        return {"role": "assistant", "content": self.letter if is_right or rng is None else str(rng.choice([*LETTERS]))}
