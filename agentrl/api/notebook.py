"""What a notebook needs: an event loop already runs there, and its output is no terminal."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_running_loop() -> Iterator[None]:
    """Let `asyncio.run` work in a cell of a notebook: the notebook's own event loop stands still as long as the cell runs."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


def line_display() -> Callable[[str], None]:
    """Return what shows a line of text below the cell, in place of the one before."""
    from IPython.display import Pretty, display  # where there is a notebook, there is IPython

    def show(words: str) -> None:
        shown.update(Pretty(words))

    shown: Any = display(Pretty(""), display_id=True)
    return show
