"""Llama's form: the whole text is a call, `{"name": "look", "parameters": {"n": 1}}`, maybe after `<|python_tag|>`."""

import json
import re

from agentrl.chat.forms.form import Function, malformed, object_function
from agentrl.chat.forms.whole import WholeForm

_TAG = "<|python_tag|>"
_BEGIN = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"(?:[^"\\]++|\\.)*+"\s*+,\s*+"parameters"\s*+:',
    re.DOTALL,
)
_BETWEEN = re.compile(r"\s*+;?\s*+")
_DECODER = json.JSONDecoder()


def _read_llama(text: str) -> tuple[str, list[Function]]:
    content, tag, called = text.partition(_TAG)
    if not tag:
        content, called = ("", text) if _BEGIN.match(text) else (text, "")
    return content, _llama_calls(called.strip()) or [malformed(tag + called)] if tag or called else []


def _llama_calls(text: str) -> list[Function]:
    """Return calls that stand one after the other, or with semicolons between them; none where one is malformed."""
    functions, position = list[Function](), 0
    while position < len(text):
        try:
            call, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        if not (found := object_function(call, "parameters")):
            return []
        functions.append(found)
        position = between.end() if (between := _BETWEEN.match(text, end)) else end
    return functions


LLAMA = WholeForm(name="llama-json", read=_read_llama)
