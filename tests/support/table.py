"""An environment over a table of tasks, which notes what it was told."""

from pathlib import Path
from typing import Any

import numpy as np

from agentrl import Message, ToolEnv


class Table(ToolEnv):
    """`What follows 7?`, of as many numbers as each split has."""

    def __init__(self, *, num_train: int | None = 7, num_eval: int | None = 3, log: str | None = None) -> None:
        super().__init__()
        self.lengths, self.path, self.row = {"train": num_train, "eval": num_eval}, log, -1

    def num_tasks(self, split: str) -> int | None:
        return self.lengths[split]

    def start(self, options: dict[str, Any]) -> str:
        self.row = (options.get("task_index") or 0) + 1000 * (options.get("split") == "eval")
        if self.path is not None:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write("{split} {task_index} {rollout_index}\n".format(**options))
        return f"What follows {self.row}?"

    def answer(self, text: str) -> None:
        self.reward(float(text == str(self.row + 1)))
        self.finish(success=text == str(self.row + 1))

    def gold_answer(self) -> str:
        return str(self.row + 1)

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        return {"role": "assistant", "content": str(self.row + 1)}
