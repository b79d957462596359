"""Calls of a name and then JSON, in a section for all calls of a turn: the forms of DeepSeek and Kimi K2."""

import re

from agentrl.chat.forms.form import NAME, Function, json_function, malformed
from agentrl.chat.forms.hermes import json_until
from agentrl.chat.forms.tagged import Reader, Sampled, TaggedForm
from agentrl.chat.renderer import Tools

_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_KIMI_END = "<|tool_call_end|>"


def _reader(close: str, begin: str, end: str = "") -> Reader:
    """Return a reader of calls.

    Args:
        close: ends a call.
        begin: pattern of what stands before the JSON; its group is the name.
        end: stands after the JSON.
    """
    begins, json_body = re.compile(rf"\s*+{begin}"), json_until(close)

    def read(sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:  # noqa: ARG001 - JSON has types
        if (name := begins.match(sampled.text, start)) and (body := json_body.match(sampled.text, name.end())):
            text = body[1].strip()
            if text.endswith(end) and (found := json_function(name[1], text.removesuffix(end))):
                return [found], body.end()
        stop = sampled.find(close, start)
        return [malformed(sampled.text[start:stop])], stop + len(close)

    return read


DEEPSEEK = TaggedForm(
    name="deepseek",
    open="<｜tool▁call▁begin｜>",
    close=_DEEPSEEK_END,
    read=_reader(_DEEPSEEK_END, rf"function<｜tool▁sep｜>({NAME})\s*+```json", "```"),
    frame=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V3_1 = TaggedForm(
    name="deepseek-v3.1",
    open="<｜tool▁call▁begin｜>",
    close=_DEEPSEEK_END,
    read=_reader(_DEEPSEEK_END, rf"({NAME})<｜tool▁sep｜>"),
    frame=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = TaggedForm(
    name="kimi",
    open="<|tool_call_begin|>",
    close=_KIMI_END,
    read=_reader(_KIMI_END, r"(?:functions\.)?([\w./-]++):\d++\s*+<\|tool_call_argument_begin\|>"),
    frame=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
