"""Llama's form: the whole text is a call, `{"name": "look", "parameters": {"n": 1}}`, maybe after `<|python_tag|>`."""

import json
import re
from dataclasses import dataclass

from agentrl.chat.forms.form import Function, assistant, malformed, object_function
from agentrl.chat.renderer import Tools
from agentrl.plain_data import well_formed
from agentrl.types import Message

_TAG = "<|python_tag|>"
_BEGIN = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"(?:[^"\\]++|\\.)*+"\s*+,\s*+"parameters"\s*+:',
    re.DOTALL,
)
_BETWEEN = re.compile(r"\s*+;?\s*+")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class LlamaForm:
    """A text that begins as a call does is one; any other text is an answer, JSON or not."""

    name: str = "llama-json"

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:  # noqa: ARG002 - no thoughts; JSON has types
        """Return the message of a text."""
        text = well_formed(text).strip()
        content, tag, called = text.partition(_TAG)
        if not tag and _BEGIN.match(text):
            content, called = "", text
        if not called and not tag:
            return assistant(content, [], [])
        return assistant(content, [], _calls(called.strip()) or [malformed(tag + called)])

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""
        return text


def _calls(text: str) -> list[Function]:
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


LLAMA = LlamaForm()
