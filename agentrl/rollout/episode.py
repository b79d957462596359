"""One episode in an environment: make it, reset it or restore it, play to the end, close it."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from agentrl.chat import Dialogue
from agentrl.engine import Sampler
from agentrl.env import base_env
from agentrl.errors import EngineError, EnvError
from agentrl.rollout.branches import Branches
from agentrl.rollout.context import EpisodeContext
from agentrl.rollout.conversation import Conversation, End
from agentrl.rollout.env_calls import Env, EnvReply, MakeEnv, check_restored, reset, restore
from agentrl.rollout.env_driver import EnvDriver
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.live_episode import LiveEpisode, Task
from agentrl.types import StopReason, Trajectory


class Episode:
    """An episode in an environment; grows by one turn at a time."""

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
        """Begin before the first turn.

        Args:
            task: what fixes the episode.
            context: what all episodes are played with.
            thread: of the environment.
            fork: fork rollouts from its turns as `config.branches` says, and record their rewards with the turns.
            recorded: the same episode, interrupted (see `Conversation`).
            on_change: told where the episode stands after each turn (see `Conversation`).
            on_fault: told of this episode, and of each rollout that is forked from it, if its environment fails.
        """
        self._task, self._recorded, self._on_fault = task, recorded or LiveEpisode(task=task), on_fault
        self._thread, self._forks = thread, fork
        self._conversation = Conversation(context, task, recorded=recorded, on_change=on_change)

    def live(self) -> LiveEpisode:
        """Return where the episode stands."""
        return self._conversation.live()

    async def play(self, make_env: MakeEnv, *, reuses: bool = False) -> Trajectory:
        """Play to the end; a failure of the environment or the engine is returned as data.

        So is a first prompt that fills the context: a trajectory without turns.

        Args:
            make_env: makes the environment.
            reuses: play in the environment that the thread keeps, if any, and let it keep this one where the episode ends well.
                An episode that is tried again has a fresh one; so has one with forks, which may share what they close.
        """
        reuses = reuses and not self._forks
        talk = self._conversation
        driver, branches = EnvDriver(talk, self._thread), None
        try:
            # No await between two conversations: in lockstep, the engine continues without an episode that has none.
            with talk.context.engine.conversation(talk.name):
                env, driver = await driver.make(make_env, reuses=reuses and self._task.attempt == 0)
                branches = Branches(driver, on_fault=self._on_fault) if self._forks else None
                await self._play(driver, env, branches, keeps=reuses)
            trajectory = driver.trajectory()
            if branches is not None:
                trajectory = await branches.play(trajectory)
        except EnvError as error:
            trajectory = driver.failed(error)
        except EngineError as error:
            talk.fail(End(reason=StopReason.ENGINE_ERROR, error=str(error)))
            return driver.trajectory()
        finally:
            if branches is not None:
                branches.close()
        if trajectory.failed:
            self._on_fault(trajectory)
        return trajectory

    async def _play(self, driver: EnvDriver, env: Env, branches: Branches | None, *, keeps: bool) -> None:
        async with AsyncExitStack() as stack:
            # Forks are made of every reply. And unpickling runs code, which a file cannot ask for: only an environment can.
            if self._recorded.snapshot is not None and branches is None and await driver.can_snapshot(env):
                async with driver.closing(env):
                    env = await driver.new("its snapshot", partial(restore, self._recorded.snapshot))
                    await stack.enter_async_context(driver.closing(env))
                await self._resume(driver, env)
            else:
                await stack.enter_async_context(driver.closing(env, keeps=keeps))
                await self._reset(driver, env)
            await driver.play(env, before_action=None if branches is None else partial(branches.fork, env))

    async def _reset(self, driver: EnvDriver, env: Env) -> None:
        """Begin with the environment's first words."""
        task, talk = self._task, self._conversation

        def begin() -> tuple[EnvReply, Dialogue | End]:
            reply = reset(env, base_env(env), task.env_task, rollout_index=task.rollout_index)
            return reply, driver.rendered(partial(talk.opening, reply.messages, reply.tools))

        reply, opening = await driver.call("reset()", begin)
        driver.hear(reply)
        talk.begin(opening, state_key=reply.state_key)

    async def _resume(self, driver: EnvDriver, env: Env) -> None:
        """Continue with an environment that was restored: what was said before is known."""
        recorded, talk = self._recorded, self._conversation
        *_, last = recorded.turns
        known = EnvReply(messages=recorded.observation or (), state_key=last.next_state_key, info=dict(last.extras))

        def resume() -> tuple[EnvReply, Dialogue | End]:
            reply = check_restored(base_env(env), known)
            return reply, driver.rendered(partial(talk.restored, reply.tools))

        reply, dialogue = await driver.call("its snapshot", resume)
        driver.hear(reply)
        talk.resume(dialogue)
