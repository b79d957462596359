"""Forms in which tags stand around thoughts and calls, within the text."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.chat.forms.form import Function, assistant
from agentrl.chat.renderer import Tools
from agentrl.plain_data import well_formed
from agentrl.types import Message

THINK, END_THINK = "<think>", "</think>"


class Sampled:
    """A sampled text. Looking for one tag from place to place takes time in proportion to the text, found or not."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[str, tuple[int, int]] = {}

    def find(self, tag: str, start: int) -> int:
        """Return where a tag begins; without one, the end of the text."""
        begin, found = self._found.get(tag, (0, -1))
        if not begin <= start <= found:
            found = self.text.find(tag, start)
            found = len(self.text) if found < 0 else found
            self._found[tag] = (start, found)
        return found


Reader = Callable[[Sampled, int, Tools], tuple[list[Function], int]]
"""Takes a text and the place after an opening tag; returns the calls there and the place after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedForm:
    """Calls and thoughts between tags.

    A tag within a call or a thought is part of it: a call may speak of `</think>`, and what is drafted in a thought is
    not carried out. Thoughts are kept as `reasoning_content`: what stands between the tags of a thought, after an opening
    one that is never closed, and before a first closing one that nothing opened (a prompt may have). The rest around the
    calls is `content`.
    """

    name: str
    open: str
    """Begins a call."""
    close: str = ""
    """Ends a call; empty where the next one or the end of the text does."""
    read: Reader
    space: str = ""
    """Between these tags and a malformed call where it is written again."""
    think: tuple[str, str] = (THINK, END_THINK)
    """Begins and ends a thought."""
    frame: tuple[str, ...] = ()
    """Tags around all the calls, which say nothing more."""

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:
        """Return the message of a text."""
        think, end_think = self.think
        text = well_formed(text)  # half a surrogate pair has no bytes
        if is_thinking:
            text = think + text.lstrip().removeprefix(think)
        begin_any = re.compile("|".join(map(re.escape, (self.open, think, end_think, *self.frame))))
        sampled, position = Sampled(text), 0
        content, thoughts, functions = list[str](), list[str](), list[Function]()
        while begin := begin_any.search(text, position):
            content.append(text[position : begin.start()])
            position = begin.end()
            if begin[0] == self.open:
                found, position = self.read(sampled, position, tools)
                functions += found
            elif begin[0] == think:
                end = sampled.find(end_think, position)
                thoughts.append(text[position:end])
                position = end + len(end_think)
            elif begin[0] == end_think:
                if functions or thoughts:
                    content.append(end_think)
                else:
                    thoughts, content = ["".join(content)], []
        content.append(text[position:])
        return assistant("".join(content), thoughts, functions)

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""
        return f"{self.open}{self.space}{text}{self.space}{self.close}"
