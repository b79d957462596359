"""An environment that talks, and a pool's episodes in it."""

import asyncio
from collections.abc import Callable
from typing import Any

from agentrl.env import MessageEnv
from agentrl.rollout import RolloutPool
from agentrl.rollout.env_driver import MakeEnv
from agentrl.types import Message, Trajectory, TrajectoryGroup


class Talk(MessageEnv):
    """One to four turns, as the seed says; tells what happens to it to `log`."""

    def __init__(self, log: Callable[[str, "Talk"], None] = lambda _what, _env: None) -> None:
        super().__init__()
        self.tell, self.turn, self.seed, self.member = log, 0, -1, -1
        log("made", self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        assert options is not None
        self.turn, self.seed, self.member = 0, seed, options["rollout_index"]
        self.tell("reset", self)
        return ({"role": "user", "content": f"task {seed}"},), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self.turn += 1
        self.tell("step", self)
        said = {"role": "user", "content": f"{action['content'] if isinstance(action, dict) else action}?"}
        return (said,), float(self.turn), self.turn > self.seed % 4, False, {}

    def close(self) -> None:
        self.tell("close", self)


def logged(log: Callable[[str, Talk], None]) -> MakeEnv:
    return lambda: Talk(log)


def fails(*, where: str, when: Callable[[Talk], bool]) -> MakeEnv:
    def log(what: str, env: Talk) -> None:
        if what == where and when(env):
            raise RuntimeError(f"the lamp of member {env.member} is out")

    return logged(log)


def collect(pool: RolloutPool, *num_groups: int) -> list[TrajectoryGroup]:
    async def run() -> list[TrajectoryGroup]:
        return [group for num in num_groups for group in await pool.collect(num)]

    return asyncio.run(run())


def episodes(groups: list[TrajectoryGroup]) -> dict[str, Trajectory]:
    return {t.trajectory_id: t for group in groups for t in group.trajectories}
