"""An interrupt of an update that runs on another thread: what takes long asks for it where it may end."""

from contextvars import ContextVar
from threading import Event

from agentrl.errors import TrainingError

interrupted: ContextVar[Event | None] = ContextVar("interrupted", default=None)
"""Where what runs on this thread is told that it shall end. None: it goes on to its end."""


def check_interrupt() -> None:
    """Go on, unless it was interrupted.

    Raises:
        TrainingError: where it was.
    """
    event = interrupted.get()
    if event is not None and event.is_set():
        raise TrainingError("the update was interrupted")
