"""Calls as code: Llama's pythonic models, LFM2 and Gemma 4.

[look(n=1), take(what='key')]                                Llama, and LFM2 between tags
<|tool_call>call:look{n:1,what:<|"|>key<|"|>}<tool_call|>    Gemma 4, with thoughts in a channel
"""

import re

from agentrl.chat.forms.form import NAME, Function, Literals, function, malformed
from agentrl.chat.forms.json_calls import WholeForm
from agentrl.chat.forms.tagged import Sampled, TaggedForm
from agentrl.chat.renderer import Tools

_NAME = re.compile(rf"({NAME})\(")
_KEY = re.compile(r"([\w$-]++)\s*+=")
_QUOTE = re.compile(r"(?=')")
_RAW = re.compile(r"'(.*?)'(?=\s*+(?:,\s*+[\w$-]++\s*+=|\)\s*+[],]))", re.DOTALL)
"""A string in which nothing is escaped: it ends where the next argument begins, or where the call ends."""
_BEGIN = re.compile(rf"\[\s*+{NAME}\((?:\)|\s*+[\w$-]++\s*+=)")
_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


def _read(text: str) -> tuple[str, list[Function]]:
    return ("", _calls(text) or [malformed(text)]) if _BEGIN.match(text) else (text, [])


def _lfm(name: str, *, is_raw: bool) -> TaggedForm:
    def read(sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:  # noqa: ARG001 - code has types
        end = sampled.find(_CLOSE, start)
        body = sampled.text[start:end]
        return _calls(body, is_raw=is_raw) or [malformed(body)], end + len(_CLOSE)

    return TaggedForm(name=name, open=_OPEN, close=_CLOSE, read=read)


def _calls(text: str, *, is_raw: bool = False) -> list[Function] | None:
    """Return the calls of a list of calls with keyword arguments; None if it is not in order.

    Args:
        text: the whole list.
        is_raw: strings in single quotes stand as they are, backslashes, quotes and line ends included.
    """
    literals, functions = Literals(text), list[Function]()
    try:
        literals.expect("[")
        for _ in literals.members("]"):
            if (found := _call(literals, is_raw=is_raw)) is None:
                return None
            functions.append(found)
        literals.expect("")
    except ValueError:
        return None
    return functions or None


def _call(literals: Literals, *, is_raw: bool) -> Function | None:
    name, arguments = literals.match(_NAME), dict[str, object]()
    if name is None:
        return None
    for _ in literals.members(")"):
        key = literals.match(_KEY)
        if key is None or key[1] in arguments:
            return None
        if is_raw and literals.match(_QUOTE):
            if (raw := literals.match(_RAW)) is None:
                return None
            arguments[key[1]] = raw[1]
        else:
            arguments[key[1]] = literals.value()
    return function(name[1], arguments)


PYTHONIC = WholeForm(name="pythonic", read=_read)
LFM = _lfm("lfm", is_raw=False)
LFM_RAW = _lfm("lfm-raw", is_raw=True)
"""Form of LFM2.5, whose first templates escape nothing in text."""


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


GEMMA4 = TaggedForm(
    name="gemma4", open=_GEMMA_OPEN, close=_GEMMA_CLOSE, read=_read_gemma, think=("<|channel>thought\n", "<channel|>")
)
