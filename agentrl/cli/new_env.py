"""An environment to begin with, its test, and a recipe that trains it."""

import keyword
import re
from pathlib import Path
from string import Template

from agentrl.errors import ConfigError

_ENV_FILE = Template('''"""$title: a number to find with hints; the task to replace by yours."""

from typing import Any

import numpy as np

from agentrl import Message, ToolEnv, tool, tool_call


class $cls(ToolEnv):
    """`1 to 8?`: find the number. Each try is answered by "higher" or "lower"."""

    def __init__(self, *, highest: int = 9) -> None:
        """Set the difficulty: a recipe gives these under `env.options`."""
        super().__init__()
        self.highest = highest

    def tasks(self, split: str) -> list[tuple[int, int]]:
        """Return the tasks of a split, each a number and its bound: 1 to 4 and 1 to 8 are held out for evaluation."""
        every = [(number, high) for high in range(2, self.highest + 1) for number in range(1, high + 1)]
        return [(number, high) for number, high in every if (high % 4 == 0) == (split == "eval")]

    def num_tasks(self, split: str) -> int:
        """Say how many tasks a split has. Leave this out where tasks have no end."""
        return len(self.tasks(split))

    def start(self, options: dict[str, Any]) -> str:
        """Begin the task that `options` names, or one drawn from `self.np_random`; return what the agent reads first."""
        tasks, index = self.tasks(options.get("split", "train")), options.get("task_index")
        self.number, self.high = tasks[int(self.np_random.integers(len(tasks))) if index is None else index]
        self.low = 1
        return f"1 to {self.high}?"

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
        """Reply to a turn without a tool call."""
        return "Use look."

    def state_key(self) -> str:
        """Equal keys are equal situations: some credit schemes compare what was earned from there."""
        return f"{self.low}-{self.high}/{self.number}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Play a turn well, and with probability 1 - skill at random: warm-up learns the form of calls from it."""
        if rng is not None and rng.random() >= skill:
            return tool_call("look", n=int(rng.integers(1, self.highest + 1)))
        return tool_call("look", n=(self.low + self.high) // 2)
''')
_TEST_FILE = Template("""from $name import $cls

from agentrl.testing import check_env


def test_it_keeps_the_contract() -> None:
    check_env($cls, seeds=range(10))
""")
_RECIPE_FILE = Template("""# agentrl train $name.yaml: a tiny model on a CPU, in two minutes; `model.name_or_path` takes a real one.
env:
  id: $name:$cls
  options: {highest: 9}
model:
  local: {hidden_size: 96, num_layers: 2, vocab_size: 384}
warmup:
  steps: 200
  batch_size: 16
  num_demonstrations: 1000
  skill: 0.5
rollout:
  num_groups: 8
  group_size: 8
  max_turns: 3
  max_turn_tokens: 32
  max_context_tokens: 512
credit:
  scheme: uniform
train:
  steps: 40
  learning_rate: 5.0e-4
evaluation:
  num_tasks: 12
  samples: 8
""")


def write_new_env(name: str, folder: Path) -> str:
    """Write an environment, its test and a recipe; return what to do next.

    Raises:
        ConfigError: for a name that is none of a module, and where a file is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"NAME: {name!r} is no name of a module; use lower-case letters, digits and '_', as in treasure_hunt"
        )
    words = {
        "name": name,
        "cls": "".join(map(str.capitalize, name.split("_"))),
        "title": name.replace("_", " ").capitalize(),
    }
    files = {f"{name}.py": _ENV_FILE, f"test_{name}.py": _TEST_FILE, f"{name}.yaml": _RECIPE_FILE}
    if there := [file for file in files if (folder / file).exists()]:
        raise ConfigError(f"NAME: {there[0]} is there already; choose another name")
    for file, template in files.items():
        (folder / file).write_text(template.substitute(words), encoding="utf-8")
    env = f"{name}:{words['cls']}"
    return (
        f"Wrote {', '.join(files)}. Now:\n"
        f"  agentrl envs play {env}\n  agentrl envs check {env}\n  agentrl train {name}.yaml"
    )
