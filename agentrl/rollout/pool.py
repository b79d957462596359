"""The pool that plays many episodes at once."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from agentrl.engine import Engine
from agentrl.engine.base import FreezableEngine, SleepingEngine, retry_wait_s
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.conversation import LiveEpisode, Task
from agentrl.rollout.faults import EngineClock
from agentrl.rollout.journal import Journal
from agentrl.rollout.player import Listeners, Play, Player
from agentrl.rollout.sample_action import EpisodeContext
from agentrl.rollout.stream import TaskStream, group_tasks, make_group
from agentrl.rollout.tasks import EnvTask, Tasks
from agentrl.types import Sampling, StopReason, TaskShard, Trajectory, TrajectoryGroup

_FIRST_WAIT_S = 1.0
"""Wait before an episode's second retry; doubles each time, up to a minute. The first retry is made at once."""
_LAST_PAUSE_S = 10.0
"""Deadline for the engine to return partial actions after `collect` has failed or was interrupted."""
_TICK_S = 0.02
"""Interval of the measurements of the event loop's lag."""


class RolloutPool:
    """Plays up to `RolloutConfig.live_episodes` at once.

    Between two calls of `collect` the engine is paused and unfinished episodes wait; with `mode: async` they continue.

    An episode whose player failed is restarted; one that lost its engine or its environment's server resumes. An episode that
    keeps failing is returned as failed, and a group with fewer than two valid episodes is replaced by a new task. `counts`
    counts all of it.
    """

    def __init__(
        self,
        *,
        player: Player,
        context: EpisodeContext[Engine],
        tasks: Tasks,
        fork: bool = False,
        shard: TaskShard | None = None,
        journal: Journal | None = None,
        on_fault: Callable[[Trajectory], object] = lambda _: None,
    ) -> None:
        """Take the parts.

        Args:
            player: plays the episodes; it is closed with the pool.
            context: parts that all episodes share.
            tasks: tasks of the run; their seed also fixes the sampling seeds.
            fork: fork rollouts from every episode's turns (see `RolloutConfig.branches`).
            shard: training tasks of this rank. None: all.
            journal: records events from the first `state_dict` on. None: nothing is written.
            on_fault: called with each episode whose environment failed, at each attempt.
        """
        self.context = context
        self.tasks = tasks
        self.shard = shard or TaskShard(context.config.num_groups)
        self._fork = fork
        self._on_fault = on_fault
        self._own: Player | None = player
        """Player to close with the pool. None: it is another pool's."""
        self._player = player
        self._engine = context.engine
        self._config = context.config
        self._max_live = context.config.live_episodes(self.shard.num_groups)
        self._clock = context.clock
        self._stream = TaskStream(context.config, tasks=tasks, shard=self.shard, journal=journal)
        self._is_paused = False
        self._failures_in_a_row = 0
        self._live: dict[str, Play] = {}
        """Episodes of the stream that are being played, by trajectory id."""
        self._runners: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.loop_lag_s = 0.0
        """Largest lag of the event loop during the last `collect`, in seconds."""

    def with_config(
        self, config: RolloutConfig, *, player: Player | None = None, tasks: Tasks | None = None
    ) -> "RolloutPool":
        """Return another pool on the same engine with another config; by default with the same player and tasks.

        It closes no player.
        """
        context = replace(self.context, config=config, clock=EngineClock())
        player, tasks = player or self._player, tasks or self.tasks
        pool = RolloutPool(player=player, context=context, tasks=tasks, on_fault=self._on_fault)
        pool._own = None
        return pool

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of failures and of replaced groups so far."""
        return self._stream.counts

    @property
    def is_replaying(self) -> bool:
        """True while `collect` returns groups that were handed out before the run was killed."""
        return self._stream.is_replaying

    async def collect(self, num_groups: int | None = None) -> list[TrajectoryGroup]:
        """Return the next groups of the training stream; by default as many as a step takes.

        They are the oldest complete groups, as soon as there are enough and the others can be returned before any is too old
        (`max_staleness`); with `mode: sync`, when all are complete. Groups with too many failures, and with
        `dynamic_sampling` those whose episodes all earn the same, are replaced by later ones.

        Raises:
            EnvironmentFailure: when too many episodes in a row fail, or too many groups in a row are replaced, with the last
                error's message.
            EngineError: when too many episodes in a row fail because of the engine.
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
                self._fill_slots()  # to be played during the update
            else:
                await self.pause(before_sync=True)
        except BaseException as error:
            try:
                if not isinstance(error, EngineError):  # a failed engine has no partial actions
                    with suppress(EngineError, OSError):  # the deadline's TimeoutError is one
                        async with asyncio.timeout(_LAST_PAUSE_S):
                            await self.pause()
            finally:  # also when interrupted once more
                await self.stop()
            raise
        return groups

    async def resume(self) -> None:
        """Resume the engine and its deadlines."""
        await self._engine.resume()
        self._clock.start()
        self._is_paused = False

    async def freeze(self) -> None:
        """Stop the engine for a while: as `pause`, but actions under way stay in it if they keep their cache (`keep_cache`)."""
        if self._is_paused or not self._config.keep_cache:
            await self.pause()
            return
        assert isinstance(self._engine, FreezableEngine), "see `build_engine`"
        self._clock.stop()
        await self._engine.freeze()

    async def pause(self, *, before_sync: bool = False) -> None:
        """Pause the engine, and record the partial action of every live episode.

        With `before_sync`, until all weights are loaded: the engine may drop those that it has.
        """
        if self._is_paused:
            return
        self._clock.stop()
        if before_sync and isinstance(self._engine, SleepingEngine):
            await self._engine.sleep()
        else:
            await self._engine.pause()
        self._is_paused = True
        for _ in range(3):  # a completion passes from the request to the caller to the episode
            await asyncio.sleep(0)
        for live in [episode.live() for episode in self._live.values()]:
            if live.partials:
                self._stream.record_progress(live)
        self._stream.flush()

    async def stop(self) -> None:
        """Cancel all live episodes."""
        runners = list(self._runners)
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)

    async def play(self, tasks: Mapping[str, EnvTask], *, group_size: int) -> list[TrajectoryGroup]:
        """Play `group_size` episodes of each task, once each. Tasks are keyed by group id."""
        seed = self.tasks.seed
        queue = deque(
            one for name, task in tasks.items() for one in group_tasks(name, task, size=group_size, run_seed=seed)
        )
        done: dict[str, list[Trajectory]] = {group_id: [] for group_id in tasks}
        runners = [asyncio.create_task(self._run(queue, done)) for _ in range(min(len(queue), self._max_live))]
        try:
            await asyncio.gather(*runners)
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
        return [make_group(group_id, trajectories) for group_id, trajectories in done.items()]

    def recover(self, *, ignore: bool = False, settings: str = "") -> bool:
        """Replay the journal of a killed run on the loaded state; see `TaskStream.recover`."""
        return self._stream.recover(ignore=ignore, settings=settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training stream, with its live and finished episodes; start a new journal file."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; no episode may be live."""
        self._stream.load_state_dict(state)

    def drop_old_journal(self) -> None:
        """Delete journal files from before the last `state_dict`, once that is saved."""
        self._stream.drop_old_journal()

    def close(self) -> None:
        """Close the player and the journal."""
        if self._own is not None:
            self._own.close()
        self._stream.close()

    async def _complete(self) -> list[TrajectoryGroup]:
        """Play until there are groups to hand out, and return them."""
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
        """Sample one token, to see whether the engine works.

        Raises:
            EngineError: when it does not answer: then failed episodes were not at fault.
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
        """Start an episode in each free slot.

        All at once: in lockstep, the engine would not wait for one that came later.
        """
        while len(self._runners) < self._max_live:
            episode = self._stream.next(version=self._engine.version)
            if episode is None:
                return
            runner = asyncio.create_task(self._run_stream(episode))
            self._runners.add(runner)
            runner.add_done_callback(self._on_runner_done)

    async def _run_stream(self, episode: LiveEpisode | None) -> None:
        """Play episodes of the training stream one after the other."""
        while episode is not None:
            self._stream.record_end(await self._finish(episode, live=self._live))
            self._changed.set()
            episode = self._stream.next(version=self._engine.version)

    def _on_runner_done(self, runner: "asyncio.Task[None]") -> None:
        self._runners.discard(runner)
        error = None if runner.cancelled() else runner.exception()
        self._failure = self._failure or error  # keep the first
        self._changed.set()

    async def _run(self, queue: deque[Task], done: dict[str, list[Trajectory]]) -> None:
        """Play episodes of the queue one after the other."""
        while queue:
            trajectory = await self._finish(LiveEpisode(task=queue.popleft()))
            done[trajectory.group_id].append(trajectory)

    async def _finish(self, start: LiveEpisode, *, live: dict[str, Play] | None = None) -> Trajectory:
        """Play an episode to its end, retrying failures; list it in `live` meanwhile."""
        trajectory, reached = await self._play_one(start, live)
        for retry in range(self._config.max_retries):
            if not trajectory.stop_reason.is_fault:
                break  # a first prompt that is too long stays too long
            self._stream.counts["retries"] += 1
            if retry:
                with self._engine.conversation(f"{start.task.trajectory_id} waits"):  # in lockstep, all others wait too
                    await asyncio.sleep(retry_wait_s(retry - 1, first_s=_FIRST_WAIT_S))
            is_lost = trajectory.fault is not None and trajectory.fault.is_resumable
            if trajectory.stop_reason is StopReason.ENGINE_ERROR or is_lost:
                start = reached
            else:
                start = LiveEpisode(task=replace(start.task, attempt=start.task.attempt + 1))
            trajectory, reached = await self._play_one(start, live)
        name = "unscored" if trajectory.stop_reason is StopReason.UNSCORED else "failed"
        self._stream.counts[f"{name}_episodes"] += trajectory.failed
        self._break_off_after_failures(trajectory)
        return trajectory

    async def _play_one(self, start: LiveEpisode, live: dict[str, Play] | None) -> tuple[Trajectory, LiveEpisode]:
        """Play an episode; return it and its state at the end."""
        on_change = None if live is None else self._stream.record_progress
        listeners = Listeners(on_change=on_change, on_fault=self._note_fault, on_count=self._count)
        episode = self._player.new(start, context=self.context, listeners=listeners, fork=self._fork)
        if live is None:
            return await episode.play(), start
        live[start.task.trajectory_id] = episode
        try:
            return await episode.play(), episode.live()
        finally:
            del live[start.task.trajectory_id]

    def _note_fault(self, trajectory: Trajectory) -> None:
        self._count("faults")
        self._on_fault(trajectory)

    def _count(self, name: str) -> None:
        self._stream.counts[name] += 1

    def _break_off_after_failures(self, trajectory: Trajectory) -> None:
        """Raise if too many episodes in a row failed in spite of their retries.

        One without a score does not count, nor does a first prompt that is too long: all episodes of its group share it,
        and the group is replaced.
        """
        if trajectory.failed and not trajectory.stop_reason.is_fault:
            return
        self._failures_in_a_row = self._failures_in_a_row + 1 if trajectory.failed else 0
        if self._failures_in_a_row >= self._config.max_consecutive_failures:
            words = f"{self._failures_in_a_row} episodes failed in a row; the last one: {trajectory.error}"
            raise (EngineError if trajectory.stop_reason is StopReason.ENGINE_ERROR else EnvironmentFailure)(words)

    @asynccontextmanager
    async def _lag_measured(self) -> AsyncIterator[None]:
        """Measure the largest lag of the event loop within the context."""

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
