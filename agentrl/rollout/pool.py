"""Many episodes at once."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentrl.engine import Engine
from agentrl.engine.base import retry_wait_s
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.conversation import EpisodeContext, LiveEpisode, Task
from agentrl.rollout.env_driver import Environments, EnvThread, MakeEnv
from agentrl.rollout.episode import Episode
from agentrl.rollout.faults import EngineClock
from agentrl.rollout.journal import Journal
from agentrl.rollout.stream import TaskStream, group_tasks, make_group
from agentrl.rollout.tasks import EnvTask, Tasks
from agentrl.types import Sampling, StopReason, TaskShard, Trajectory, TrajectoryGroup

_FIRST_WAIT_S = 1.0
"""Wait before an episode's second retry; doubles each time, up to a minute. The first retry is made at once."""
_MAX_LOST = 4
"""Threads that hang in environments, for each episode that is played at once, beyond which a run stops."""
_LAST_PAUSE_S = 10.0
"""How long an engine may take to return what it has sampled of actions, once collecting has failed or was interrupted."""
_TICK_S = 0.02
"""How often the event loop's lag is measured."""


@dataclass(slots=True)
class _Slot:
    """One of the episodes that are played at the same time: one after the other takes it."""

    thread: EnvThread
    """Replaced where it hangs in an environment."""


class RolloutPool:
    """Keeps up to `max_live_episodes` episodes going, each environment on a thread of its own.

    Between two calls of `collect` the engine is paused, and unfinished episodes wait; with `mode: async` they continue.

    An episode whose environment failed is restarted with a fresh one, and one whose engine failed resumes from where it
    stood; one that keeps failing is returned as such, and a group with fewer than two usable episodes is replaced by a
    new task. Everything is counted in `counts`.
    """

    def __init__(
        self,
        *,
        make_env: MakeEnv,
        context: EpisodeContext[Engine],
        tasks: Tasks,
        fork: bool = False,
        shard: TaskShard | None = None,
        journal: Journal | None = None,
        on_fault: Callable[[Trajectory], object] = lambda _: None,
    ) -> None:
        """Take the parts.

        Args:
            make_env: makes the environment of one episode.
            context: what all episodes are played with.
            tasks: of the run, in their order; samples follow from their seed.
            fork: rollouts are forked from every episode's turns (see `RolloutConfig.branches`).
            shard: the training tasks that are dealt out to this process. None: all.
            journal: takes what happens to them from the first `state_dict` on. None: nothing is written.
            on_fault: told of each episode whose environment failed, at each attempt, at once.
        """
        self.context, self.tasks, self.shard = context, tasks, shard or TaskShard(context.config.num_groups)
        self._fork, self._on_fault = fork, on_fault
        self._own = self.environments = Environments(make_env)
        self._engine, self._config, self._clock = context.engine, context.config, context.clock
        self._stream = TaskStream(context.config, tasks=tasks, shard=self.shard, journal=journal)
        self._is_paused = False
        self._failures_in_a_row = 0
        self._live: dict[str, Episode] = {}
        """Episodes of the stream that are being played, by their names."""
        self._runners: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.loop_lag_s = 0.0
        """Longest time by which the event loop was late during the last `collect`."""

    def with_config(
        self, config: RolloutConfig, *, environments: Environments | None = None, tasks: Tasks | None = None
    ) -> "RolloutPool":
        """Return another pool for the same engine, with limits of its own; by default for the same environments and tasks."""
        context = replace(self.context, config=config, clock=EngineClock())
        environments, tasks = environments or self.environments, tasks or self.tasks
        pool = RolloutPool(make_env=environments.make, context=context, tasks=tasks, on_fault=self._on_fault)
        pool.environments = environments
        return pool

    @property
    def counts(self) -> Mapping[str, int]:
        """What went wrong so far, and was mended."""
        return self._stream.counts

    @property
    def is_replaying(self) -> bool:
        """True while `collect` returns what was handed out before the run was killed."""
        return self._stream.is_replaying

    async def collect(self, num_groups: int | None = None) -> list[TrajectoryGroup]:
        """Return the next groups of the training stream; a step's share by default.

        They are the oldest of the groups that are complete, as soon as there are enough and the others can be returned
        before any is too old (`max_staleness`); with `mode: sync` that is when all are complete. Groups with too many
        failures, and with `dynamic_sampling` those that teach nothing, give way to later ones.

        Raises:
            EnvironmentFailure: when episodes fail one after the other, or groups are replaced one after the other, with
                the last error's words.
            EngineError: when episodes fail one after the other because the engine does.
        """
        if self._stream.is_replaying:
            return self._stream.hand_out_again()
        self._stream.begin_step(num_groups)
        await self.resume()
        try:
            async with self._lag_measured():
                groups = await self._complete()
            self._stream.flush()  # before they are trained on
            if self._config.samples_during_update:
                self._fill_slots()  # for the time of the update
            else:
                await self.pause()
        except BaseException as error:
            try:
                if not isinstance(error, EngineError):  # one that fails need not be asked for what it has
                    with suppress(EngineError, OSError):  # the deadline's TimeoutError is one
                        async with asyncio.timeout(_LAST_PAUSE_S):
                            await self.pause()
            finally:  # also where it is interrupted once more
                await self.stop()
            raise
        return groups

    async def resume(self) -> None:
        """Let the engine sample."""
        await self._engine.resume()
        self._clock.start()
        self._is_paused = False

    async def pause(self) -> None:
        """Pause the engine, and let every episode take what was sampled of its action."""
        if self._is_paused:
            return
        self._clock.stop()
        await self._engine.pause()
        self._is_paused = True
        for _ in range(3):  # a completion to the request, to the caller, to the episode
            await asyncio.sleep(0)
        for live in [episode.live() for episode in self._live.values()]:
            if live.partial is not None:
                self._stream.record_progress(live)
        self._stream.flush()

    async def stop(self) -> None:
        """Give up the episodes that are under way."""
        runners = list(self._runners)
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)

    async def play(self, tasks: Mapping[str, EnvTask], *, group_size: int) -> list[TrajectoryGroup]:
        """Play `group_size` episodes of each task (by its group id), every one exactly once."""
        seed = self.tasks.seed
        queue = deque(
            one for name, task in tasks.items() for one in group_tasks(name, task, size=group_size, run_seed=seed)
        )
        done: dict[str, list[Trajectory]] = {group_id: [] for group_id in tasks}
        runners = [
            asyncio.create_task(self._run(queue, done)) for _ in range(min(len(queue), self._config.max_live_episodes))
        ]
        try:
            await asyncio.gather(*runners)
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
        return [make_group(group_id, trajectories) for group_id, trajectories in done.items()]

    def recover(self, *, ignore: bool = False, settings: str = "") -> bool:
        """Take over what a run that was killed has written down since the state that was loaded; see `TaskStream.recover`."""
        return self._stream.recover(ignore=ignore, settings=settings)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream of training tasks stands, with every episode of it that is under way or done.

        What happens from now on goes into a new file of the journal.
        """
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; nothing may be under way."""
        self._stream.load_state_dict(state)

    def drop_old_journal(self) -> None:
        """Drop what was written down before the last `state_dict`, which is safe now."""
        self._stream.drop_old_journal()

    def close(self) -> None:
        """Close the environments that are kept or were cancelled, let their threads end, and close the journal."""
        self._own.close()
        self._stream.close()

    async def _complete(self) -> list[TrajectoryGroup]:
        """Play until there are groups to hand out."""
        self._changed = asyncio.Event()
        while True:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if (groups := self._stream.hand_out(version=self._engine.version)) is not None:
                return groups
            self._fill_slots()
            if self._runners:
                await self._changed.wait()
                self._changed.clear()
            elif self._stream.has_engine_failures:
                await self._ask_engine()
                self._stream.give_up()
            else:
                raise RuntimeError("nothing is played, nothing can be started, and no group can be handed out")

    async def _ask_engine(self) -> None:
        """Sample a token.

        Raises:
            EngineError: when the engine does not answer: then it was no episode's fault that it failed.
        """
        sampling = Sampling(max_tokens=1, stop_token_ids=(), temperature=self._config.temperature)
        try:
            async with self._clock.timeout(self._config.engine_timeout_s):
                with self._engine.conversation("ask"):
                    await self._engine.generate(self.context.renderer.stop_token_ids[:1], sampling, "ask")
        except TimeoutError:
            raise EngineError(
                f"no completion within rollout.engine_timeout_s: {self._config.engine_timeout_s:g}"
            ) from None

    def _fill_slots(self) -> None:
        """Start as many episodes as there are free slots.

        All at once: in lockstep, the engine would continue without one that came later.
        """
        while len(self._runners) < self._config.max_live_episodes:
            episode = self._stream.next(version=self._engine.version)
            if episode is None:
                return
            runner = asyncio.create_task(self._run_stream(episode))
            self._runners.add(runner)
            runner.add_done_callback(self._on_runner_done)

    async def _run_stream(self, episode: LiveEpisode | None) -> None:
        """Play one episode of the training stream after the other."""
        slot = self._new_slot()
        try:
            while episode is not None:
                self._stream.record_end(await self._finish(episode, slot, live=self._live))
                self._changed.set()
                episode = self._stream.next(version=self._engine.version)
        finally:
            self._leave(slot)

    def _on_runner_done(self, runner: "asyncio.Task[None]") -> None:
        self._runners.discard(runner)
        error = None if runner.cancelled() else runner.exception()
        self._failure = self._failure or error  # the first one says most
        self._changed.set()

    async def _run(self, queue: deque[Task], done: dict[str, list[Trajectory]]) -> None:
        """Play one episode after the other: a free slot is refilled at once."""
        slot = self._new_slot()
        try:
            while queue:
                trajectory = await self._finish(LiveEpisode(task=queue.popleft()), slot)
                done[trajectory.group_id].append(trajectory)
        finally:
            self._leave(slot)

    async def _finish(self, start: LiveEpisode, slot: _Slot, *, live: dict[str, Episode] | None = None) -> Trajectory:
        """Play an episode to its end, listed in `live` meanwhile; one that failed is tried again."""
        trajectory, reached = await self._play_one(start, slot, live)
        for retry in range(self._config.max_retries):
            if not trajectory.stop_reason.failed:
                break  # a first prompt that is too long stays so
            self._stream.counts["retries"] += 1
            if retry:
                with self._engine.conversation(f"{start.task.trajectory_id} waits"):  # in lockstep, so do all others
                    await asyncio.sleep(retry_wait_s(retry - 1, first_s=_FIRST_WAIT_S))
            if trajectory.stop_reason is StopReason.ENGINE_ERROR:
                start = reached
            else:
                start = LiveEpisode(task=replace(start.task, attempt=start.task.attempt + 1))
            trajectory, reached = await self._play_one(start, slot, live)
        self._stream.counts["failed_episodes"] += trajectory.failed
        self._break_off_after_failures(trajectory)
        return trajectory

    async def _play_one(
        self, start: LiveEpisode, slot: _Slot, live: dict[str, Episode] | None
    ) -> tuple[Trajectory, LiveEpisode]:
        """Play an episode; return it, and where it stood at its end."""
        if slot.thread.is_lost:
            self._abandon(slot.thread)
            slot.thread = EnvThread()
        episode = Episode(
            start.task,
            context=self.context,
            thread=slot.thread,
            fork=self._fork,
            recorded=start,
            on_change=None if live is None else self._stream.record_progress,
            on_fault=self._note_fault,
        )
        make_env = self.environments.make_for(start.task.stage)
        play = partial(episode.play, make_env, reuses=self.environments.is_reused)
        if live is None:
            return await play(), start
        live[start.task.trajectory_id] = episode
        try:
            return await play(), episode.live()
        finally:
            del live[start.task.trajectory_id]

    def _note_fault(self, trajectory: Trajectory) -> None:
        self._stream.counts["faults"] += 1
        self._on_fault(trajectory)

    def _new_slot(self) -> _Slot:
        return _Slot(self.environments.take())

    def _leave(self, slot: _Slot) -> None:
        if slot.thread.is_lost:
            self._abandon(slot.thread)
        else:
            self.environments.give_back(slot.thread)

    def _abandon(self, thread: EnvThread) -> None:
        """Let a thread go that hangs in an environment.

        Raises:
            EnvironmentFailure: when too many of them hang.
        """
        self._stream.counts["lost_threads"] += 1
        if (num_lost := self.environments.abandon(thread)) > _MAX_LOST * self._config.max_live_episodes:
            raise EnvironmentFailure(
                f"{num_lost} threads hang in calls of environments that missed rollout.env_timeout_s: "
                f"{self._config.env_timeout_s:g} s and never came back. Give what may hang a deadline of its own, or a "
                "subprocess"
            )

    def _break_off_after_failures(self, trajectory: Trajectory) -> None:
        """Raise where one episode after the other failed for good; an attempt that is made again does not count.

        Nor does a first prompt that is too long: all episodes of its group have it, and the group is replaced.
        """
        if trajectory.failed and not trajectory.stop_reason.failed:
            return
        self._failures_in_a_row = self._failures_in_a_row + 1 if trajectory.failed else 0
        if self._failures_in_a_row >= self._config.max_consecutive_failures:
            words = f"{self._failures_in_a_row} episodes failed in a row; the last one: {trajectory.error}"
            raise (EngineError if trajectory.stop_reason is StopReason.ENGINE_ERROR else EnvironmentFailure)(words)

    @asynccontextmanager
    async def _lag_measured(self) -> AsyncIterator[None]:
        """Measure by how much the event loop is late."""

        async def measure() -> None:
            loop = asyncio.get_running_loop()
            while True:
                due = loop.time() + _TICK_S
                await asyncio.sleep(_TICK_S)
                self.loop_lag_s = max(self.loop_lag_s, loop.time() - due)

        self.loop_lag_s = 0.0
        watch = asyncio.create_task(measure())
        try:
            yield
        finally:
            watch.cancel()
