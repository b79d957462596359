"""Calls as JSON.

    <tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>    Hermes and Qwen
    {"name": "look", "parameters": {"n": 1}}                          Llama, maybe after `<|python_tag|>`: the whole text
    [TOOL_CALLS][{"name": "look", "arguments": {"n": 1}}]             Mistral, or `[TOOL_CALLS]look[ARGS]{"n": 1}` a call

DeepSeek and Kimi K2 write names and then JSON, in a section for all calls of a turn.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.chat.forms.form import NAME, Function, assistant, function, json_function, malformed, object_function
from agentrl.chat.forms.tagged import END_THINK, THINK, Reader, Sampled, TaggedForm
from agentrl.chat.renderer import Tools
from agentrl.data.plain import well_formed
from agentrl.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeForm:
    """A text that begins as a call does is one; any other text is an answer."""

    name: str
    read: Callable[[str], tuple[str, list[Function]]]
    """Takes a text, and returns what of it is content, and the calls."""

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:  # noqa: ARG002 - the calls have types
        """Return the message of a text."""
        text, thought = well_formed(text).strip(), ""
        if is_thinking or text.startswith(THINK):
            thought, _, text = text.removeprefix(THINK).partition(END_THINK)
        content, functions = self.read(text.strip())
        return assistant(content, [thought], functions)

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""
        return text


OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKUP = re.compile(rf"<(?={OPEN[1:]}|{CLOSE[1:]}|{END_THINK[1:]})")


def format_tool_call(name: str, arguments: object) -> str:
    """Return the text of one call: a JSON object with `name` and `arguments` between `<tool_call>` tags.

    Tags within the arguments are written with an escaped `<`, so that they end nothing. A malformed call (no name, text
    as arguments) is written as it was sampled.
    """
    if not name and isinstance(arguments, str):
        return HERMES.write_malformed(arguments)
    body = _MARKUP.sub(r"\\u003c", json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return f"{OPEN}\n{body}\n{CLOSE}"


def format_reasoning(text: str) -> str:
    """Return the text of what was thought before an answer."""
    return f"{THINK}\n{text}\n{END_THINK}\n"


def parse_assistant(text: str, *, is_thinking: bool = False) -> Message:
    """Return the assistant message that a sampled text of this form stands for; never raises."""
    return HERMES.parse(text, (), is_thinking=is_thinking)


def json_until(close: str) -> re.Pattern[str]:
    """Return the pattern of JSON up to the first closing tag outside of its strings.

    Outside of strings, JSON has neither a backslash nor the `<` of a tag.
    """
    return re.compile(rf'((?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+)(?:{re.escape(close)}|\Z)', re.DOTALL)


_HERMES_BODY = json_until(CLOSE)


def _read_hermes(sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:  # noqa: ARG001 - JSON has types
    end = sampled.find(CLOSE, start)
    body = _HERMES_BODY.match(sampled.text, start)
    if body and (found := _call(body[1])):
        return [found], body.end()
    return [malformed(sampled.text[start:end])], end + len(CLOSE)


def _call(body: str) -> Function | None:
    try:
        call = json.loads(body.strip())
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of too many digits
        return None
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        return None
    return function(call["name"], call.get("arguments", {}))


HERMES = TaggedForm(name="hermes", open=OPEN, close=CLOSE, read=_read_hermes, space="\n")


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
    """Return calls that stand one after the other, or with semicolons between them; none if one is malformed."""
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


_MISTRAL_OPEN = "[TOOL_CALLS]"
_MISTRAL_BODY = re.compile(
    r'((?:[^"\\\[]++|"(?:[^"\\]++|\\.)*+"|\[(?!TOOL_CALLS\]))*+)(?=\[TOOL_CALLS\]|\Z)', re.DOTALL
)
"""JSON up to the next call outside of its strings."""
_NAMED = re.compile(rf"\s*+({NAME})\s*+(?:\[CALL_ID\][^\[{{]*+)?(?:\[ARGS\])?(?=\s*+{{)")


def _read_mistral(sampled: Sampled, start: int, tools: Tools) -> tuple[list[Function], int]:  # noqa: ARG001 - JSON has types
    if (body := _MISTRAL_BODY.match(sampled.text, start)) and (found := _mistral_calls(body[1])):
        return found, body.end()
    stop = sampled.find(_MISTRAL_OPEN, start)
    return [malformed(sampled.text[start:stop])], stop


def _mistral_calls(body: str) -> list[Function]:
    """Return the call with its name in front, or those of a list; none if one is malformed."""
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
