"""An environment under test: every call has a deadline, and every value it returns is looked at."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from agentrl.env import MAX_REWARD, MessageEnv, tool_schemas
from agentrl.env.spaces import is_message
from agentrl.plain_data import PlainDataError, abbreviated, plain_data
from agentrl.types import Message


class Problem(Exception):  # noqa: N818 - a finding about the environment
    """Something is wrong, and the check that found it cannot continue."""

    def __init__(self, line: str, words: str = "") -> None:
        super().__init__(line)
        self.line = line
        self.words = words
        """What the environment's own exception said."""


class Hang(Problem):
    """A call did not return, so that no further call can be made."""


class Report:
    """Collects what is wrong; runs calls on one thread of its own, as a rollout does."""

    def __init__(self, *, timeout_s: float) -> None:
        self.is_deterministic = True
        self.sessions: list[Session] = []
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
        """Tell whether some line already has these words."""
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

    def call(self, what: str, function: Callable[[], Any], *, fix: str = "", num_calls: int = 1) -> Any:
        """Call into the environment, and return what it returns; many calls in one have as many deadlines.

        Raises:
            Problem: when it raises.
            Hang: when it does not return in time.
        """
        outcome: Future[Any] = Future()

        def job() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - whatever it raises, SystemExit too, is what the report is about
                outcome.set_exception(error)

        self._jobs.put(job)
        limit_s = num_calls * self._timeout_s
        try:
            error = outcome.exception(limit_s)
        except TimeoutError:
            raise Hang(
                f"{what} did not return within {limit_s:g} s; give whatever can block a deadline of its own"
            ) from None
        if error is not None:
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            end = f"; {fix}" if fix else ""
            raise Problem(f"{what} raised {words}{end}", words) from error
        return outcome.result()

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
    """What `step` returned, and the key after it."""

    observation: tuple[Message, ...]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    key: str | None

    @property
    def is_end(self) -> bool:
        """True where no further step may follow."""
        return self.terminated or self.truncated


class Session:
    """One environment, driven through its report."""

    def __init__(self, env: MessageEnv, report: Report) -> None:
        self.env = env
        self.report = report
        self._is_closed = False
        report.sessions.append(self)

    @property
    def has_oracle(self) -> bool:
        """True where the environment defines an oracle."""
        return type(self.env).oracle is not MessageEnv.oracle

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
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise Problem(f"reset() returned {_types(result)}; return (messages, info)")
        _plain("reset(): info", result[1])
        return self._messages("reset()", result[0])

    def step(self, action: str | Message) -> StepResult:
        """Take a turn."""
        result: Any = self.report.call("step()", lambda: self.env.step(action))
        if not (isinstance(result, tuple) and len(result) == 5):
            raise Problem(f"step() returned {_types(result)}; return (messages, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = result
        observation = self._messages("step()", observation)
        number = _plain("step(): the reward", reward)
        if not isinstance(number, int | float) or isinstance(number, bool) or abs(number) > MAX_REWARD:
            raise Problem(
                f"step() returned the reward {abbreviated(reward)}; return a finite float, at most {MAX_REWARD:g} in size"
            )
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            self.add_if(not isinstance(flag, bool | np.bool_), f"step() returned {flag!r} as {name}; return a bool")
        if not isinstance(info, dict):
            raise Problem(f"step() returned {abbreviated(info)} as info; return a dict")
        info = _plain("step(): info", info)
        self._check_info(info, float(number), is_end=bool(terminated or truncated))
        return StepResult(observation, float(number), bool(terminated), bool(truncated), info, self.key())

    def key(self) -> str | None:
        """Return the state key, asked for twice."""
        key, again = self.report.call("state_key()", lambda: (self.env.state_key(), self.env.state_key()))
        if not (key is None or isinstance(key, str)):
            raise Problem(f"state_key() returned {abbreviated(key)}; return a str, or None where there are no keys")
        self.add_if(
            key != again, f"state_key() returned {key!r} and at once {again!r}; it only looks, it changes nothing"
        )
        return key

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Ask the oracle for a message."""
        message = self.report.call(
            "oracle()", lambda: self.env.oracle() if rng is None else self.env.oracle(skill=skill, rng=rng)
        )
        if not (is_message(message) and message["role"] == "assistant"):
            raise Problem(
                f"oracle() returned {message!r}; return an assistant message (agentrl.env.tool_call makes one)"
            )
        return dict(message)

    def fork(self) -> "Session":
        """Copy the moment."""
        fix = "override fork() where a deep copy is not enough"
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
            self.report.call("close()", self.env.close)

    def _messages(self, method: str, said: Any) -> tuple[Message, ...]:
        if not isinstance(said, list | tuple):
            raise Problem(f"{method} returned {type(said).__name__} as messages; return a tuple of them")
        self.add_if(isinstance(said, list), f"{method} returned a list of messages; return a tuple")
        messages: list[Message] = _plain(f"{method}: messages", said)
        for message in messages:
            if not is_message(message):
                raise Problem(
                    f"{method} returned {message!r} as a message; return a dict with role "
                    "(system, user, assistant, tool) and content (a str)"
                )
        return tuple(messages)

    def _check_info(self, info: dict[str, Any], reward: float, *, is_end: bool) -> None:
        parts = info.get("reward_components")
        if parts is not None and not (
            isinstance(parts, dict) and all(isinstance(p, int | float) for p in parts.values())
        ):
            self.add(f"step() returned reward_components {abbreviated(parts)}; map names to numbers")
        elif parts is not None and not math.isclose(sum(parts.values()), reward, rel_tol=1e-6, abs_tol=1e-9):
            self.add(f"step() returned the reward {reward} but reward_components {parts}; the parts must add up to it")
        success, score = info.get("success"), info.get("score")
        if success is not None:
            self.add_if(not isinstance(success, bool), f"info['success'] is {success!r}; give a bool")
            self.add_if(not is_end, "info['success'] is given before the end; give it with the last step alone")
        if score is not None:
            is_share = isinstance(score, int | float) and 0 <= score <= 1
            self.add_if(not is_share, f"info['score'] is {score!r}; give a number from 0 to 1")


def _plain(place: str, value: object) -> Any:
    try:
        return plain_data(value, place)
    except PlainDataError as error:
        raise Problem(str(error)) from error


def _types(value: object) -> str:
    inner = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"a {type(value).__name__}{inner}"
