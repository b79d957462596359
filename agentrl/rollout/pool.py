"""Many episodes at once."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat import Renderer
from agentrl.engine import Sampler
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.episode import Episode, MakeEnv, Task
from agentrl.rollout.seeds import derive_seed, task_seed
from agentrl.types import StopReason, Trajectory, TrajectoryGroup


class RolloutPool:
    """Keeps up to `max_live_episodes` episodes going, each environment on a thread of its own.

    A failed episode is begun again with a fresh environment; one that goes on failing is returned as such, and a group
    with fewer than two usable episodes is replaced by a new task. Everything is counted in `counts`.
    """

    def __init__(
        self,
        *,
        make_env: MakeEnv,
        engine: Sampler,
        renderer: Renderer,
        config: RolloutConfig,
        seed: int,
        fork: bool = False,
    ) -> None:
        """Take the parts; with `fork`, rollouts are forked from every episode's turns (see `RolloutConfig.branches`)."""
        self._make_env, self._engine, self._renderer, self._config = make_env, engine, renderer, config
        self._seed, self._fork = seed, fork
        self._next_group = 0
        self._threads: list[EnvThread] = []
        self._failures_in_a_row = 0
        self.counts = {"retries": 0, "failed_episodes": 0, "replaced_groups": 0, "alike_groups": 0, "lost_threads": 0}

    async def collect(self, num_groups: int | None = None) -> list[TrajectoryGroup]:
        """Return the next groups of the training stream, in its order; as many as the recipe says by default.

        Groups with too many failures, and with `dynamic_sampling` those that teach nothing, give way to later ones.

        Raises:
            EnvironmentFailure: when episodes fail one after the other, or groups are replaced one after the other, with
                the last error's words.
        """
        num_groups = self._config.num_groups if num_groups is None else num_groups
        groups: list[TrajectoryGroup] = []
        replaced_in_a_row, replaceable = 0, self._config.dynamic_sampling
        while missing := num_groups - len(groups):
            indices = range(self._next_group, self._next_group + missing)
            self._next_group += missing
            tasks = [(f"train/{i:06d}", task_seed(self._seed, i)) for i in indices]
            played = await self.play(tasks, group_size=self._config.group_size)
            needed = min(2, self._config.group_size)
            for group in played:
                if len(group.valid) >= needed:
                    replaced_in_a_row = 0
                    if replaceable and len(group.valid) > 1 and _earned_alike(group):
                        replaceable -= 1
                        self.counts["alike_groups"] += 1
                    else:
                        groups.append(group)
                    continue
                self.counts["replaced_groups"] += 1
                replaced_in_a_row += 1
                if replaced_in_a_row >= self._config.max_consecutive_failures:
                    last = [t.error for t in group.trajectories if t.failed][-1]
                    raise EnvironmentFailure(
                        f"{replaced_in_a_row} groups in a row had too many failures; the last: {last}"
                    )
        return groups

    async def play(self, tasks: Iterable[tuple[str, int]], *, group_size: int) -> list[TrajectoryGroup]:
        """Play `group_size` episodes of each task (group id, environment seed), every one exactly once."""
        tasks = list(tasks)
        queue = deque(
            Task(
                group_id=group_id,
                rollout_index=index,
                seed=seed,
                sampling_seed=derive_seed(self._seed, "sampling"),
            )
            for group_id, seed in tasks
            for index in range(group_size)
        )
        done: dict[str, list[Trajectory]] = {group_id: [] for group_id, _ in tasks}
        runners = [
            asyncio.create_task(self._run(queue, done)) for _ in range(min(len(queue), self._config.max_live_episodes))
        ]
        try:
            await asyncio.gather(*runners)
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
        return [
            TrajectoryGroup(group_id=group_id, trajectories=_by_index(trajectories))
            for group_id, trajectories in done.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream of training tasks stands; in `sync` mode no episode is alive between steps."""
        return {"next_group": self._next_group, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._next_group, self.counts = state["next_group"], self.counts | state["counts"]

    def close(self) -> None:
        """Let the environments' threads end."""
        while self._threads:
            self._threads.pop().close()

    async def _run(self, queue: deque[Task], done: dict[str, list[Trajectory]]) -> None:
        """Play one episode after the other: a free place is refilled at once."""
        thread = self._threads.pop() if self._threads else EnvThread()
        try:
            while queue:
                task = queue.popleft()
                trajectory = await self._play_one(task, thread)
                while trajectory.failed and task.attempt < self._config.max_retries:
                    task = replace(task, attempt=task.attempt + 1)
                    self.counts["retries"] += 1
                    thread = self._fresh(thread)
                    trajectory = await self._play_one(task, thread)
                self.counts["failed_episodes"] += trajectory.failed
                self._break_off_after_failures(trajectory)
                thread = self._fresh(thread)
                done[task.group_id].append(trajectory)
        finally:
            if thread.is_lost:
                thread.close()
            else:
                self._threads.append(thread)

    async def _play_one(self, task: Task, thread: EnvThread) -> Trajectory:
        episode = Episode(
            task,
            engine=self._engine,
            renderer=self._renderer,
            config=self._config,
            thread=thread,
            fork=self._fork,
        )
        return await episode.play(self._make_env)

    def _break_off_after_failures(self, trajectory: Trajectory) -> None:
        """Raise where one episode after the other failed for good; an attempt that is made again does not count."""
        self._failures_in_a_row = self._failures_in_a_row + 1 if trajectory.failed else 0
        if self._failures_in_a_row >= self._config.max_consecutive_failures:
            words = f"{self._failures_in_a_row} episodes failed in a row; the last one: {trajectory.error}"
            raise (EngineError if trajectory.stop_reason is StopReason.ENGINE_ERROR else EnvironmentFailure)(words)

    def _fresh(self, thread: EnvThread) -> EnvThread:
        """Return the thread, or a new one where it hangs."""
        if not thread.is_lost:
            return thread
        thread.close()
        self.counts["lost_threads"] += 1
        return EnvThread()


def _earned_alike(group: TrajectoryGroup) -> bool:
    """Tell whether all returns are the same but for rounding."""
    returns = [trajectory.reward for trajectory in group.valid]
    return max(returns) - min(returns) <= 1e-12 * max(map(abs, returns))


def _by_index(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(sorted(trajectories, key=lambda t: int(t.trajectory_id.rsplit("/", 1)[1])))
