"""An environment on the other side of a conversation."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from agentrl.chat import Dialogue
from agentrl.env import base_env, close_env
from agentrl.errors import AgentRLError, EnvError
from agentrl.plain_data import is_number, line_of
from agentrl.rollout.conversation import Conversation, End, Outcome
from agentrl.rollout.env_calls import Env, EnvReply, MakeEnv, construct, env_id, step
from agentrl.rollout.env_thread import EnvThread
from agentrl.rollout.fault import RaisedError, fault_of
from agentrl.rollout.replay import ReplayError
from agentrl.types import Message, StopReason, Trajectory


class EnvDriver:
    """Drives a conversation by an environment, all of whose calls are made on one thread, with a deadline each."""

    def __init__(self, conversation: Conversation, thread: EnvThread, *, name: str = "", env_s: float = 0.0) -> None:
        """Take the parts.

        Args:
            conversation: what is driven.
            thread: of the environment.
            name: of the environment. Empty: there is none yet.
            env_s: seconds that its construction took.
        """
        self.conversation, self.thread, self.name = conversation, thread, name
        self.gold_answer: str | None = None
        self.info: dict[str, Any] = {}
        """What the environment reported last."""
        self._env_s = env_s

    def hear(self, reply: EnvReply) -> None:
        """Keep what the environment said of the task as it began or was restored."""
        self.gold_answer, self.info = reply.gold_answer, reply.info

    async def make(self, make_env: MakeEnv, *, reuses: bool = False) -> tuple[Env, "EnvDriver"]:
        """Make the environment, or take an equal one that the thread keeps; return it, and the driver that knows its name."""
        if (kept := self.thread.take_env()) is not None:
            if reuses and self.thread.made_by is make_env:
                return kept, EnvDriver(self.conversation, self.thread, name=env_id(kept))
            await self._close(kept)

        names: list[str] = []

        def construct_named() -> Env:
            env = construct(make_env)
            try:
                names.append(env_id(env))
            except BaseException:
                close_env(env)
                raise
            return env

        env = await self.new("construction", construct_named)
        self.thread.made_by = make_env
        return env, EnvDriver(self.conversation, self.thread, name=names[0], env_s=self._env_s)

    async def play(self, env: Env, *, before_action: Callable[[], Awaitable[None]] | None = None) -> None:
        """Carry out one action after the other, to the end.

        Args:
            env: what they are carried out in.
            before_action: awaited before each of them.

        Raises:
            EnvError: when the environment fails.
            EngineError: when the engine does.
        """
        talk = self.conversation
        try:
            while talk.end is None:
                if before_action is not None:
                    await before_action()
                if (message := await talk.act()) is None:
                    return
                # Rendered on the environment's thread, beside the event loop, where other episodes continue.
                reply, following = await self.call("step()", partial(self._step, env, message))
                self.info = reply.info
                outcome = Outcome(
                    reward=reply.reward,
                    state_key=reply.state_key,
                    action_key=reply.action_key,
                    extras=reply.info,
                    snapshot=reply.snapshot,
                )
                talk.reply(following, outcome)
        except ReplayError as error:
            advice = "make it depend on its seed and the actions alone, or set can_snapshot"
            raise EnvError(f"environment {self.name}: {error}; {advice}") from error

    def _step(self, env: Env, message: Message) -> tuple[EnvReply, Dialogue | End]:
        reply = step(env, base_env(env), message)
        if reply.terminated or reply.truncated:
            return reply, End(reason=StopReason.TERMINATED, truncated=not reply.terminated)
        return reply, self.rendered(partial(self.conversation.after, reply.messages))

    def rendered(self, render: Callable[[], Dialogue | End]) -> Dialogue | End:
        """Render what the environment said; what a chat template cannot make of it is the environment's fault."""
        try:
            return render()
        except Exception as error:  # noqa: BLE001 - of a stranger's template or environment: it becomes data
            words = error if isinstance(error, AgentRLError) else line_of(error)
            failure = EnvError(f"environment {self.name}: its messages cannot be rendered: {words}")
            return End(reason=StopReason.ENV_ERROR, error=str(failure), fault=fault_of(error))

    async def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Call into the environment; whatever goes wrong there is an EnvError with its words."""
        timeout_s, begin = self.conversation.context.config.env_timeout_s, time.perf_counter()
        where = f"environment {self.name}: {what}" if self.name else f"environment: {what}"
        try:
            return await self.thread.call(function, timeout_s=timeout_s)
        except TimeoutError as error:
            raise EnvError(f"{where} did not return within rollout.env_timeout_s: {timeout_s:g} s") from error
        except RaisedError as error:
            words = str(error.raised) if isinstance(error.raised, EnvError) else f"{where} raised {error.line}"
            raise EnvError(words) from error
        finally:
            self._env_s += time.perf_counter() - begin

    async def can_snapshot(self, env: Env) -> bool:
        """Tell whether the environment may be restored from a moment's snapshot; one that cannot say so is closed."""
        try:
            return bool(await self.call("can_snapshot", lambda: base_env(env).can_snapshot))
        except BaseException:
            async with self.closing(env):
                raise

    async def new(self, what: str, make: Callable[[], Env]) -> Env:
        """Call what makes an environment, which is closed where no one waits for it any more."""
        made: list[Env] = []

        def keep() -> None:
            made.append(make())

        def close_made() -> None:
            for env in made:
                close_env(env)

        try:
            await self.call(what, keep)
        except BaseException:
            self.thread.call_unattended(close_made)
            raise
        return made.pop()

    @asynccontextmanager
    async def closing(self, env: Env, *, keeps: bool = False) -> AsyncIterator[None]:
        """Close the environment at the end, whatever that is; `keeps`: let the thread keep it where the episode ended well."""
        try:
            yield
        except BaseException:
            if self.thread.is_lost:  # hanging, or cancelled within a call
                self.thread.call_unattended(partial(close_env, env))
            else:
                with suppress(EnvError):  # what went wrong first says more
                    await self._close(env)
            raise
        end = self.conversation.end
        if keeps and end is not None and not end.reason.failed:
            self.thread.env = env
        else:
            await self._close(env)

    async def _close(self, env: Env) -> None:
        try:
            await self.call("close()", partial(close_env, env))
        except asyncio.CancelledError:
            if not self.thread.is_lost:  # its turn had not come, and nobody waits for it any more
                self.thread.call_unattended(partial(close_env, env))
            raise

    def failed(self, error: EnvError) -> Trajectory:
        """Return what was played, with the action at which the environment failed."""
        cause, hanging = error.__cause__, self.thread.stack if self.thread.is_lost else None
        fault = cause.fault if isinstance(cause, RaisedError) else fault_of(cause or error, hanging=hanging)
        self.conversation.fail(End(reason=StopReason.ENV_ERROR, error=str(error), fault=fault))
        return self.trajectory()

    def trajectory(self) -> Trajectory:
        """Return the episode, which has ended."""
        metrics = {key: float(value) for key, value in self.info.items() if is_number(value)} | {"env_s": self._env_s}
        return self.conversation.trajectory(env_id=self.name, metrics=metrics, gold_answer=self.gold_answer)
