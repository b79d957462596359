"""Gemma 4's form: `<|tool_call>call:look{n:1,what:<|"|>key<|"|>}<tool_call|>`, thoughts in a channel."""

import re

from agentrl.chat.forms.form import NAME, Function, function, malformed
from agentrl.chat.forms.literals import Literals
from agentrl.chat.forms.tagged import Sampled, TaggedForm
from agentrl.chat.renderer import Tools

_GEMMA_OPEN, _GEMMA_CLOSE = "<|tool_call>", "<tool_call|>"
_CALL = re.compile(rf"call:({NAME})(?={{)")
_STRING = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_GEMMA_KEY = re.compile(r"([^:{}\[\],]++):")


class _GemmaValues(Literals):
    """Values whose text stands between `<|"|>`, and whose keys need no quotes."""

    def string(self) -> str | None:
        return found[1] if (found := self.match(_STRING)) else super().string()

    def key(self) -> str:
        if (quoted := self.match(_STRING)) is not None:
            self.expect(":")
            return quoted[1]
        if (bare := self.match(_GEMMA_KEY)) is None:
            raise ValueError("no key")
        return bare[1].strip()


def _read_gemma(sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:  # noqa: ARG001 - it has types
    end = sampled.find(_GEMMA_CLOSE, start)
    body = sampled.text[start:end]
    return [_gemma_call(body) or malformed(body)], end + len(_GEMMA_CLOSE)


def _gemma_call(body: str) -> Function | None:
    values = _GemmaValues(body)
    name = values.match(_CALL)
    try:
        arguments = values.value()
        values.expect("")
    except ValueError:
        return None
    return None if name is None else function(name[1], arguments)


GEMMA4 = TaggedForm(name="gemma4", open=_GEMMA_OPEN, close=_GEMMA_CLOSE, read=_read_gemma, think=("<|channel>thought\n", "<channel|>"))
