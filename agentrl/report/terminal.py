"""The one place where text goes to the terminal: what models, tools, environments and files say cannot steer it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import chain
from typing import Any

from rich import console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_CONTROL = chain(
    (code for code in range(0x20) if code not in (0x09, 0x0A)),  # C0, but for tabs and ends of lines
    range(0x7F, 0xA0),  # DEL and C1
    (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # which turn the direction of writing
)
_PRINTABLE = dict.fromkeys(_CONTROL) | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # half a letter, as JSON may hold


def printable(text: str) -> str:
    """Return a text without control characters, of which terminals take some for commands."""
    return text.translate(_PRINTABLE)


_LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Tell a listener, in plain text, whatever any console prints meanwhile; and what is noted for it alone."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def note(text: str) -> None:
    """Tell listeners what the terminal shows otherwise."""
    for listener in _LISTENERS:
        listener(printable(text))


class Console(console.Console):
    """Prints text as it is: no control characters but its own, and no brackets or colons that mean something."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print text as it is, and tell listeners."""
        super().print(*objects, **options)
        if _LISTENERS and objects and all(isinstance(shown, str | Text | Table) for shown in objects):
            plain = console.Console(
                file=StringIO(), width=160, markup=False, emoji=False, highlight=False, soft_wrap=True
            )
            with plain.capture() as captured:
                plain.print(*objects)
            note(captured.get())

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the pieces of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
