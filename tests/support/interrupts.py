"""What tests of an interrupted update need."""

from collections.abc import Callable
from contextvars import copy_context
from threading import Event
from typing import TypeVar

from agentrl.learn.interrupt import run_until

R = TypeVar("R")


class After(Event):
    """Is set once it has been asked a number of times."""

    def __init__(self, num_asked: int) -> None:
        super().__init__()
        self.left = num_asked

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


def run_with(event: Event, work: Callable[[], R]) -> R:
    """Run what ends once the event is set."""
    return copy_context().run(run_until, event, work)
