"""Tool calls and thoughts as text, in the form of Hermes and Qwen models."""

import json
import re

from agentrl.plain_data import MAX_DEPTH, plain_data, well_formed
from agentrl.types import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
_BEGIN = re.compile(f"{OPEN}|{THINK}|{END_THINK}")
_MARKUP = re.compile(rf"<(?={OPEN[1:]}|{CLOSE[1:]}|{END_THINK[1:]})")
_BODY = re.compile(rf'((?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+)(?:{CLOSE}|\Z)', re.DOTALL)
"""The body of a call, up to the first closing tag outside of its strings: JSON has no `<` or backslash elsewhere."""
_MAX_DEPTH = MAX_DEPTH // 2
"""Of a call: an environment may quote it in data of its own."""


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
    return f"{THINK}\n{text}\n{END_THINK}\n"


def parse_assistant(text: str, *, is_thinking: bool = False) -> Message:
    """Return the assistant message that a sampled text stands for; never raises.

    A tag within a call or a thought is part of it: a call may speak of `</think>`, and what is drafted in a thought is
    not carried out. Thoughts are kept as `reasoning_content`: what stands between `<think>` and `</think>`, after a
    `<think>` that is never closed, and before a first `</think>` that nothing opened (a prompt may have). The rest
    around the calls is `content`.

    A malformed call is data: it becomes a call with an empty name whose `arguments` are the text as sampled, which an
    environment answers with an error message. So is one with what no file can carry further: NaN, infinity, half a
    surrogate pair, an integer beyond a float's range, arguments that nest too deep.

    Args:
        text: what was sampled.
        is_thinking: the prompt ends within a thought.
    """
    text = well_formed(text)  # half a surrogate pair has no bytes
    if is_thinking:
        text = THINK + text.lstrip().removeprefix(THINK)
    content, thoughts, calls, position = list[str](), list[str](), list[dict[str, object]](), 0
    while begin := _BEGIN.search(text, position):
        content.append(text[position : begin.start()])
        if begin[0] == OPEN:
            call, position = _parse_call(text, begin.end())
            calls.append(call)
        elif begin[0] == THINK:
            end, position = _find(END_THINK, text, begin.end())
            thoughts.append(text[begin.end() : end])
        else:
            position = begin.end()
            if calls or thoughts:
                content.append(END_THINK)
            else:
                thoughts, content = ["".join(content)], []
    content.append(text[position:])
    message: Message = {"role": "assistant"}
    if reasoning := "\n".join(filter(None, map(str.strip, thoughts))):
        message["reasoning_content"] = reasoning
    message["content"] = "".join(content).strip()
    if calls:
        message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(calls)]
    return message


def _parse_call(text: str, start: int) -> tuple[dict[str, object], int]:
    """Return the call whose body begins at `start`, and the position after its closing tag."""
    end, position = _find(CLOSE, text, start)
    malformed: dict[str, object] = {"name": "", "arguments": text[start:end].strip()}
    body = _BODY.match(text, start)
    if body is None:
        return malformed, position
    try:
        call = json.loads(body[1].strip())
        is_plain = plain_data(call, "the call", max_depth=_MAX_DEPTH) == call
    except (ValueError, RecursionError):  # ValueError: not JSON, a number of too many digits, or no plain data
        return malformed, position
    if not (is_plain and isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]):
        return malformed, position
    return {"name": call["name"], "arguments": call.get("arguments", {})}, body.end()


def _find(tag: str, text: str, start: int) -> tuple[int, int]:
    """Return where a tag begins and ends; without one, the end of the text."""
    position = text.find(tag, start)
    return (len(text), len(text)) if position < 0 else (position, position + len(tag))
