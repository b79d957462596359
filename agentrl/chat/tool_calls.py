"""Tool calls as text, in the form of Hermes and Qwen models."""

import json
import re

from agentrl.plain_data import MAX_DEPTH, plain_data
from agentrl.types import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)
_THINK, _END_THINK = "<think>", "</think>"
_MAX_DEPTH = MAX_DEPTH // 2
"""Of a call: an environment may quote it in data of its own."""
_MARKUP = re.compile(rf"<(?={OPEN[1:]}|{CLOSE[1:]}|{_END_THINK[1:]})")


def format_tool_call(name: str, arguments: object) -> str:
    """Return the text of one call: a JSON object with `name` and `arguments` between `<tool_call>` tags.

    Tags within the arguments are written with an escaped `<`, so that they end nothing. A malformed call (no name, text
    as arguments) is written as it was sampled.
    """
    if not name and isinstance(arguments, str):
        return f"{OPEN}\n{arguments}\n{CLOSE}"
    body = _MARKUP.sub(r"\\u003c", json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return f"{OPEN}\n{body}\n{CLOSE}"


def format_reasoning(text: str) -> str:
    """Return the text of what was thought before an answer."""
    return f"{_THINK}\n{text}\n{_END_THINK}\n"


def parse_assistant(text: str) -> Message:
    """Return the assistant message that a sampled text stands for; never raises.

    Text before and after calls is kept as `content`, text up to `</think>` as `reasoning_content`. A malformed call is
    data: it becomes a call with an empty name whose `arguments` are the text as sampled, which an environment answers
    with an error message. So is one with what no file can carry further: NaN, infinity, half a surrogate pair, an integer
    beyond a float's range, arguments that nest too deep.
    """
    message: Message = {"role": "assistant"}
    thinking, has_ended, answer = text.partition(_END_THINK)
    if has_ended:
        message["reasoning_content"] = thinking.strip().removeprefix(_THINK).strip()
        text = answer
    calls = [_parse_call(match[1].strip()) for match in _CALL.finditer(text)]
    message["content"] = _CALL.sub("", text).strip()
    if calls:
        message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(calls)]
    return message


def _parse_call(body: str) -> dict[str, object]:
    malformed: dict[str, object] = {"name": "", "arguments": body}
    try:
        call = json.loads(body)
        is_plain = plain_data(call, "the call", max_depth=_MAX_DEPTH) == call
    except (ValueError, RecursionError):  # ValueError: not JSON, a number of too many digits, or no plain data
        return malformed
    if not (is_plain and isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]):
        return malformed
    return {"name": call["name"], "arguments": call.get("arguments", {})}
