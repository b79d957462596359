"""Train in an environment of your own: python examples/custom_env.py

From the command line: agentrl train calculator --env.id examples.custom_env:MyEnv
"""

import sys
from typing import Any

import numpy as np

import agentrl
from agentrl import Message, ToolEnv, tool, tool_call


class MyEnv(ToolEnv):
    """Find a number between 1 and 9 with as few looks as the recipe has turns."""

    def start(self, options: dict[str, Any]) -> str:
        self.number = int(self.np_random.integers(1, 10))
        self.low, self.high = 1, 9
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


def main() -> None:
    run = agentrl.train(
        "calculator",  # the recipe that comes with agentrl; what is named below lies over it
        env=MyEnv,
        rollout={"max_turns": 6},
        warmup={"steps": 200, "num_demonstrations": 1000},
        train={"steps": 40},
        evaluation={"num_tasks": 64},
        overrides=sys.argv[1:],  # so that `--train.steps 80` works here too
    )
    print(agentrl.play(model=run.path))


if __name__ == "__main__":  # other commands import this file to find MyEnv, and must not train
    main()
