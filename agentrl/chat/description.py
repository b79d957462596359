"""What a renderer says of itself, to people: before a run, and in `agentrl chat`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.chat.renderer import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """How a renderer writes dialogues, in words."""

    facts: dict[str, str]
    """What it does, by subject: calls, thoughts, system messages, ..."""
    notes: tuple[str, ...] = ()
    """What a run says once when it begins, because somebody would be surprised."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A renderer that was considered."""

    name: str
    reason: str
    """Why it was taken, or why not."""
    renderer: "Renderer | None" = None
    """None: it was not taken."""


def describe(renderer: "Renderer") -> Description:
    """Return what a renderer says of itself by a method `describe`, which it need not have."""
    own = getattr(renderer, "describe", None)
    description = own() if callable(own) else None
    if isinstance(description, Description):
        return description
    return Description(facts={"thoughts": renderer.thinking})
