"""One episode in an environment: make it, reset it or restore it, play to the end, close it.

`Branches` forks further rollouts from an episode's turns, to estimate what each turn was worth. `EnvPlayer` plays many
episodes, each on a thread of its own.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from agentrl.chat import Dialogue
from agentrl.engine import Sampler
from agentrl.env import base_env, close_env
from agentrl.errors import EngineError, EnvError, EnvironmentFailure
from agentrl.rollout.conversation import Conversation, End, LiveEpisode, Task
from agentrl.rollout.env_driver import (
    CLOSING_S,
    Env,
    EnvDriver,
    EnvReply,
    EnvThread,
    MakeEnv,
    check_restored,
    copy_env,
    reset,
    restore,
)
from agentrl.rollout.player import Listeners
from agentrl.rollout.sample_action import EpisodeContext
from agentrl.rollout.tasks import derive_seed
from agentrl.types import StopReason, Trajectory

_MAX_LOST = 4
"""Hanging environment threads per live episode beyond which a run stops."""


class Branches:
    """Forks of one episode: copies of its environment, each with its dialogue at that time."""

    def __init__(self, driver: EnvDriver, *, on_fault: Callable[[Trajectory], object]) -> None:
        """Create no forks yet.

        Args:
            driver: drives the episode.
            on_fault: called with each rollout whose environment fails.
        """
        self._driver = driver
        self._on_fault = on_fault
        self._forks: dict[int, tuple[Env, Dialogue]] = {}
        """Keyed by the number of the turn that follows."""

    async def fork(self, env: Env) -> None:
        """Copy the environment before an action, if a fork is due there."""
        conversation = self._driver.conversation
        number = len(conversation.turns)
        if conversation.dialogue is not None and number % conversation.context.config.branches.every == 0:
            copied = await self._driver.create("fork()", partial(copy_env, env))
            self._forks[number] = copied, conversation.dialogue

    async def play(self, trajectory: Trajectory) -> Trajectory:
        """Play one rollout per turn, then a second, and so on within the budget; record the rewards of their turns."""
        config = self._driver.conversation.context.config.branches
        forks = {number: fork for number, fork in self._forks.items() if number < len(trajectory.turns)}
        found: dict[int, list[tuple[float, ...]]] = {number: [] for number in range(len(trajectory.turns))}
        counts = {"branches": 0.0, "branch_tokens": 0.0, "failed_branches": 0.0}
        for count, (number, (env, dialogue)) in product(range(config.num), forks.items()):
            if counts["branch_tokens"] >= config.budget_tokens or self._driver.thread.is_lost:
                break
            branch = await self._play_one(env, dialogue, number, count)
            played = branch.turns[number:]
            counts["branches"] += 1
            counts["branch_tokens"] += sum(len(turn.action_ids) for turn in played)
            counts["failed_branches"] += branch.failed
            if not branch.failed:
                found[number].append(tuple(turn.reward for turn in played))
        turns = tuple(replace(turn, branch_rewards=tuple(found[k])) for k, turn in enumerate(trajectory.turns))
        return replace(trajectory, turns=turns, metrics={**trajectory.metrics, **counts})

    def close(self) -> None:
        """Close the copies, without waiting for it."""
        for env, _ in self._forks.values():
            self._driver.thread.call_unattended(partial(close_env, env))

    async def _play_one(self, env: Env, dialogue: Dialogue, number: int, count: int) -> Trajectory:
        """Play one rollout from before a turn, with seeds of its own."""
        conversation = self._driver.conversation
        name = f"{conversation.name}/{number}/{count}"
        seed = derive_seed(conversation.task.sampling_seed, "branch", name)
        branch = conversation.branch(number, dialogue, task=replace(conversation.task, sampling_seed=seed), name=name)
        driver = EnvDriver(branch, self._driver.thread, name=self._driver.name)
        with conversation.context.engine.conversation(name):
            try:
                copied = await driver.create("fork()", partial(copy_env, env, seed=seed))
                async with driver.closing(copied):
                    await driver.play(copied)
            except EnvError as error:
                driver.fail(error)
            except EngineError as error:
                branch.fail(End(reason=StopReason.ENGINE_ERROR, error=str(error)))
        trajectory = driver.trajectory()
        if trajectory.stop_reason is StopReason.ENV_ERROR:
            self._on_fault(trajectory)
        return trajectory


class Episode:
    """An episode in an environment."""

    def __init__(
        self,
        task: Task,
        *,
        context: EpisodeContext[Sampler],
        thread: EnvThread,
        fork: bool = False,
        recorded: LiveEpisode | None = None,
        on_change: Callable[[LiveEpisode], object] | None = None,
        on_fault: Callable[[Trajectory], object] = lambda _: None,
    ) -> None:
        """Create an episode that has not started.

        Args:
            task: fixes the episode.
            context: parts that all episodes share.
            thread: runs the environment's calls.
            fork: fork rollouts from its turns according to `config.branches`, and record their rewards with the turns.
            recorded: the same episode, interrupted (see `Conversation`).
            on_change: called with the state after each turn (see `Conversation`).
            on_fault: called with this episode, and with each rollout forked from it, if its environment fails.
        """
        self._task = task
        self._recorded = recorded or LiveEpisode(task=task)
        self._on_fault = on_fault
        self._thread = thread
        self._forks = fork
        self._conversation = Conversation(context, task, recorded=recorded, on_change=on_change)

    def live(self) -> LiveEpisode:
        """Return the state of the episode."""
        return self._conversation.live()

    async def play(self, make_env: MakeEnv, *, reuses: bool = False) -> Trajectory:
        """Play to the end. A failure of the environment or the engine is returned as data.

        A first prompt that fills the context gives a trajectory without turns.

        Args:
            make_env: makes the environment.
            reuses: play in the environment that the thread keeps, if any, and let it keep this one if the episode does not
                fail. A retried episode gets a fresh one, and so does one with forks, which may share resources.
        """
        reuses = reuses and not self._forks
        conversation = self._conversation
        driver, branches = EnvDriver(conversation, self._thread), None
        try:
            # No await between two conversations: in lockstep, the engine does not wait for an episode that has none open.
            with conversation.context.engine.conversation(conversation.name):
                env, driver = await driver.make(make_env, reuses=reuses and self._task.attempt == 0)
                branches = Branches(driver, on_fault=self._on_fault) if self._forks else None
                await self._play(driver, env, branches, keeps=reuses)
            trajectory = driver.trajectory()
            if branches is not None:
                trajectory = await branches.play(trajectory)
        except EnvError as error:
            trajectory = driver.fail(error)
        except EngineError as error:
            conversation.fail(End(reason=StopReason.ENGINE_ERROR, error=str(error)))
            return driver.trajectory()
        finally:
            if branches is not None:
                branches.close()
        if trajectory.failed and trajectory.stop_reason is not StopReason.UNSCORED:
            self._on_fault(trajectory)
        return trajectory

    async def _play(self, driver: EnvDriver, env: Env, branches: Branches | None, *, keeps: bool) -> None:
        async with AsyncExitStack() as stack:
            # Forks need every reply. And unpickling runs code, so the environment has to allow it, not a file.
            if self._recorded.snapshot is not None and branches is None and await driver.can_snapshot(env):
                async with driver.closing(env):
                    env = await driver.create("its snapshot", partial(restore, self._recorded.snapshot))
                    await stack.enter_async_context(driver.closing(env))
                await self._resume(driver, env)
            else:
                await stack.enter_async_context(driver.closing(env, keeps=keeps))
                await self._reset(driver, env)
            await driver.play(env, before_action=None if branches is None else partial(branches.fork, env))

    async def _reset(self, driver: EnvDriver, env: Env) -> None:
        """Start with the environment's first messages."""
        task, conversation = self._task, self._conversation

        def begin() -> tuple[EnvReply, Dialogue | End]:
            reply = reset(env, base_env(env), task.env_task, rollout_index=task.rollout_index)
            return reply, driver.render_or_fail(partial(conversation.first_dialogue, reply.messages, reply.tools))

        reply, opening = await driver.call("reset()", begin)
        driver.record_reset(reply)
        conversation.begin(opening, state_key=reply.state_key)

    async def _resume(self, driver: EnvDriver, env: Env) -> None:
        """Continue with an environment that was restored from its snapshot."""
        recorded, conversation = self._recorded, self._conversation
        *_, last = recorded.turns
        known = EnvReply(messages=recorded.observation or (), state_key=last.next_state_key, info=dict(last.extras))

        def resume() -> tuple[EnvReply, Dialogue | End]:
            reply = check_restored(base_env(env), known)
            return reply, driver.render_or_fail(partial(conversation.restored_dialogue, reply.tools))

        reply, dialogue = await driver.call("its snapshot", resume)
        driver.record_reset(reply)
        conversation.resume(dialogue)


class EnvPlayer:
    """Plays episodes in environments, each on a thread of its own, and keeps idle threads."""

    def __init__(self, make: MakeEnv, *, stages: Sequence[MakeEnv] = ()) -> None:
        """Make no environment yet.

        Args:
            make: makes the environment of one episode.
            stages: make it with each entry of `env.schedule`, in their order.
        """
        self.make = make
        self.stages = stages
        self.is_reused = False
        """Environments play several episodes: set if `reset` is proven to forget earlier ones."""
        self._idle: list[EnvThread] = []
        self._lost: list[EnvThread] = []

    def new(
        self, start: LiveEpisode, *, context: EpisodeContext[Sampler], listeners: Listeners, fork: bool = False
    ) -> "EnvPlay":
        """Return an episode, on a thread that no other one has; see `Player.new`."""
        thread = self._idle.pop() if self._idle else EnvThread()
        episode = Episode(
            start.task,
            context=context,
            thread=thread,
            fork=fork,
            recorded=start,
            on_change=listeners.on_change,
            on_fault=listeners.on_fault,
        )
        return EnvPlay(player=self, episode=episode, thread=thread, start=start, context=context, listeners=listeners)

    def make_for(self, stage: int) -> MakeEnv:
        """Return the factory for an entry of the schedule, from 1. 0: no entry."""
        return self.stages[stage - 1] if stage else self.make

    def keep(self, thread: EnvThread) -> None:
        """Keep an idle thread, with its environment."""
        self._idle.append(thread)

    def abandon(self, thread: EnvThread) -> int:
        """Let a lost thread end when its call returns, if ever; return the number of lost threads that still run."""
        thread.close()
        self._lost = [lost for lost in [*self._lost, thread] if lost.is_alive]
        return len(self._lost)

    def close(self) -> None:
        """Close the idle environments and those of cancelled calls, and wait for their threads."""
        idle, self._idle = self._idle, []
        for thread in idle:
            thread.close()
        deadline = time.monotonic() + CLOSING_S
        for thread in [*idle, *(lost for lost in self._lost if not lost.is_hanging)]:
            thread.join(timeout_s=max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPlay:
    """An episode of an `EnvPlayer`, and the thread that it holds."""

    player: EnvPlayer
    episode: Episode
    thread: EnvThread
    start: LiveEpisode
    context: EpisodeContext[Sampler]
    listeners: Listeners

    async def play(self) -> Trajectory:
        """Play to the end, and give the thread back; see `Play.play`."""
        try:
            return await self.episode.play(self.player.make_for(self.start.task.stage), reuses=self.player.is_reused)
        finally:
            if self.thread.is_lost:
                self._abandon()
            else:
                self.player.keep(self.thread)

    def live(self) -> LiveEpisode:
        """Return the state of the episode."""
        return self.episode.live()

    def _abandon(self) -> None:
        """Abandon a thread that hangs in an environment.

        Raises:
            EnvironmentFailure: when too many hang.
        """
        self.listeners.on_count("lost_threads")
        config = self.context.config
        if (num_lost := self.player.abandon(self.thread)) > _MAX_LOST * config.live_episodes(config.num_groups):
            raise EnvironmentFailure(
                f"{num_lost} threads hang in calls of environments that missed rollout.env_timeout_s: "
                f"{config.env_timeout_s:g} s and never came back. Give what may hang a deadline of its own, or a "
                "subprocess"
            )
