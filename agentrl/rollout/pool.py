"""Many episodes at once."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from agentrl.chat import Renderer
from agentrl.engine import Engine
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.episode import Episode, LiveEpisode, MakeEnv, Task
from agentrl.rollout.seeds import derive_seed, task_seed
from agentrl.types import StopReason, Trajectory, TrajectoryGroup


@dataclass(slots=True, kw_only=True)
class _Group:
    """A task of the training stream that was begun and not handed out yet."""

    began: int
    """Policy version when it was begun."""
    waiting: list[LiveEpisode]
    """Episodes that nobody plays at the moment."""
    done: list[Trajectory] = field(default_factory=list)


@dataclass(slots=True)
class _Place:
    """Where one episode is played after the other."""

    thread: EnvThread


_GROUPS = TypeAdapter(dict[str, _Group])


class RolloutPool:
    """Keeps up to `max_live_episodes` episodes going, each environment on a thread of its own.

    With `mode: partial` episodes outlive a call of `collect`: between calls the engine is paused, and they wait.

    A failed episode is begun again with a fresh environment; one that goes on failing is returned as such, and a group
    with fewer than two usable episodes is replaced by a new task. Everything is counted in `counts`.
    """

    def __init__(
        self,
        *,
        make_env: MakeEnv,
        engine: Engine,
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
        self._failures_in_a_row = self._replaced_in_a_row = self._replaceable = 0
        self._groups: dict[str, _Group] = {}
        """Groups of the training stream under way, oldest first (`mode: partial`)."""
        self._live: dict[str, Episode] = {}
        """Episodes that are being played, by their names."""
        self._runners: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.counts = {"retries": 0, "failed_episodes": 0, "replaced_groups": 0, "alike_groups": 0, "lost_threads": 0}

    async def collect(self, num_groups: int | None = None) -> list[TrajectoryGroup]:
        """Return the next groups of the training stream, in its order; as many as the recipe says by default.

        Groups with too many failures, and with `dynamic_sampling` those that teach nothing, give way to later ones.

        Raises:
            EnvironmentFailure: when episodes fail one after the other, or groups are replaced one after the other, with
                the last error's words.
        """
        num_groups = self._config.num_groups if num_groups is None else num_groups
        self._replaced_in_a_row, self._replaceable = 0, self._config.dynamic_sampling
        if self._config.mode == "partial":
            return await self._collect_first(num_groups)
        groups: list[TrajectoryGroup] = []
        while missing := num_groups - len(groups):
            indices = range(self._next_group, self._next_group + missing)
            self._next_group += missing
            tasks = [(_name(i), task_seed(self._seed, i)) for i in indices]
            played = await self.play(tasks, group_size=self._config.group_size)
            groups += [group for group in played if self._is_of_use(group)]
        return groups

    async def _collect_first(self, num_groups: int) -> list[TrajectoryGroup]:
        """Return the oldest of the groups that are complete, once there are enough and none that is begun is too old."""
        await self._engine.resume()
        try:
            while (found := self._complete(num_groups)) is None:
                while len(self._runners) < self._config.max_live_episodes and self._has_next():
                    runner = asyncio.create_task(self._run_stream())
                    self._runners.add(runner)
                    runner.add_done_callback(self._on_runner_done)
                    await asyncio.sleep(0)  # it takes its episode, before the next place is offered
                await self._changed.wait()
                self._changed.clear()
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
            return found
        finally:
            await self.hold()

    async def hold(self) -> None:
        """Pause the engine, and let every episode take what was sampled of its action."""
        await self._engine.pause()
        for _ in range(3):  # a completion to the request, to the caller, to the episode
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Give up the episodes that are under way."""
        runners = list(self._runners)
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)

    def _complete(self, num_groups: int) -> list[TrajectoryGroup] | None:
        size, oldest = self._config.group_size, self._engine.version - self._config.max_staleness
        names = [name for name, group in self._groups.items() if len(group.done) == size]
        if len(names) < num_groups or any(g.began <= oldest and len(g.done) < size for g in self._groups.values()):
            return None
        return [
            TrajectoryGroup(group_id=name, trajectories=_by_index(self._groups.pop(name).done))
            for name in names[:num_groups]
        ]

    def _has_next(self) -> bool:
        ahead = self._config.num_groups * (1 + self._config.max_staleness)
        return len(self._groups) < ahead or any(group.waiting for group in self._groups.values())

    def _next(self) -> LiveEpisode | None:
        """Take the next episode: of the oldest group that has one left, else of a new one."""
        if not self._has_next():
            return None
        for group in self._groups.values():
            if group.waiting:
                return group.waiting.pop(0)
        name, seed = _name(self._next_group), task_seed(self._seed, self._next_group)
        self._next_group += 1
        tasks = self._tasks(name, seed, self._config.group_size)
        group = _Group(began=self._engine.version, waiting=[LiveEpisode(task=task) for task in tasks])
        self._groups[name] = group
        return group.waiting.pop(0)

    async def _run_stream(self) -> None:
        """Play one episode of the training stream after the other."""
        place = self._new_place()
        try:
            while (episode := self._next()) is not None:
                self._take(await self._finish(episode, place))
        finally:
            self._leave(place)

    def _on_runner_done(self, runner: "asyncio.Task[None]") -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and runner.exception() is not None:
            self._failure = runner.exception()
        self._changed.set()

    def _take(self, trajectory: Trajectory) -> None:
        """Put a finished episode to its group; a complete one that is of no use gives way to a later one."""
        group = self._groups[trajectory.group_id]
        group.done.append(trajectory)
        if len(group.done) == self._config.group_size:
            whole = TrajectoryGroup(group_id=trajectory.group_id, trajectories=_by_index(group.done))
            if not self._is_of_use(whole):
                del self._groups[trajectory.group_id]
        self._changed.set()

    def _is_of_use(self, group: TrajectoryGroup) -> bool:
        """Tell whether a complete group can be trained on; count it where not.

        Raises:
            EnvironmentFailure: after too many in a row with too many failures.
        """
        if len(group.valid) >= min(2, self._config.group_size):
            self._replaced_in_a_row = 0
            if self._replaceable and len(group.valid) > 1 and _earned_alike(group):
                self._replaceable -= 1
                self.counts["alike_groups"] += 1
                return False
            return True
        self.counts["replaced_groups"] += 1
        self._replaced_in_a_row += 1
        if self._replaced_in_a_row >= self._config.max_consecutive_failures:
            last = [t.error for t in group.trajectories if t.failed][-1]
            raise EnvironmentFailure(
                f"{self._replaced_in_a_row} groups in a row had too many failures; the last: {last}"
            )
        return False

    async def play(self, tasks: Iterable[tuple[str, int]], *, group_size: int) -> list[TrajectoryGroup]:
        """Play `group_size` episodes of each task (group id, environment seed), every one exactly once."""
        tasks = list(tasks)
        queue = deque(task for group_id, seed in tasks for task in self._tasks(group_id, seed, group_size))
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
        """Return where the stream of training tasks stands, with every episode of it that is under way or done."""
        groups = {}
        for name, group in self._groups.items():
            live = [episode.live() for key, episode in self._live.items() if key.rpartition("/")[0] == name]
            groups[name] = replace(group, waiting=sorted([*live, *group.waiting], key=lambda e: e.task.rollout_index))
        return {
            "next_group": self._next_group,
            "counts": dict(self.counts),
            "groups": _GROUPS.dump_python(groups, mode="json", fallback=str),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; nothing may be under way."""
        self._next_group, self.counts = state["next_group"], self.counts | state["counts"]
        self._groups = _GROUPS.validate_python(state.get("groups", {}))

    def close(self) -> None:
        """Let the environments' threads end."""
        while self._threads:
            self._threads.pop().close()

    def _tasks(self, group_id: str, seed: int, group_size: int) -> list[Task]:
        sampling_seed = derive_seed(self._seed, "sampling")
        return [
            Task(group_id=group_id, rollout_index=index, seed=seed, sampling_seed=sampling_seed)
            for index in range(group_size)
        ]

    async def _run(self, queue: deque[Task], done: dict[str, list[Trajectory]]) -> None:
        """Play one episode after the other: a free place is refilled at once."""
        place = self._new_place()
        try:
            while queue:
                trajectory = await self._finish(LiveEpisode(task=queue.popleft()), place)
                done[trajectory.group_id].append(trajectory)
        finally:
            self._leave(place)

    async def _finish(self, start: LiveEpisode, place: _Place) -> Trajectory:
        """Play an episode to its end; one that failed is begun again."""
        trajectory = await self._play_one(start, place)
        while trajectory.failed and start.task.attempt < self._config.max_retries:
            start = LiveEpisode(task=replace(start.task, attempt=start.task.attempt + 1))
            self.counts["retries"] += 1
            trajectory = await self._play_one(start, place)
        self.counts["failed_episodes"] += trajectory.failed
        self._break_off_after_failures(trajectory)
        return trajectory

    async def _play_one(self, start: LiveEpisode, place: _Place) -> Trajectory:
        if place.thread.is_lost:
            self._lose(place.thread)
            place.thread = EnvThread()
        episode = Episode(
            start.task,
            engine=self._engine,
            renderer=self._renderer,
            config=self._config,
            thread=place.thread,
            fork=self._fork,
            recorded=start,
        )
        self._live[start.task.trajectory_id] = episode
        try:
            return await episode.play(self._make_env)
        finally:
            del self._live[start.task.trajectory_id]

    def _new_place(self) -> _Place:
        return _Place(self._threads.pop() if self._threads else EnvThread())

    def _leave(self, place: _Place) -> None:
        if place.thread.is_lost:
            self._lose(place.thread)
        else:
            self._threads.append(place.thread)

    def _lose(self, thread: EnvThread) -> None:
        """Let a thread go that hangs in an environment."""
        thread.close()
        self.counts["lost_threads"] += 1

    def _break_off_after_failures(self, trajectory: Trajectory) -> None:
        """Raise where one episode after the other failed for good; an attempt that is made again does not count."""
        self._failures_in_a_row = self._failures_in_a_row + 1 if trajectory.failed else 0
        if self._failures_in_a_row >= self._config.max_consecutive_failures:
            words = f"{self._failures_in_a_row} episodes failed in a row; the last one: {trajectory.error}"
            raise (EngineError if trajectory.stop_reason is StopReason.ENGINE_ERROR else EnvironmentFailure)(words)


def _name(index: int) -> str:
    """Return the name of the training stream's `index`-th group."""
    return f"train/{index:06d}"


def _earned_alike(group: TrajectoryGroup) -> bool:
    """Tell whether all returns are the same but for rounding."""
    returns = [trajectory.reward for trajectory in group.valid]
    return max(returns) - min(returns) <= 1e-12 * max(map(abs, returns))


def _by_index(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(sorted(trajectories, key=lambda t: int(t.trajectory_id.rsplit("/", 1)[1])))
