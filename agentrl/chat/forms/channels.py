"""Forms in which a turn is several messages, each with a header: harmony, of gpt-oss, and atem, of Muse."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentrl.chat.forms.form import NAME, Function, assistant, json_function, malformed
from agentrl.chat.forms.tagged import Sampled
from agentrl.chat.forms.xml import ATEM_TAGS
from agentrl.chat.renderer import Tools
from agentrl.plain_data import well_formed
from agentrl.types import Message

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
    """What stands between the role and the text."""
    body: str

    @property
    def recipient(self) -> str:
        """Whom it is for; empty where it does not say."""
        return found[1] if (found := _RECIPIENT.search(self.header)) else ""

    @property
    def channel(self) -> str:
        """Empty where it has none."""
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
    """Returns the calls of a message; none where it is for a user."""

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:
        """Return the message of a text."""
        text = well_formed(text)
        if is_thinking:
            text = self.think + text.lstrip().removeprefix(self.think.lstrip())
        content, thoughts, functions = list[str](), list[str](), list[Function]()
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
