"""An environment of one's own: agentrl train examples/calculator.yaml --env.id examples.custom_env:MyEnv."""

from typing import Any

import numpy as np

from agentrl import Message, ToolEnv, tool, tool_call


class MyEnv(ToolEnv):
    """Find a number between 1 and 9 with as few looks as the recipe has turns."""

    def start(self, options: dict[str, Any]) -> str:
        self.number, self.low, self.high = int(self.np_random.integers(1, 10)), 1, 9
        return "1 to 9?"

    @tool
    def look(self, n: int) -> str:
        """Look whether the number is n."""
        if n < self.number:
            self.low = max(self.low, n + 1)
            return "higher"
        if n > self.number:
            self.high = min(self.high, n - 1)
            return "lower"
        self.reward(1.0)
        self.finish(success=True)
        return "found"

    def answer(self, text: str) -> str:
        return "Use look."

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        is_right = rng is None or rng.random() < skill
        return tool_call("look", n=(self.low + self.high) // 2 if is_right or rng is None else int(rng.integers(1, 10)))
