"""Failures of environments, located by their own frames of a traceback, and deadlines that stop while the engine is paused."""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from traceback import FrameSummary, StackSummary, TracebackException

import gymnasium as gym

from agentrl.data.plain import line_of, printable, words_of
from agentrl.errors import EnvError, EnvironmentFailure, RemoteError, UserError
from agentrl.types import Fault


class EngineClock:
    """Deadlines of an engine's completions, stopped while the engine is paused, for however long an update takes."""

    def __init__(self) -> None:
        self._runs = True
        self._timeouts: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after so many seconds; a stop resets them to 0."""
        async with asyncio.timeout(seconds if self._runs else None) as timeout:
            self._timeouts[timeout] = seconds
            try:
                yield
            finally:
                del self._timeouts[timeout]

    def stop(self) -> None:
        """Stop all deadlines."""
        self._runs = False
        self._reschedule(None)

    def start(self) -> None:
        """Restart all deadlines in full."""
        if not self._runs:
            self._runs = True
            self._reschedule(asyncio.get_running_loop().time())

    def _reschedule(self, now: float | None) -> None:
        for timeout, seconds in self._timeouts.items():
            if not timeout.expired():
                timeout.reschedule(None if now is None else now + seconds)


_MAX_LINES = 60
"""Largest number of lines kept of a traceback; its middle is cut."""
_CALLERS = tuple(f"{os.path.dirname(file)}{os.sep}" for file in (os.path.dirname(__file__), gym.__file__))
"""Folders of the code that calls environments: agentrl's and gymnasium's."""


class RaisedError(Exception):
    """An error of foreign code, described on the thread that called it: its message is code too, which may hang."""

    def __init__(self, raised: BaseException) -> None:
        """Describe the error."""
        self.raised = raised
        """Original error."""
        self.line = describe_error(raised)
        """Error and its location, in one line."""
        self.fault = describe_fault((raised.__cause__ or raised) if isinstance(raised, EnvError) else raised)
        super().__init__(line_of(raised))


def describe_fault(error: BaseException, *, hanging: StackSummary | None = None) -> Fault:
    """Describe an error of an environment, or the place at which it hangs.

    The kind names the last line within the folder of the file that was called: what that calls in turn, such as a JSON
    decoder, has many callers.

    Args:
        error: raised by the environment, or by agentrl if it broke its contract.
        hanging: stack of the environment's thread, if it missed a deadline.
    """
    if (remote := _remote(error)) is not None:
        return Fault(kind=remote.kind, traceback=_bounded(remote.traceback), is_resumable=remote.is_resumable)
    frames = traceback.extract_tb(error.__traceback__) if hanging is None else hanging
    own = _own(frames)
    text = ""  # for a broken contract the message is enough, and every frame is agentrl's
    if hanging is not None:
        text = f"It hangs here (most recent call last):\n{''.join((own or frames).format())}"
    elif own:
        text = _traceback(error, own)
    place = _place(own) or (_line(frames[-1]) if frames else "an unknown line")
    return Fault(kind=printable(f"{type(error).__name__} at {place}"), traceback=_bounded(text))


def describe_error(error: BaseException) -> str:
    """Return an environment's error and its location in one line: `KeyError: 'answer' (desk.py:40)`."""
    if (remote := _remote(error)) is not None:
        return str(remote)
    place = _place(_own(traceback.extract_tb(error.__traceback__)))
    return f"{line_of(error)} ({place})" if place else line_of(error)


@contextmanager
def environment_failures() -> Iterator[None]:
    """Raise errors of an environment outside an episode, including SystemExit, as one line.

    Raises:
        UserError: raised by the environment itself.
        EnvironmentFailure: for anything else.
    """
    try:
        yield
    except UserError:
        raise
    except EnvError as error:  # its message is complete
        raise EnvironmentFailure(str(error)) from error
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(f"the environment raised {describe_error(error)}") from error


def thread_stack(thread: threading.Thread) -> StackSummary | None:
    """Return the current stack of a thread. None: it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return None if frame is None else traceback.extract_stack(frame)


def _remote(error: BaseException) -> RemoteError | None:
    """Return the description of an error that was raised in another process. None: it was raised here."""
    cause = vars(BaseException)["__cause__"].__get__(error)  # a stranger's class may have a `__cause__` that raises
    return next((found for found in (error, cause) if isinstance(found, RemoteError)), None)


def _traceback(error: BaseException, own: StackSummary) -> str:
    try:
        raised = TracebackException.from_exception(error)
        raised.stack[:] = own
        return "".join(raised.format())
    except BaseException:  # noqa: BLE001 - its parts may raise anything
        return "".join([*own.format(), words_of(error)])


def _own(frames: StackSummary) -> StackSummary:
    """Return the frames from the environment's first one on."""
    for number, frame in enumerate(frames):
        if not (frame.filename.startswith(_CALLERS) or frame.filename == threading.__file__):
            return StackSummary.from_list(frames[number:])
    return StackSummary()


def _place(own: Sequence[FrameSummary]) -> str | None:
    folders = [os.path.dirname(frame.filename) for frame in own]
    return (
        _line([frame for frame, folder in zip(own, folders, strict=True) if folder == folders[0]][-1]) if own else None
    )


def _line(frame: FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _bounded(text: str) -> str:
    lines = [printable(line) for line in text.splitlines()]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES // 2 : -_MAX_LINES // 2] = ["  ..."]
    return "\n".join(lines)
