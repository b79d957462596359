"""Mistral's form: `[TOOL_CALLS][{"name": "look", "arguments": {"n": 1}}]`, or `[TOOL_CALLS]look[ARGS]{"n": 1}` a call."""

import json
import re

from agentrl.chat.forms.form import NAME, Function, json_function, malformed, object_function
from agentrl.chat.forms.tagged import Sampled, TaggedForm
from agentrl.chat.renderer import Tools

_MISTRAL_OPEN = "[TOOL_CALLS]"
_MISTRAL_BODY = re.compile(r'((?:[^"\\\[]++|"(?:[^"\\]++|\\.)*+"|\[(?!TOOL_CALLS\]))*+)(?=\[TOOL_CALLS\]|\Z)', re.DOTALL)
"""JSON up to the next call outside of its strings."""
_NAMED = re.compile(rf"\s*+({NAME})\s*+(?:\[CALL_ID\][^\[{{]*+)?(?:\[ARGS\])?(?=\s*+{{)")


def _read_mistral(sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:  # noqa: ARG001 - JSON has types
    if (body := _MISTRAL_BODY.match(sampled.text, start)) and (found := _mistral_calls(body[1])):
        return found, body.end()
    stop = sampled.find(_MISTRAL_OPEN, start)
    return [malformed(sampled.text[start:stop])], stop


def _mistral_calls(body: str) -> list[Function]:
    """Return the call with its name in front, or those of a list; none where one is malformed."""
    if begin := _NAMED.match(body):
        found = [json_function(begin[1], body[begin.end() :])]
    elif not body.lstrip().startswith("["):
        return []
    else:
        try:
            calls = json.loads(body)
        except (ValueError, RecursionError):
            return []
        found = [object_function(call, "arguments") for call in calls] if isinstance(calls, list) else []
    functions = [call for call in found if call]
    return functions if len(functions) == len(found) else []


MISTRAL = TaggedForm(name="mistral", open=_MISTRAL_OPEN, read=_read_mistral, think=("[THINK]", "[/THINK]"))
