"""Calls as JSON, in the form of Hermes and Qwen models: `<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>`."""

import json
import re

from agentrl.chat.forms.form import Function, function, malformed
from agentrl.chat.forms.tagged import END_THINK, THINK, Sampled, TaggedForm
from agentrl.chat.renderer import Tools
from agentrl.types import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKUP = re.compile(rf"<(?={OPEN[1:]}|{CLOSE[1:]}|{END_THINK[1:]})")


def format_tool_call(name: str, arguments: object) -> str:
    """Return the text of one call: a JSON object with `name` and `arguments` between `<tool_call>` tags.

    Tags within the arguments are written with an escaped `<`, so that they end nothing. A malformed call (no name, text
    as arguments) is written as it was sampled.
    """
    if not name and isinstance(arguments, str):
        return HERMES.write_malformed(arguments)
    body = _MARKUP.sub(r"\\u003c", json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return f"{OPEN}\n{body}\n{CLOSE}"


def format_reasoning(text: str) -> str:
    """Return the text of what was thought before an answer."""
    return f"{THINK}\n{text}\n{END_THINK}\n"


def parse_assistant(text: str, *, is_thinking: bool = False) -> Message:
    """Return the assistant message that a sampled text of this form stands for; never raises."""
    return HERMES.parse(text, (), is_thinking=is_thinking)


def json_until(close: str) -> re.Pattern[str]:
    """Return the pattern of JSON up to the first closing tag outside of its strings.

    Outside of strings, JSON has neither a backslash nor the `<` of a tag.
    """
    return re.compile(rf'((?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+)(?:{re.escape(close)}|\Z)', re.DOTALL)


_HERMES_BODY = json_until(CLOSE)


def _read_hermes(sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:  # noqa: ARG001 - JSON has types
    end = sampled.find(CLOSE, start)
    body = _HERMES_BODY.match(sampled.text, start)
    if body and (found := _call(body[1])):
        return [found], body.end()
    return [malformed(sampled.text[start:end])], end + len(CLOSE)


def _call(body: str) -> Function | None:
    try:
        call = json.loads(body.strip())
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of too many digits
        return None
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        return None
    return function(call["name"], call.get("arguments", {}))


HERMES = TaggedForm(name="hermes", open=OPEN, close=CLOSE, read=_read_hermes, space="\n")
