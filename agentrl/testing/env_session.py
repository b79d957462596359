"""An environment under test: every call has a deadline, and every value it returns is looked at."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from agentrl.data.plain import PlainDataError, abbreviated
from agentrl.env import MessageEnv, ask_oracle, close_env, tool_schemas
from agentrl.env.make import Env
from agentrl.env.message_env import key_return, reset_return, step_return
from agentrl.errors import EnvError, EnvironmentFailure
from agentrl.rollout.faults import RaisedError
from agentrl.types import Message


class Problem(Exception):  # noqa: N818 - a finding about the environment
    """Something is wrong, and the check that found it cannot continue."""

    def __init__(self, line: str, words: str = "") -> None:
        super().__init__(line)
        self.line = line
        self.words = words
        """Message of the environment's own exception."""


class Hang(Problem):
    """A call did not return, so that no further call can be made."""


class Report:
    """Collects what is wrong; runs calls on one thread of its own, as a rollout does."""

    def __init__(self, *, timeout_s: float) -> None:
        self.is_deterministic = True
        self.sessions: list[Session] = []
        self.notes: dict[str, str] = {}
        """Restrictions by the kind of copy that failed: they break nothing, and cost what they say."""
        self._timeout_s = timeout_s
        self._lines: dict[str, None] = {}  # in order, each once
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="check_env", daemon=True).start()

    def add(self, line: str) -> None:
        """Note something wrong."""
        self._lines[line] = None

    def lines(self) -> list[str]:
        """List what is wrong, without a line that another one begins with and continues."""
        return [line for line in self._lines if not any(o != line and o.startswith(line) for o in self._lines)]

    def mentions(self, words: str) -> bool:
        """Return whether some line already has these words."""
        return any(words in line for line in self._lines)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Note a `Problem` and continue with the next check; a `Hang` ends the checks."""
        try:
            yield
        except Hang:
            raise
        except Problem as problem:
            self.add(problem.line)

    def call(
        self, what: str, function: Callable[[], Any], *, fix: str = "", num_calls: int = 1, extra_s: float = 0.0
    ) -> Any:
        """Call into the environment, and return what it returns; many calls in one have as many deadlines, and `extra_s`.

        Raises:
            Problem: when it raises.
            Hang: when it does not return in time.
        """
        outcome: Future[Any] = Future()

        def job() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - whatever it raises, SystemExit too, is what the report is about
                outcome.set_exception(RaisedError(error))

        self._jobs.put(job)
        limit_s = num_calls * self._timeout_s + extra_s
        try:
            outcome.exception(limit_s)
        except TimeoutError:
            raise Hang(
                f"{what} did not return within {limit_s:g} s; give whatever can block a deadline of its own"
            ) from None
        try:
            return outcome.result()
        except RaisedError as error:
            words, end = str(error)[:300], f"; {fix}" if fix else ""
            raise Problem(f"{what} raised {words}{end}", words) from error.raised

    def close_sessions(self) -> None:
        """Close every environment made so far."""
        for session in self.sessions:
            with self.collecting():
                session.close()
        self.sessions.clear()

    def close(self) -> None:
        """End the thread (one that hangs is left behind)."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class StepResult(NamedTuple):
    """Values that `step` returned, and the key after it."""

    observation: tuple[Message, ...]
    reward: float | None
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    key: str | None

    @property
    def is_end(self) -> bool:
        """True if no further step may follow."""
        return self.terminated or self.truncated


class Session:
    """One environment, driven through its report."""

    def __init__(self, env: MessageEnv, report: Report, *, made: Env | None = None) -> None:
        self.env = env
        self.made: Env = env if made is None else made
        """The environment with the wrappers around it."""
        self.report = report
        self._is_closed = False
        report.sessions.append(self)

    @cached_property
    def has_oracle(self) -> bool:
        """True if the environment defines an oracle, which may be none for its options."""
        if type(self.env).oracle is MessageEnv.oracle:
            return False
        try:
            self.report.call("oracle()", lambda: ask_oracle(self.env))
        except Hang:
            raise
        except Problem as problem:  # another one is reported when it is asked for a message
            return not isinstance(problem.__cause__, NotImplementedError)
        return True

    def tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools, without those that are none."""
        found: list[dict[str, Any]] = []
        tools = self.report.call("tools", lambda: self.env.tools)
        for schema in tools if isinstance(tools, list | tuple) else ():
            with contextlib.suppress(PlainDataError):
                found += tool_schemas([schema])
        return found

    def add(self, line: str) -> None:
        """Note something wrong."""
        self.report.add(line)

    def add_if(self, is_wrong: bool, line: str) -> None:
        """Note something wrong, where it is."""
        if is_wrong:
            self.report.add(line)

    def reset(self, seed: int, options: dict[str, Any] | None = None) -> tuple[Message, ...]:
        """Begin a task."""
        result = self.report.call("reset()", lambda: self.env.reset(seed=seed, options=options))
        with _as_problem():
            returned = reset_return(result)
        self._check_tuple("reset()", result[0])
        return returned.messages

    def step(self, action: str | Message) -> StepResult:
        """Take a turn."""
        result: Any = self.report.call("step()", lambda: self.env.step(action))
        with _as_problem():
            returned = step_return(result)
        observation, reward, *flags, _ = result
        self._check_tuple("step()", observation)
        self.add_if(isinstance(reward, bool), f"step() returned the reward {abbreviated(reward)}; return a float")
        for name, flag in zip(("terminated", "truncated"), flags, strict=True):
            self.add_if(not isinstance(flag, bool | np.bool_), f"step() returned {flag!r} as {name}; return a bool")
        found = StepResult(*returned, key=self.key())
        self._check_info(found.info, found.reward, is_end=found.is_end)
        return found

    def key(self) -> str | None:
        """Return the state key, asked for twice."""
        key, again = self.report.call("state_key()", lambda: (self.env.state_key(), self.env.state_key()))
        with _as_problem():
            plain = key_return(key, method="state_key()")
        self.add_if(
            key != again, f"state_key() returned {key!r} and at once {again!r}; it only looks, it changes nothing"
        )
        return plain

    def attribute(self, name: str) -> Any:
        """Return an attribute, which may be a property."""
        return self.report.call(name, lambda: getattr(self.env, name))

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Ask the oracle for a message."""
        try:
            message: Message = self.report.call(
                "oracle()", lambda: ask_oracle(self.env) if rng is None else ask_oracle(self.env, skill=skill, rng=rng)
            )
        except Problem as problem:
            if isinstance(problem.__cause__, EnvironmentFailure):  # which says it all
                raise Problem(str(problem.__cause__)) from problem.__cause__
            raise
        return message

    def fork(self) -> "Session":
        """Copy the moment."""
        fix = "override fork() where a deep copy is not enough, or set can_fork = False"
        copy = self.report.call("fork()", self.env.fork, fix=fix)
        if copy is self.env or not isinstance(copy, type(self.env)):
            what = "the environment itself" if copy is self.env else type(copy).__name__
            raise Problem(f"fork() returned {what}; return an independent {type(self.env).__name__}")
        return Session(copy, self.report)

    def random_state(self) -> Any:
        """Return the state of the environment's random numbers."""
        return self.env.np_random.bit_generator.state

    def close(self) -> None:
        """Close the environment, once."""
        if not self._is_closed:
            self._is_closed = True
            self.report.call("close()", partial(close_env, self.made))

    def _check_tuple(self, method: str, messages: object) -> None:
        self.add_if(
            not isinstance(messages, tuple),
            f"{method} returned a {type(messages).__name__} of messages; return a tuple",
        )

    def _check_info(self, info: dict[str, Any], reward: float | None, *, is_end: bool) -> None:
        parts = info.get("reward_components")
        if parts is not None and not (
            isinstance(parts, dict) and all(isinstance(p, int | float) for p in parts.values())
        ):
            self.add(f"step() returned reward_components {abbreviated(parts)}; map names to numbers")
        elif parts is not None and not math.isclose(sum(parts.values()), reward or 0.0, rel_tol=1e-6, abs_tol=1e-9):
            self.add(f"step() returned the reward {reward} but reward_components {parts}; the parts must add up to it")
        success, score = info.get("success"), info.get("score")
        if success is not None:
            self.add_if(not isinstance(success, bool), f"info['success'] is {success!r}; give a bool")
            self.add_if(not is_end, "info['success'] is given before the end; give it with the last step alone")
        if score is not None:
            is_share = isinstance(score, int | float) and 0 <= score <= 1
            self.add_if(not is_share, f"info['score'] is {score!r}; give a number from 0 to 1")


@contextlib.contextmanager
def _as_problem() -> Iterator[None]:
    try:
        yield
    except EnvError as error:
        raise Problem(str(error)) from error


def new_session(report: Report, build: Callable[[], Any]) -> Session:
    """Make an environment, and begin a session with it."""
    made = report.call("__init__()", build)
    env = report.call("unwrapped", lambda: made.unwrapped if isinstance(made, gym.Env) else made)
    if not isinstance(env, MessageEnv):
        raise Problem(f"{type(env).__name__} is no agentrl.MessageEnv; subclass agentrl.ToolEnv or agentrl.MessageEnv")
    if not report.call("a space", lambda: hasattr(env, "observation_space") and hasattr(env, "action_space")):
        raise Problem("__init__() leaves the spaces unset; call super().__init__() in its first line")
    return Session(env, report, made=made)
