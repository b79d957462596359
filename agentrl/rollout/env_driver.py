"""The environment's side of a conversation.

From the inside out: `reset`, `step` and `restore` call into an environment and return an `EnvReply` or raise an EnvError;
`EnvThread` runs such calls on one thread with a deadline each, admitted by a `Gate`; `EnvDriver` plays a conversation with
them.
"""

import asyncio
import base64
import copy
import pickle
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from traceback import StackSummary
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import gymnasium as gym

from agentrl.chat import Dialogue
from agentrl.data.plain import PlainDataError, abbreviated, is_number, line_of, printable
from agentrl.env import MessageEnv, base_env, close_env, tool_schemas
from agentrl.env.message_env import key_return, reset_return, step_return
from agentrl.errors import AgentRLError, EnvError, EnvironmentFailure
from agentrl.rollout.conversation import Conversation, End, Outcome, ReplayError
from agentrl.rollout.faults import RaisedError, describe_error, describe_fault, thread_stack
from agentrl.rollout.tasks import EnvTask
from agentrl.types import Message, StopReason, Trajectory

_MAX_RUNNING = 32
"""Largest number of calls that run at once: hundreds of threads would only contend for Python's lock."""
_QUICK_S = 0.01
"""Time after which a running call no longer counts: it waits for something other than the lock."""

Call: TypeAlias = asyncio.Future[Any]


class Gate:
    """Limits how many calls into the environments of one event loop run at once."""

    def __init__(self) -> None:
        self._is_due = self._is_timed = False
        self._waiting: deque[tuple[Call, Callable[[], None]]] = deque()
        self._running: dict[Call, float] = {}
        """Start time of each call that counts."""

    @classmethod
    def for_loop(cls, loop: asyncio.AbstractEventLoop) -> "Gate":
        """Return the gate of a loop. Only `leave` may be called from other threads."""
        if (gate := _gates.get(loop)) is None:
            gate = _gates[loop] = cls()
        return gate

    def enter(self, call: Call, start: Callable[[], None]) -> None:
        """Start a call when there is room, unless it is cancelled before."""
        self._waiting.append((call, start))
        self.let_in_soon()

    def leave(self, call: Call) -> None:
        """Make room for another call; on any thread."""
        self._running.pop(call, None)

    def let_in_soon(self) -> None:
        """Start waiting calls at the end of this round of the loop."""
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._let_in)

    def _let_in(self) -> None:
        self._is_due = False
        loop = asyncio.get_running_loop()
        # The number is fixed here: calls that end before the last one is started make room for the next round.
        for _ in range(min(len(self._waiting), _MAX_RUNNING - len(self._running))):
            call, start = self._waiting.popleft()
            if not call.done():
                self._running[call] = loop.time()
                start()
        if self._waiting and not self._is_timed:
            self._is_timed = True
            loop.call_later(_QUICK_S, self._pass_by)

    def _pass_by(self) -> None:
        """Stop counting calls that have run for long."""
        self._is_timed = False
        began_before = asyncio.get_running_loop().time() - _QUICK_S
        for call, began in list(self._running.items()):
            if began < began_before:
                self.leave(call)
        self.let_in_soon()


_gates: "WeakKeyDictionary[asyncio.AbstractEventLoop, Gate]" = WeakKeyDictionary()


Env = gym.Env[tuple[Message, ...], str | Message]
MakeEnv = Callable[[], Env]


class EnvReply(NamedTuple):
    """Return values of a reset or step, as plain data."""

    messages: tuple[Message, ...]
    state_key: str | None
    gold_answer: str | None = None
    action_key: str | None = None
    reward: float | None = 0.0
    """None: the episode is over, and nothing could score it."""
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}  # noqa: RUF012 - never written to
    snapshot: str | None = None
    """The environment itself, pickled, in base64, if it `can_snapshot`."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of its tools; set once, when the episode begins or resumes."""


def copy_env(env: Env, *, seed: int | None = None) -> Env:
    """Copy an environment with its wrappers, by its own `fork()`. With a seed, reseed the copy."""
    base = base_env(env)
    forked: object = base.fork()
    if not isinstance(forked, MessageEnv):
        raise EnvError(f"fork() of {type(base).__name__} must return a copy, got {abbreviated(forked)}")
    if seed is not None:
        forked.reseed(seed)
    return copy.deepcopy(env, {id(base): forked})


def construct(make_env: MakeEnv) -> Env:
    """Make the environment; an error of its constructor is an EnvError like any other.

    `agentrl.env.make_env` blames the recipe, which is right when a run begins. In an episode, the same recipe has made
    environments before.
    """
    try:
        return make_env()
    except AgentRLError as error:
        cause = error.__cause__ or error
        raise EnvError(f"environment: construction raised {describe_error(cause)}") from cause


def env_id(env: Env) -> str:
    """Return the name of an environment in its trajectories."""
    return printable(env.spec.id if env.spec else type(base_env(env)).__name__)


def reset_options(task: EnvTask, *, rollout_index: int) -> dict[str, Any]:
    """Return the options of `reset`."""
    return {"rollout_index": rollout_index, "split": task.split, "task_index": task.index}


def reset(env: Env, base: MessageEnv, task: EnvTask, *, rollout_index: int) -> EnvReply:
    """Reset the environment to a task."""
    return begin(env, base, seed=task.seed, options=reset_options(task, rollout_index=rollout_index))


def begin(env: Env, base: MessageEnv, *, seed: int | None, options: dict[str, Any] | None) -> EnvReply:
    """Reset the environment by Gymnasium's arguments."""
    base.take_logged()  # drop what an earlier episode logged
    result = env.reset(seed=seed, options=options)
    returned = reset_return(result, method=f"reset() of {type(base).__name__}")
    return EnvReply(
        messages=returned.messages,
        state_key=_key(base.state_key(), base, "state_key()"),
        gold_answer=_key(base.gold_answer(), base, "gold_answer()"),
        tools=_tools(base),
    )


def restore(snapshot: str) -> Env:
    """Return the environment of a snapshot.

    Raises:
        EnvError: if unpickling gives something else.
    """
    env: object = pickle.loads(base64.b64decode(snapshot))
    if not isinstance(env, gym.Env):
        raise EnvError(f"its snapshot is restored as {abbreviated(env)}; let pickling keep the environment")
    return cast("Env", env)


def check_restored(base: MessageEnv, recorded: EnvReply) -> EnvReply:
    """Return the reply of a restored environment; raise EnvError if its state is not the recorded one."""
    state_key = _key(base.state_key(), base, "state_key()")
    if state_key != recorded.state_key:
        raise EnvError(
            f"environment {type(base).__name__}: its snapshot has the state_key {abbreviated(state_key)}, and was recorded "
            f"with {abbreviated(recorded.state_key)}; let pickling keep all of its state"
        )
    return recorded._replace(gold_answer=_key(base.gold_answer(), base, "gold_answer()"), tools=_tools(base))


def step(env: Env, base: MessageEnv, action: Message) -> EnvReply:
    """Execute a copy of an action."""
    action = copy.deepcopy(action)
    action_key = _key(base.action_key(action), base, "action_key()")
    returned = step_return(env.step(action), method=f"step() of {type(base).__name__}")
    if logged := base.take_logged():  # `ToolEnv.step` may have reported some already
        reported = returned.info.get("logged")
        before = reported if isinstance(reported, dict) else {}
        returned.info["logged"] = before | {name: before.get(name, 0.0) + number for name, number in logged.items()}
    return EnvReply(
        messages=returned.messages,
        reward=returned.reward,
        terminated=returned.terminated,
        truncated=returned.truncated,
        info=returned.info,
        state_key=_key(base.state_key(), base, "state_key()"),
        action_key=action_key,
        snapshot=base64.b64encode(pickle.dumps(env)).decode() if base.can_snapshot else None,
    )


def _key(key: object, base: MessageEnv, method: str) -> str | None:
    return key_return(key, method=f"{method} of {type(base).__name__}")


def _tools(base: MessageEnv) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(tool_schemas(base.tools))
    except PlainDataError as error:
        raise EnvError(f"environment {type(base).__name__}: {error}") from error


R = TypeVar("R")

CLOSING_S = 10.0
"""Time to wait for environments to close, in seconds."""


class NoThreadError(EnvironmentFailure):
    """The system refuses another thread for an environment."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}: no other thread for an environment, beside {threading.active_count()} of this process; lower "
            "rollout.max_live_episodes, or raise the limit of threads (`ulimit -u`, or the container's)"
        )


class EnvThread:
    """Runs calls one at a time on a daemon thread, so that a hanging environment cannot block the process.

    After a cancelled call, which may still run, the thread `is_lost`. After a missed deadline it `is_hanging` as well.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_lost = self.is_hanging = False
        self.env: Env | None = None
        """Environment that may play another episode, on this thread: handles such as SQLite's are bound to it."""
        self.made_by: MakeEnv | None = None
        """Factory of that environment."""
        self._thread = threading.Thread(target=self._run, name="agentrl-env", daemon=True)
        """Started with the first call: starting a thread blocks the event loop until it runs."""

    @property
    def stack(self) -> StackSummary | None:
        """Current stack of the thread. None: it has ended."""
        return thread_stack(self._thread)

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended, after `close` and its last call."""
        return self._thread.is_alive()

    async def call(self, function: Callable[[], R], *, timeout_s: float) -> R:
        """Run `function` on the thread and return its result.

        Raises:
            TimeoutError: `timeout_s` seconds after it began.
            NoThreadError: when there is no thread for the first call.
            RaisedError: for anything that `function` raises, including SystemExit.
        """
        loop = asyncio.get_running_loop()
        gate = Gate.for_loop(loop)
        future: asyncio.Future[tuple[Any, RaisedError | None] | None] = loop.create_future()
        deadline: asyncio.TimerHandle | None = None

        def start() -> None:
            nonlocal deadline
            # If the loop was blocked, results that came in time are settled first.
            deadline = loop.call_later(timeout_s, settle, None)
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

    async def call_env(self, name: str, what: str, function: Callable[[], R], *, timeout_s: float) -> R:
        """Call `what` of the environment `name`; raise anything that goes wrong there as an EnvError with its message."""
        where = f"environment {name}: {what}" if name else f"environment: {what}"
        try:
            return await self.call(function, timeout_s=timeout_s)
        except TimeoutError as error:
            raise EnvError(f"{where} did not return within rollout.env_timeout_s: {timeout_s:g} s") from error
        except RaisedError as error:
            words = str(error.raised) if isinstance(error.raised, EnvError) else f"{where} raised {error.line}"
            raise EnvError(words) from error

    def call_unattended(self, function: Callable[[], object]) -> None:
        """Run `function` after the current call, if that ever returns; its result and errors are dropped."""

        def work() -> None:
            with suppress(BaseException):
                function()

        self._calls.put(work)

    def take_env(self) -> Env | None:
        """Return the kept environment, and keep it no longer. None: there is none."""
        env, self.env = self.env, None
        return env

    def close(self) -> None:
        """Close the kept environment, and let the thread end after its last call."""
        if (env := self.take_env()) is not None:
            self.call_unattended(partial(close_env, env))
        self._calls.put(None)

    def join(self, *, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        """Return the thread."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it and, unless it hangs, wait for its end: a cancelled call still closes what it made."""
        self.close()
        if not self.is_hanging:
            self.join(timeout_s=CLOSING_S)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


class EnvDriver:
    """Plays a conversation against an environment, whose calls all run on one thread with a deadline each."""

    def __init__(self, conversation: Conversation, thread: EnvThread, *, name: str = "", env_s: float = 0.0) -> None:
        """Take the parts.

        Args:
            conversation: the conversation to play.
            thread: runs the environment's calls.
            name: name of the environment. Empty: there is none yet.
            env_s: seconds that its construction took.
        """
        self.conversation = conversation
        self.thread = thread
        self.name = name
        self.gold_answer: str | None = None
        self.info: dict[str, Any] = {}
        """Last `info` of the environment."""
        self._env_s = env_s

    def record_reset(self, reply: EnvReply) -> None:
        """Keep the gold answer and info of a reset or restored environment."""
        self.gold_answer, self.info = reply.gold_answer, reply.info

    async def make(self, make_env: MakeEnv, *, reuses: bool = False) -> tuple[Env, "EnvDriver"]:
        """Make the environment, or take the one that the thread keeps; return it, and a driver that knows its name."""
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

        env = await self.create("construction", construct_named)
        self.thread.made_by = make_env
        return env, EnvDriver(self.conversation, self.thread, name=names[0], env_s=self._env_s)

    async def play(self, env: Env, *, before_action: Callable[[], Awaitable[None]] | None = None) -> None:
        """Sample and execute actions until the episode ends.

        Args:
            env: executes them.
            before_action: awaited before each action.

        Raises:
            EnvError: when the environment fails.
            EngineError: when the engine does.
        """
        conversation = self.conversation
        try:
            while conversation.end is None:
                if before_action is not None:
                    await before_action()
                if (message := await conversation.act()) is None:
                    return
                # Rendered on the environment's thread, while other episodes continue on the event loop.
                reply, following = await self.call("step()", partial(self._step, env, message))
                self.info = reply.info
                outcome = Outcome(
                    reward=reply.reward or 0.0,
                    state_key=reply.state_key,
                    action_key=reply.action_key,
                    extras=reply.info,
                    snapshot=reply.snapshot,
                )
                conversation.record_outcome(following, outcome)
        except ReplayError as error:
            advice = "make it depend on its seed and the actions alone, or set can_snapshot"
            raise EnvError(f"environment {self.name}: {error}; {advice}") from error

    def _step(self, env: Env, message: Message) -> tuple[EnvReply, Dialogue | End]:
        reply = step(env, base_env(env), message)
        if reply.reward is None:
            return reply, End(reason=StopReason.UNSCORED, error=f"environment {self.name}: nothing could score it")
        if reply.terminated or reply.truncated:
            return reply, End(reason=StopReason.TERMINATED, truncated=not reply.terminated)
        return reply, self.render_or_fail(partial(self.conversation.next_dialogue, reply.messages))

    def render_or_fail(self, render: Callable[[], Dialogue | End]) -> Dialogue | End:
        """Render messages of the environment; messages that a chat template rejects are its fault."""
        try:
            return render()
        except Exception as error:  # noqa: BLE001 - foreign template or environment: it becomes data
            words = error if isinstance(error, AgentRLError) else line_of(error)
            failure = EnvError(f"environment {self.name}: its messages cannot be rendered: {words}")
            return End(reason=StopReason.ENV_ERROR, error=str(failure), fault=describe_fault(error))

    async def call(self, what: str, function: Callable[[], Any]) -> Any:
        """`EnvThread.call_env` of this environment, timed."""
        begin, timeout_s = time.perf_counter(), self.conversation.context.config.env_timeout_s
        try:
            return await self.thread.call_env(self.name, what, function, timeout_s=timeout_s)
        finally:
            self._env_s += time.perf_counter() - begin

    async def can_snapshot(self, env: Env) -> bool:
        """Return whether the environment may be restored from a snapshot; close it if that raises."""
        try:
            return bool(await self.call("can_snapshot", lambda: base_env(env).can_snapshot))
        except BaseException:
            async with self.closing(env):
                raise

    async def create(self, what: str, make: Callable[[], Env]) -> Env:
        """Make an environment on the thread; close it there if the caller was cancelled or timed out meanwhile."""
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
        """Close the environment at exit; with `keeps`, let the thread keep it if the episode did not fail."""
        try:
            yield
        except BaseException:
            if self.thread.is_lost:  # hanging, or cancelled within a call
                base_env(env).abandon()
                self.thread.call_unattended(partial(close_env, env))
            else:
                with suppress(EnvError):  # the first error says more
                    await self._close(env)
            raise
        end = self.conversation.end
        if keeps and end is not None and not end.reason.is_fault:
            self.thread.env = env
        else:
            await self._close(env)

    async def _close(self, env: Env) -> None:
        try:
            await self.call("close()", partial(close_env, env))
        except asyncio.CancelledError:
            if not self.thread.is_lost:  # the call had not started
                self.thread.call_unattended(partial(close_env, env))
            raise

    def fail(self, error: EnvError) -> Trajectory:
        """End the conversation with an environment failure and return its trajectory."""
        cause = error.__cause__
        hanging = self.thread.stack if self.thread.is_lost else None
        fault = cause.fault if isinstance(cause, RaisedError) else describe_fault(cause or error, hanging=hanging)
        self.conversation.fail(End(reason=StopReason.ENV_ERROR, error=str(error), fault=fault))
        return self.trajectory()

    def trajectory(self) -> Trajectory:
        """Return the finished episode."""
        metrics = {key: float(value) for key, value in self.info.items() if is_number(value)} | {"env_s": self._env_s}
        return self.conversation.trajectory(env_id=self.name, metrics=metrics, gold_answer=self.gold_answer)
