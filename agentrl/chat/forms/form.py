"""What all text forms of tool calls share: the seam, what a call may hold, and the message that is made of a text."""

import json
from collections.abc import Sequence
from typing import Protocol

from agentrl.chat.renderer import Tools
from agentrl.plain_data import MAX_DEPTH, plain_data
from agentrl.types import Message

Function = dict[str, object]
"""What a call holds: `name` and `arguments`."""

NAME = r"[\w.:/-]++"
"""A tool's name, in forms that do not quote it."""
_MAX_DEPTH = MAX_DEPTH // 2
"""Of a call: an environment may quote it in data of its own."""


class CallForm(Protocol):
    """How a family of models writes tool calls and thoughts as text."""

    @property
    def name(self) -> str:
        """What the form is called."""

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:
        """Return the assistant message that a sampled text stands for; never raises.

        A malformed call is data: it becomes a call with an empty name whose `arguments` are the text as sampled, which an
        environment answers with an error message. So is one with what no file can carry further: NaN, infinity, half a
        surrogate pair, an integer beyond a float's range, arguments that nest too deep. A call within a thought is not
        carried out. The time is in proportion to the text.

        Args:
            text: what was sampled, with control tokens as they are spelled, without the stop token.
            tools: JSON schemas, which give types to arguments where the form has only text.
            is_thinking: the prompt ends within a thought.
        """

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""


def function(name: str, arguments: object) -> Function | None:
    """Return what a call holds; None for what no file can carry further and for a call of nothing."""
    try:
        found: Function = {"name": name, "arguments": arguments}
        is_plain = plain_data(found, "the call", max_depth=_MAX_DEPTH) == found
    except (ValueError, RecursionError):  # ValueError: too large, too deep, a number that is too large
        return None
    return found if name and is_plain else None


def json_function(name: str, body: str) -> Function | None:
    """Return a call whose arguments are a JSON object."""
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of too many digits
        return None
    return function(name, arguments) if isinstance(arguments, dict) else None


def object_function(call: object, key: str) -> Function | None:
    """Return a call that is an object with a `name` and, under a key, an object of arguments."""
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get(key), dict)):
        return None
    return function(call["name"], call[key])


def malformed(text: str) -> Function:
    """Return a malformed call."""
    return {"name": "", "arguments": text.strip()}


def assistant(content: str, thoughts: Sequence[str], functions: Sequence[Function]) -> Message:
    """Return an assistant message."""
    message: Message = {"role": "assistant"}
    if reasoning := "\n".join(filter(None, map(str.strip, thoughts))):
        message["reasoning_content"] = reasoning
    message["content"] = content.strip()
    if functions:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(functions)
        ]
    return message
