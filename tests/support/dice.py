"""An environment of chance that can be forked."""

from collections.abc import Callable
from typing import Any

from agentrl.env import MessageEnv
from agentrl.rollout import Task
from agentrl.types import Message

TASK = Task(group_id="train/000000", rollout_index=3, seed=11, sampling_seed=1)
Log = Callable[[str, "Dice"], None]


class Dice(MessageEnv):
    """Ends after five turns, each of which pays a number that chance draws; tells what happens to it to `log`.

    What it has drawn and what was said to it is kept in lists, which a copy that is too shallow would share.
    """

    num_turns = 5

    def __init__(self, log: Log = lambda _what, _env: None) -> None:
        super().__init__()
        self.tell = log
        self.secret = -1
        self.drawn: list[float] = []
        self.heard: list[str] = []
        self.generation = 0
        log("made", self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1000))
        return ({"role": "user", "content": f"secret {self.secret}"},), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self.tell("step", self)
        self.drawn.append(self.draw())
        self.heard.append(str(action["content"] if isinstance(action, dict) else action))
        said = {"role": "user", "content": f"{self.drawn[-1]:.3f} after {len(self.drawn)}"}
        return (said,), self.drawn[-1], len(self.drawn) == self.num_turns, False, {}

    def draw(self) -> float:
        return float(self.np_random.random())

    def fork(self) -> "Dice":
        self.tell("fork", self)
        copied = super().fork()
        copied.generation += 1
        copied.tell("forked", copied)
        return copied

    def close(self) -> None:
        self.tell("close", self)


def raises() -> None:
    """Be what happens to an environment of which `log` is told."""
    raise KeyError("lever")
