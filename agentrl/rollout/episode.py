"""One episode in an environment: make it, reset it or restore it, play to the end, close it."""

from collections.abc import Callable
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
        self._conversation = Conversation(context, task, recorded=recorded, on_change=on_change)
        self._driver = EnvDriver(self._conversation, thread)
        self._branches = Branches(self._driver, on_fault=on_fault) if fork else None

    def live(self) -> LiveEpisode:
        """Return where the episode stands."""
        return self._conversation.live()

    async def play(self, make_env: MakeEnv) -> Trajectory:
        """Play to the end; a failure of the environment or the engine is returned as data.

        So is a first prompt that fills the context: a trajectory without turns.
        """
        try:
            trajectory = await self._with_branches(make_env)
        except EnvError as error:
            trajectory = self._driver.failed(error)
        except EngineError as error:
            self._conversation.fail(End(reason=StopReason.ENGINE_ERROR, error=str(error)))
            return self._driver.trajectory()
        if trajectory.failed:
            self._on_fault(trajectory)
        return trajectory

    async def _with_branches(self, make_env: MakeEnv) -> Trajectory:
        try:
            # No await between two conversations: in lockstep, the engine continues without an episode that has none.
            with self._conversation.context.engine.conversation(self._conversation.name):
                await self._play(make_env)
            trajectory = self._driver.trajectory()
            return trajectory if self._branches is None else await self._branches.play(trajectory)
        finally:
            if self._branches is not None:
                self._branches.close()

    async def _play(self, make_env: MakeEnv) -> None:
        driver = self._driver
        env = await driver.make(make_env)
        begin = self._reset
        # Forks are made of every reply. And unpickling runs code, which a file cannot ask for: only an environment can.
        if self._recorded.snapshot is not None and self._branches is None and base_env(env).can_snapshot:
            async with driver.closing(env):
                env = await driver.call("its snapshot", partial(restore, self._recorded.snapshot))
            begin = self._resume
        async with driver.closing(env):
            await begin(env)
            await driver.play(env, before_action=None if self._branches is None else partial(self._branches.fork, env))

    async def _reset(self, env: Env) -> None:
        """Begin with the environment's first words."""
        base, task, talk = base_env(env), self._task, self._conversation

        def begin() -> tuple[EnvReply, Dialogue | End]:
            reply = reset(env, base, seed=task.seed, rollout_index=task.rollout_index)
            return reply, self._driver.rendered(partial(talk.opening, reply.messages, reply.tools))

        reply, opening = await self._driver.call("reset()", begin)
        self._driver.hear(reply)
        talk.begin(opening, state_key=reply.state_key)

    async def _resume(self, env: Env) -> None:
        """Continue with an environment that was restored: what was said before is known."""
        recorded, talk = self._recorded, self._conversation
        *_, last = recorded.turns
        known = EnvReply(messages=recorded.observation or (), state_key=last.next_state_key, info=dict(last.extras))

        def resume() -> tuple[EnvReply, Dialogue | End]:
            reply = check_restored(base_env(env), known)
            return reply, self._driver.rendered(partial(talk.restored, reply.tools))

        reply, dialogue = await self._driver.call("its snapshot", resume)
        self._driver.hear(reply)
        talk.resume(dialogue)
