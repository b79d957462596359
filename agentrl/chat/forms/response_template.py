"""The form that a tokenizer's own `response_template` describes, read by transformers."""

from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.chat.forms.form import Function, assistant, malformed, object_function
from agentrl.chat.renderer import Tools
from agentrl.data.plain import well_formed
from agentrl.types import Message

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_END = "\u2063"
"""Shows in which field the text ends."""
_MAX_CHARS = 2**15
"""Length of the text after the first thought: transformers takes time that grows with its square."""


class ResponseTemplateForm:
    """A form as data: where each field of a message begins and ends, and how what stands between is read.

    If transformers raises, or a call is not closed, or holds what no call may, all from the first call on is one
    malformed call.
    """

    name = "response-template"

    def __init__(self, template: dict[str, Any], *, ends: Sequence[str] = ()) -> None:
        """Take a tokenizer's `response_template`.

        Args:
            template: as the tokenizer has it.
            ends: the stop tokens as text, with which a template may close a call.

        Raises:
            ValueError: if transformers cannot read it.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template  # here: it loads torch

        self._template, self._ends = load_response_template(template), ("", *ends)
        fields = self._template.fields
        self._thought = next((fields[name] for name in _THOUGHTS if name in fields), None)
        self._call = fields.get("tool_calls")

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:
        """Return the message of a text."""
        thoughts, text = self._first_thought(well_formed(text), is_thinking=is_thinking)
        for end in self._ends:
            if (read := self._read(text, end, tools)) is not None:
                fields, functions = read
                later = [fields[name] for name in _THOUGHTS if isinstance(fields.get(name), str)]
                content = fields.get("content")
                return assistant(content if isinstance(content, str) else "", [*thoughts, *later], functions)
        call = self._call.open_re.search(text, 0, _MAX_CHARS) if self._call else None
        if call is None:
            return assistant(text, thoughts, [])
        return assistant(text[: call.start()], thoughts, [malformed(text[call.start() :])])

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""
        return text

    def _first_thought(self, text: str, *, is_thinking: bool) -> tuple[list[str], str]:
        """Return the thought with which the text begins, and the rest. One that is not closed leaves none."""
        if self._thought is None or self._thought.close_re is None:
            return [], text
        begin = self._thought.open_re.match(text.lstrip()) if self._thought.open_re else None
        if begin is None and not is_thinking:
            return [], text
        start = len(text) - len(text.lstrip()) + begin.end() if begin else 0
        end = self._thought.close_re.search(text, start)
        return ([text[start : end.start()]], text[end.end() :]) if end else ([text[start:]], "")

    def _read(self, text: str, end: str, tools: Tools) -> tuple[dict[str, Any], list[Function]] | None:
        """Return the fields and the calls of a text; None if it cannot be read, or a call in it is malformed."""
        from transformers.utils.chat_parsing import ResponseParser, parse_response

        if len(text) > _MAX_CHARS:
            return None
        try:
            watched = ResponseParser(self._template, prefix="")
            last = [event for event in watched.feed(f"{text}{end}{_END}") if event["type"] == "region_chunk"][-1:]
            last = [event for event in watched.finalize()[1] if event["type"] == "region_chunk"][-1:] or last
            fields = parse_response(text + end, self._template, prefix="", tools=list(tools))
        except Exception:  # noqa: BLE001 - whatever it raises, the text is not of this form
            return None
        if last and last[0]["field"] == "tool_calls":  # the end of the text is part of a call
            return None
        found = [_function(call) for call in _flat(fields.get("tool_calls"))]
        functions = [call for call in found if call]
        return (fields, functions) if len(functions) == len(found) else None


def _flat(calls: object) -> Iterator[object]:
    """Yield calls, which come one by one or in lists."""
    for call in calls if isinstance(calls, list) else ():
        yield from call if isinstance(call, list) else [call]


def _function(call: object) -> Function | None:
    found = call.get("function") if isinstance(call, dict) else None
    return object_function(found, "arguments")
