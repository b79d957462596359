"""One environment on one thread, with a deadline for each call."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from traceback import StackSummary
from typing import Any, Self, TypeVar

from agentrl.env import close_env
from agentrl.errors import EnvironmentFailure
from agentrl.rollout.env_calls import Env, MakeEnv
from agentrl.rollout.fault import RaisedError, stack_of
from agentrl.rollout.gate import Gate

R = TypeVar("R")

CLOSING_S = 10.0
"""How long to wait for environments to close, in seconds."""


class NoThreadError(EnvironmentFailure):
    """The system gives no other thread for an environment."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}: no other thread for an environment, beside {threading.active_count()} of this process; lower "
            "rollout.max_live_episodes, or raise the limit of threads (`ulimit -u`, or the container's)"
        )


class EnvThread:
    """Runs calls one at a time on a daemon thread, so that an environment that hangs cannot hold up the process.

    After a call that was cancelled the thread is lost, as `is_lost` says: that call may still run. After one that missed its
    deadline it `is_hanging` as well.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_lost = self.is_hanging = False
        self.env: Env | None = None
        """An environment that may play another episode: on this thread, because handles such as SQLite's are bound to it."""
        self.made_by: MakeEnv | None = None
        """What made it."""
        self._thread = threading.Thread(target=self._run, name="agentrl-env", daemon=True)
        """Started with the first call, when that is let in: the event loop waits until a thread runs."""

    @property
    def stack(self) -> StackSummary | None:
        """Where it stands. None: it has ended."""
        return stack_of(self._thread)

    @property
    def is_alive(self) -> bool:
        """True until it has ended, after `close` and the last call."""
        return self._thread.is_alive()

    async def call(self, function: Callable[[], R], *, timeout_s: float) -> R:
        """Run `function` on the thread, when its turn has come.

        Raises:
            TimeoutError: `timeout_s` seconds after it began.
            NoThreadError: when there is no thread for the first call.
            RaisedError: for whatever `function` raises, a call of `sys.exit` too.
        """
        loop = asyncio.get_running_loop()
        gate = Gate.of(loop)
        future: asyncio.Future[tuple[Any, RaisedError | None] | None] = loop.create_future()
        deadline: asyncio.TimerHandle | None = None

        def start() -> None:
            nonlocal deadline
            deadline = loop.call_later(
                timeout_s, settle, None
            )  # where the loop stood still, what came in time comes first
            self._calls.put(work)
            if self._thread.ident is None:
                try:
                    self._thread.start()
                except RuntimeError as error:
                    future.set_exception(NoThreadError(str(error)))

        def settle(outcome: tuple[Any, RaisedError | None] | None) -> None:
            gate.leave(future)
            gate.let_in_soon()
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # noqa: BLE001 - carried over to the episode, which makes it data
                error = RaisedError(raised)
            gate.leave(future)
            with suppress(RuntimeError):  # the loop is closed: the call came back after the run had ended
                loop.call_soon_threadsafe(settle, (result, error))

        gate.enter(future, start)
        try:
            outcome = await future
        except asyncio.CancelledError:
            self.is_lost = future.cancelled() and deadline is not None
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
        if outcome is None:
            self.is_lost = self.is_hanging = True
            raise TimeoutError
        result, error = outcome
        if error is not None:
            raise error
        returned: R = result
        return returned

    def call_unattended(self, function: Callable[[], object]) -> None:
        """Run `function` after what runs now, if that ever returns; no one waits for it or hears what it raises."""

        def work() -> None:
            with suppress(BaseException):
                function()

        self._calls.put(work)

    def take_env(self) -> Env | None:
        """Return the environment that may play another episode, which is no longer kept. None: there is none."""
        env, self.env = self.env, None
        return env

    def close(self) -> None:
        """Let the thread end after its last call, and close the environment that it keeps."""
        if (env := self.take_env()) is not None:
            self.call_unattended(partial(close_env, env))
        self._calls.put(None)

    def join(self, *, timeout_s: float) -> None:
        """Wait for its end."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        """Return the thread."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it, and wait a while for its end unless it hangs: a call that was cancelled closes what it made."""
        self.close()
        if not self.is_hanging:
            self.join(timeout_s=CLOSING_S)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
