"""Tool calls as text, in the form of Hermes and Qwen models."""

import json
import re

from agentrl.types import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)
_THINKING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>", re.DOTALL)


def format_tool_call(name: str, arguments: object) -> str:
    """Return the text of one call: a JSON object with `name` and `arguments` between `<tool_call>` tags."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def parse_assistant(text: str) -> Message:
    """Return the assistant message that a sampled text stands for; never raises.

    Text before and after calls is kept as `content`, text up to `</think>` as `reasoning_content`. A malformed call is
    data: it becomes a call with an empty name whose `arguments` are the text as sampled, which an environment answers
    with an error message.
    """
    message: Message = {"role": "assistant"}
    if thinking := _THINKING.match(text):
        message["reasoning_content"] = thinking[1].strip()
        text = text[thinking.end() :]
    calls = [_parse_call(match[1].strip()) for match in _CALL.finditer(text)]
    message["content"] = _CALL.sub("", text).strip()
    if calls:
        message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(calls)]
    return message


def _parse_call(body: str) -> dict[str, object]:
    malformed: dict[str, object] = {"name": "", "arguments": body}
    try:
        call = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return malformed
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]):
        return malformed
    return {"name": call["name"], "arguments": call.get("arguments", {})}
