"""Six choices of which one wrong loses all: a task in which runs collapsed by how minibatches were drawn."""

from typing import Any

import numpy as np

from agentrl import Message, ToolEnv, tool, tool_call

NUM_ROOMS, NUM_BOXES = 6, 4


class SixRooms(ToolEnv):
    """Each room names its right box of four; the end alone pays 1, if all six were right."""

    def start(self, options: dict[str, Any]) -> str:
        """Hide the right boxes by the seed."""
        self.right = self.np_random.integers(NUM_BOXES, size=NUM_ROOMS).tolist()
        self.room, self.all_right = 0, True
        return self._next()

    @tool
    def open_box(self, box: int) -> str:
        """Open a box.

        Args:
            box: its number.
        """
        return self._open(box)

    def answer(self, text: str) -> str:
        """Count it as a wrong box."""
        return self._open(None)

    def state_key(self) -> str:
        """Return the room, whether all was right so far, and the box that is named."""
        return f"{self.room}/{self.all_right}/{self.right[self.room] if self.room < NUM_ROOMS else None}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Open the right box, or with 1 - skill another."""
        rng = np.random.default_rng() if rng is None else rng
        offset = 0 if rng.random() < skill else int(rng.integers(1, NUM_BOXES))
        return tool_call("open_box", box=(self.right[self.room] + offset) % NUM_BOXES)

    def _open(self, box: int | None) -> str:
        self.all_right &= box == self.right[self.room]
        self.room += 1
        if self.room < NUM_ROOMS:
            return self._next()
        self.reward(float(self.all_right), "end")
        self.finish(success=self.all_right)
        return "The end."

    def _next(self) -> str:
        return f"Room {self.room}: box {self.right[self.room]}."
