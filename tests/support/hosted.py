"""An environment to be hosted, with all that a driver asks of one; and a server of it in this process."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from agentrl import EnvironmentFailure, Need
from agentrl.env import ToolEnv, tool, tool_call
from agentrl.env.make import EnvConfig
from agentrl.rollout.env_server import EnvServer
from agentrl.types import Message

ODD = "tests.support.hosted:Odd"


class Odd(ToolEnv):
    """Draws numbers, sleeps, breaks and dies when it is told to; it ends with the sixth call."""

    def __init__(self, step_s: float = 0.0, refused: bool = False) -> None:
        super().__init__()
        if refused:
            raise LookupError("the drawer is locked")
        self.step_s = step_s
        self.drawn: list[float] = []

    def start(self, options: dict[str, Any]) -> list[Message]:
        self.drawn = [float(self.np_random.random())]
        self.log(begun=1.5)
        content = f"{options['split']} {options['task_index']}: begin at {self.drawn[0]}"
        return [{"role": "system", "content": "Draw, ünd be \u2603."}, {"role": "user", "content": content}]

    @tool
    def draw(self, times: int = 1) -> str:
        """Draw numbers.

        Args:
            times: how many.
        """
        time.sleep(self.step_s)
        self.drawn += [float(number) for number in self.np_random.random(times)]
        self.reward(self.drawn[-1] / 3)
        self.log(drawn=times)
        if len(self.drawn) > 6:
            self.finish(success=self.drawn[-1] > 0.5, score=self.drawn[-1])
        return str(self.drawn[-1])

    @tool
    def break_off(self) -> str:
        """Fail the episode."""
        raise EnvironmentFailure("nothing\nis drawn")

    @tool
    def hang(self) -> str:
        """Never return."""
        time.sleep(1000)
        return ""

    @tool
    def die(self) -> str:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def answer(self, text: str) -> str:
        if text == "pid":
            return str(os.getpid())
        if text == "break":
            raise ZeroDivisionError("no\nletters")
        return f"{len(text)} letters"

    def state_key(self) -> str | None:
        return f"{self.drawn}"

    def action_key(self, action: str | Message) -> str | None:
        return f"{len(self.drawn)}: {super().action_key(action)}"

    def gold_answer(self) -> str | None:
        return f"{self.drawn[0]:.2f}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        is_right = rng is None or rng.random() < skill
        return tool_call("draw", times=1 if is_right or rng is None else int(rng.integers(2, 4)))

    def num_tasks(self, split: str) -> int | None:
        return 40 if split == "train" else 7

    def tasks_hash(self, split: str) -> str | None:
        return f"{split} tasks"

    def provides(self) -> frozenset[Need]:
        return super().provides() - {Need.ACTION_KEYS}


@contextmanager
def serving(config: EnvConfig, *, workers: int = 2, token: str | None = None) -> Iterator[tuple[EnvServer, str]]:
    """Serve on a thread of this process; give the server and its address."""
    loop = asyncio.new_event_loop()
    server, is_over, found = EnvServer(config, num_workers=workers, token=token), asyncio.Event(), []
    has_begun = threading.Event()

    async def serve() -> None:
        async with server.serving("127.0.0.1", 0) as url:
            found.append(url)
            has_begun.set()
            await is_over.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert has_begun.wait(30)
        yield server, found[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()


def pids(server: EnvServer) -> list[int]:
    """Return those of the workers."""
    return [worker._process.pid or 0 for worker in server._workers]


def loads(server: EnvServer) -> list[int]:
    """Return how many sessions each worker has."""
    return [len(worker.sessions) for worker in server._workers]
