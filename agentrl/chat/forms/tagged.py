"""Forms in which tags stand around thoughts and calls.

Qwen3.5, Nemotron 3, GLM and MiniMax write arguments as text between tags of their own. In harmony, of gpt-oss, and atem, of
Muse, a turn is several messages, each with a header.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentrl.chat.forms.form import NAME, Function, assistant, function, json_function, malformed, typed
from agentrl.chat.renderer import Tools
from agentrl.data.plain import well_formed
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
    """Ends a call; empty if the next one or the end of the text does."""
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
        content = list[str]()
        thoughts = list[str]()
        functions = list[Function]()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """The tags of calls within a block.

    The value of an argument is all text up to the first tag that ends it, whatever other tags it holds.
    """

    call: re.Pattern[str]
    """Begins a call; its group is the name."""
    argument: re.Pattern[str]
    """Begins an argument; its group is the key."""
    end_argument: str
    end_call: re.Pattern[str]
    end_block: re.Pattern[str]
    """Ends the block. The end of the text may too, where `end_call` has shown that the call is whole."""
    close: str
    """Ends a block that is malformed."""
    has_lines: bool = False
    """A value stands on lines of its own."""

    def read(self, sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:
        """Return the calls of a block and the place after it; a block with anything else in it is one malformed call."""
        functions, position = list[Function](), start
        while call := self.call.match(sampled.text, position):
            found, position = self._call(sampled, call, tools)
            if found is None:
                break
            functions.append(found)
        else:
            if functions and (end := self.end_block.match(sampled.text, position)):
                return functions, end.end()
        stop = sampled.find(self.close, position)
        return [malformed(sampled.text[start:stop])], stop + len(self.close)

    def _call(self, sampled: Sampled, call: re.Match[str], tools: Tools) -> tuple[Function | None, int]:
        """Return a call and the place after it; None and the place of what is not in order."""
        name = call[1]
        position = call.end()
        arguments = dict[str, object]()
        while begin := self.argument.match(sampled.text, position):
            key, position = begin[1], begin.end()
            end = sampled.find(self.end_argument, position)
            if end == len(sampled.text) or key in arguments:
                return None, position
            text = sampled.text[position:end]
            try:
                arguments[key] = typed(text.removesuffix("\n") if self.has_lines else text, name, key, tools)
            except (ValueError, RecursionError):
                return None, end
            position = end + len(self.end_argument)
        if end_call := self.end_call.match(sampled.text, position):
            return function(name, arguments), end_call.end()
        return None, position


_KEY = r"([^<>\n]++)"
_QUOTED = r'"([^<>"\n]++)"'

_QWEN = CallTags(
    call=re.compile(rf"\s*+<function=({NAME})>"),
    argument=re.compile(rf"\s*+<parameter={_KEY}>\n?"),
    end_argument="</parameter>",
    end_call=re.compile(r"\s*+</function>"),
    end_block=re.compile(r"\s*+(?:</tool_call>|\Z)"),
    close="</tool_call>",
    has_lines=True,
)
_GLM = CallTags(
    call=re.compile(rf"\s*+({NAME})"),
    argument=re.compile(rf"\s*+<arg_key>{_KEY}</arg_key>\s*+<arg_value>"),
    end_argument="</arg_value>",
    end_call=re.compile(r"\s*+(?=</tool_call>)"),
    end_block=re.compile(r"</tool_call>"),
    close="</tool_call>",
)
_MINIMAX = CallTags(
    call=re.compile(rf'\s*+<invoke name="({NAME})">'),
    argument=re.compile(rf"\s*+<parameter name={_QUOTED}>"),
    end_argument="</parameter>",
    end_call=re.compile(r"\s*+</invoke>"),
    end_block=re.compile(r"\s*+(?:</minimax:tool_call>|\Z)"),
    close="</minimax:tool_call>",
)
ATEM_TAGS = CallTags(
    call=re.compile(rf'\s*+<atem:invoke name="({NAME})">'),
    argument=re.compile(rf"\s*+<atem:parameter name={_QUOTED}>"),
    end_argument="</atem:parameter>",
    end_call=re.compile(r"\s*+</atem:invoke>"),
    end_block=re.compile(r"\s*+(?:</atem:function_calls>|\Z)"),
    close="</atem:function_calls>",
)
"""Tags of Muse, whose messages have recipients."""

QWEN_XML = TaggedForm(name="qwen-xml", open="<tool_call>", close="</tool_call>", read=_QWEN.read, space="\n")
GLM = TaggedForm(name="glm", open="<tool_call>", close="</tool_call>", read=_GLM.read)
MINIMAX = TaggedForm(name="minimax", open="<minimax:tool_call>", close="</minimax:tool_call>", read=_MINIMAX.read)


_START, _MESSAGE = "<|start|>", "<|message|>"
_CONTROL = re.compile(r"(<\|(?:start|message|end|call|return|eom|eot)\|>)")
_ROLE = "assistant"
_RECIPIENT = re.compile(r"\bto=([^\s<]++)")
_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w++)")
_FUNCTION = re.compile(rf"functions\.({NAME})")
_ATEM = re.compile(r"\s*+<atem:function_calls>")


@dataclass(frozen=True, slots=True)
class Part:
    """One message of a turn."""

    header: str
    """Text between the role and the content."""
    body: str

    @property
    def recipient(self) -> str:
        """Return the recipient; empty if there is none."""
        return found[1] if (found := _RECIPIENT.search(self.header)) else ""

    @property
    def channel(self) -> str:
        """Empty if it has none."""
        return found[1] if (found := _CHANNEL.search(self.header)) else ""

    def malformed(self) -> list[Function]:
        """Return it as a malformed call."""
        return [malformed(f"{self.header}{_MESSAGE}{self.body}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelForm:
    """Messages for oneself are thoughts, those for tools are calls, all others are content.

    So is text outside of any message, and in messages of another role: what a model writes in the name of a tool or a user.
    """

    name: str
    think: str
    """The header of a thought."""
    end: str
    """Ends a call that another message follows."""
    is_thought: Callable[[Part], bool]
    calls: Callable[[Part, Tools], list[Function]]
    """Returns the calls of a message; none if it is for a user."""

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:
        """Return the message of a text."""
        text = well_formed(text)
        if is_thinking:
            text = self.think + text.lstrip().removeprefix(self.think.lstrip())
        content = list[str]()
        thoughts = list[str]()
        functions = list[Function]()
        for part in _parts(text):
            if isinstance(part, str):
                content.append(part)
            elif self.is_thought(part):
                thoughts.append(part.body)
            elif calls := self.calls(part, tools):
                functions += calls
            else:
                content.append(part.body)
        return assistant("\n".join(filter(None, map(str.strip, content))), thoughts, functions)

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""
        return f"<|start|>{_ROLE}{'' if text.startswith('<') else ' '}{text}{self.end}"


def _parts(text: str) -> Iterator[Part | str]:
    """Yield the messages of a turn whose prompt ends with `<|start|>assistant`, and the text outside of them."""
    _, *pieces = _CONTROL.split(f"{_START}{_ROLE}{text}")
    header: str | None = None
    for control, piece in zip(pieces[::2], pieces[1::2], strict=True):
        if control == _MESSAGE and header is not None and header.startswith(_ROLE):
            yield Part(header.removeprefix(_ROLE), piece)
            header = None
            continue
        if header is not None and control != _MESSAGE:
            yield header.removeprefix(_ROLE)
        header = piece if control == _START else None
        if header is None:
            yield piece
    if header is not None:
        yield header.removeprefix(_ROLE)


def _harmony_calls(part: Part, tools: Tools) -> list[Function]:  # noqa: ARG001 - JSON has types
    if part.recipient in ("", "user", "all", _ROLE):
        return []
    called = _FUNCTION.fullmatch(part.recipient) if part.channel in ("", "commentary") else None
    found = json_function(called[1], part.body) if called else None
    return [found] if found else part.malformed()


def _atem_calls(part: Part, tools: Tools) -> list[Function]:
    if part.recipient in ("", "user"):
        return []
    if begin := _ATEM.match(part.body):
        functions, end = ATEM_TAGS.read(Sampled(part.body), begin.end(), tools)
        if functions[0]["name"] and not part.body[end:].strip():
            return functions
    return part.malformed()


HARMONY = ChannelForm(
    name="harmony",
    think="<|channel|>analysis<|message|>",
    end="<|call|>",
    is_thought=lambda part: part.channel == "analysis",
    calls=_harmony_calls,
)
ATEM = ChannelForm(
    name="atem",
    think=" to=self<|message|>",
    end="<|eom|>",
    is_thought=lambda part: part.recipient == "self",
    calls=_atem_calls,
)
