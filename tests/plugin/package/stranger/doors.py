"""An environment."""

from typing import Any

import numpy as np

from agentrl import Message, ToolEnv, tool, tool_call


class Doors(ToolEnv):
    """Open the door that is named."""

    def __init__(self, *, num_doors: int = 3) -> None:
        super().__init__()
        self.num_doors, self.door = num_doors, 0

    def start(self, options: dict[str, Any]) -> str:
        self.door = int(self.np_random.integers(self.num_doors))
        return f"Open door {self.door}."

    @tool
    def open(self, door: int) -> str:
        """Open a door.

        Args:
            door: its number.
        """
        self.reward(float(door == self.door))
        self.finish(success=door == self.door)
        return "Open."

    def answer(self, text: str) -> str:
        return "Use open."

    def state_key(self) -> str:
        return str(self.door)

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        is_right = rng is None or rng.random() < skill
        return tool_call("open", door=self.door if is_right else (self.door + 1) % self.num_doors)
