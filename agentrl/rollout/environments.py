"""The environments of a pool: made when needed, and kept for another episode where that is proven to make no difference."""

import time
from collections.abc import Sequence

from agentrl.rollout.env_calls import MakeEnv
from agentrl.rollout.env_thread import CLOSING_S, EnvThread


class Environments:
    """Makes environments, each on a thread of its own, and keeps the threads that are idle."""

    def __init__(self, make: MakeEnv) -> None:
        self.make = make
        self.stages: Sequence[MakeEnv] = ()
        """What makes one with each entry of `env.schedule`, in their order."""
        self.is_reused = False
        """An environment whose episode ended well plays another one, on its thread: set where `reset` is proven to forget."""
        self._idle: list[EnvThread] = []
        self._lost: list[EnvThread] = []

    def make_for(self, stage: int) -> MakeEnv:
        """Return what makes an environment with an entry of the schedule, from 1; 0: with none."""
        return self.stages[stage - 1] if stage else self.make

    def take(self) -> EnvThread:
        """Return a thread: an idle one, with its environment, or a new one."""
        return self._idle.pop() if self._idle else EnvThread()

    def give_back(self, thread: EnvThread) -> None:
        """Keep a thread that plays no episode at the moment."""
        self._idle.append(thread)

    def lose(self, thread: EnvThread) -> int:
        """Let a lost thread end when its call returns, if ever; return how many have not."""
        thread.close()
        self._lost = [lost for lost in [*self._lost, thread] if lost.is_alive]
        return len(self._lost)

    def close(self) -> None:
        """Close the idle environments and those of cancelled calls, and let their threads end."""
        idle, self._idle = self._idle, []
        for thread in idle:
            thread.close()
        deadline = time.monotonic() + CLOSING_S
        for thread in [*idle, *(lost for lost in self._lost if not lost.is_hanging)]:
            thread.join(timeout_s=max(0.0, deadline - time.monotonic()))
