"""What a model may write in each form of tool calls: calls in order, their parts glued at random, outputs cut and doubled."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.plain import plain_data

Functions = Sequence[tuple[str, Mapping[str, Any]]]
"""Names and arguments."""

_TYPES = {
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "what": {"type": "string"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "items": {"type": "array"},
    "table": {"type": "object"},
}
TOOLS: list[dict[Any, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": {"type": "object", "properties": _TYPES}},
    }
    for name in ("look", "take_it")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of one form write."""

    write: Callable[[Functions], str]
    """Writes calls as the family's template does."""
    pieces: tuple[str, ...]
    """What calls and thoughts are made of."""
    opening: str
    """Pattern without which no text holds a call."""
    think: tuple[str, str] = ("<think>", "</think>")
    """Begins and ends a thought."""

    @property
    def end_thought(self) -> str:
        """Without it, what is thought goes on."""
        return "<|start|>" if "<|start|>" in self.think[1] else self.think[1]


def xml_text(value: Any) -> str:
    """Return a value as text between tags."""
    return value if isinstance(value, str) else json.dumps(value)


def _hermes(calls: Functions) -> str:
    bodies = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def _qwen_xml(calls: Functions) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        lines = "".join(f"<parameter={key}>\n{xml_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: Functions) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{xml_text(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _minimax(calls: Functions) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = "".join(f'<parameter name="{k}">{xml_text(v)}</parameter>\n' for k, v in arguments.items())
        return f'<invoke name="{name}">\n{pairs}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>" if calls else ""


def _atem(calls: Functions) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = "".join(f'<atem:parameter name="{k}">{xml_text(v)}</atem:parameter>\n' for k, v in arguments.items())
        invoke = f'<atem:invoke name="{name}">\n{pairs}</atem:invoke>'
        return f" to={name}<|message|><atem:function_calls>\n{invoke}\n</atem:function_calls>"

    return "<|eom|><|start|>assistant".join(one(*call) for call in calls)


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    return json.dumps(value)


def _gemma4(calls: Functions) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in calls)


def _harmony(calls: Functions) -> str:
    return "<|call|><|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}" for name, arguments in calls
    )


def _code(calls: Functions, text: Callable[[str], str] = repr) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        values = (text(v) if isinstance(v, str) else repr(v) for v in arguments.values())
        return f"{name}({', '.join(f'{key}={value}' for key, value in zip(arguments, values, strict=True))})"

    return f"[{', '.join(one(*call) for call in calls)}]" if calls else ""


def _lfm(calls: Functions) -> str:
    return f"<|tool_call_start|>{_code(calls)}<|tool_call_end|>" if calls else ""


def _lfm_raw(calls: Functions) -> str:
    written = _code(calls, "'{}'".format)
    return f"<|tool_call_start|>{written}<|tool_call_end|>" if calls else ""


def _mistral(calls: Functions) -> str:
    bodies = [{"name": name, "arguments": arguments, "id": "abcdef123"} for name, arguments in calls]
    return f"[TOOL_CALLS]{json.dumps(bodies)}" if calls else ""


def _mistral_named(calls: Functions) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def _deepseek(calls: Functions, before: str = "function<｜tool▁sep｜>{}\n```json\n", after: str = "\n```") -> str:
    begin, begin_one, _, end_one, end = _DEEPSEEK
    bodies = (f"{begin_one}{before.format(name)}{json.dumps(a)}{after}{end_one}" for name, a in calls)
    return f"{begin}{''.join(bodies)}{end}" if calls else ""


def _deepseek_v3_1(calls: Functions) -> str:
    return _deepseek(calls, "{}<｜tool▁sep｜>", "")


_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


def _kimi(calls: Functions) -> str:
    begin, begin_one, argument, end_one, end = _KIMI
    bodies = (f"{begin_one}functions.{name}:{i}{argument}{json.dumps(a)}{end_one}" for i, (name, a) in enumerate(calls))
    return f"{begin}{''.join(bodies)}{end}" if calls else ""


def _llama(calls: Functions) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


_THOUGHT = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_HEADERS = ("<|start|>", "assistant", "user", "<|message|>", " to=look", " to=self", " to=user", " to=")
_JSON = ('{"name": "look", "arguments": {}}', '{"name": ', '"arguments": ', '"look"', '{"n": 1}', '{"what": "')
_CODE = ("look(", "take_it()", "n=1", ", ", "'", "what='", "[look(n=1)]", "None", "-1.5e3")

FAMILIES = {
    "hermes": Family(write=_hermes, pieces=(*_THOUGHT, *_TOOL_CALL, *_JSON), opening="<tool_call>"),
    "qwen-xml": Family(
        write=_qwen_xml,
        pieces=(
            *_THOUGHT,
            *_TOOL_CALL,
            "<function=",
            "look>",
            "<function=look>",
            "</function>",
            "<parameter=",
            "<parameter=n>",
            "<parameter=what>",
            "</parameter>",
        ),
        opening="<tool_call>",
    ),
    "glm": Family(
        write=_glm,
        pieces=(*_THOUGHT, *_TOOL_CALL, "look", "<arg_key>", "n</arg_key>", "<arg_value>", "</arg_value>"),
        opening="<tool_call>",
    ),
    "gemma4": Family(
        write=_gemma4,
        pieces=(
            "<|channel>",
            "<|channel>thought\n",
            "<channel|>",
            "<|tool_call>",
            "call:look",
            "call:",
            "{",
            "}",
            '<|"|>',
            "what:",
            "n:1",
            "<tool_call|>",
        ),
        opening=r"<\|tool_call>",
        think=("<|channel>thought\n", "<channel|>"),
    ),
    "harmony": Family(
        write=_harmony,
        pieces=(
            *_HEADERS,
            "functions.look",
            "<|channel|>",
            "<|channel|>analysis",
            "commentary",
            "final",
            "json",
            "{}",
            '{"n": 1}',
            "<|constrain|>json",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
        opening="to=",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "atem": Family(
        write=_atem,
        pieces=(
            *_HEADERS,
            "<|eom|>",
            "<|eot|>",
            "<atem:function_calls>",
            "</atem:function_calls>",
            "</atem:invoke>",
            '<atem:invoke name="look">',
            '<atem:parameter name="what">',
            "</atem:parameter>",
        ),
        opening="to=",
        think=(" to=self<|message|>", "<|eom|><|start|>assistant"),
    ),
    "lfm": Family(
        write=_lfm,
        pieces=(*_THOUGHT, *_CODE, "<|tool_call_start|>", "<|tool_call_end|>"),
        opening=r"<\|tool_call_start\|>",
    ),
    "lfm-raw": Family(
        write=_lfm_raw,
        pieces=(*_THOUGHT, *_CODE, "<|tool_call_start|>", "<|tool_call_end|>"),
        opening=r"<\|tool_call_start\|>",
    ),
    "mistral": Family(
        write=_mistral,
        pieces=("[THINK]", "[/THINK]", *_JSON, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "look", "look[ARGS]"),
        opening=r"\[TOOL_CALLS\]",
        think=("[THINK]", "[/THINK]"),
    ),
    "deepseek": Family(
        write=_deepseek,
        pieces=(*_THOUGHT, *_DEEPSEEK, "function", "look", "```", "```json", *_JSON),
        opening="<｜tool▁call▁begin｜>",
    ),
    "deepseek-v3.1": Family(
        write=_deepseek_v3_1, pieces=(*_THOUGHT, *_DEEPSEEK, "look", *_JSON), opening="<｜tool▁call▁begin｜>"
    ),
    "kimi": Family(
        write=_kimi,
        pieces=(*_THOUGHT, *_KIMI, "functions.look:0", "look:1", "functions.", *_JSON),
        opening=r"<\|tool_call_begin\|>",
    ),
    "minimax": Family(
        write=_minimax,
        pieces=(
            *_THOUGHT,
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            '<invoke name="look">',
            "</invoke>",
            '<parameter name="n">',
            '<parameter name="what">',
            "</parameter>",
            '<invoke name="',
        ),
        opening="<minimax:tool_call>",
    ),
    "llama-json": Family(
        write=_llama,
        pieces=("<|python_tag|>", '{"name": "look", "parameters": ', '{"n": 1}', "{}", ";", *_JSON),
        opening=r"<\|python_tag\|>|(?:^|</think>)\s*\{",
    ),
    "pythonic": Family(write=_code, pieces=_CODE, opening=r"(?:^|</think>)\s*\["),
}
"""By the name of the form."""
_COMMON = (
    " ", "\n", "\t", "text", "</", "<", "{", "}", "[", "]", '"', "'", "\\", "\\u0000", "\\ud800", "\ud800", "\u2028", "é",
    "NaN", "Infinity", "1e999", "7" * 400, "9" * 5000, "[" * 70, "]" * 70, '{"a":' * 40, "null", "true", ":", ",", "1",
)  # fmt: skip
_TEXTS = (
    "key",
    "it's",
    'a "b"',
    "line\nline",
    "</think>",
    "<think>",
    "a\\b",
    "é世",
    "1",
    "true",
    "null",
    "",
    " x ",
    "{}",
)


def arguments(rng: random.Random) -> dict[str, Any]:
    """Return arguments at random, of the types that the tools' schema has."""
    drawn: dict[str, Any] = {
        "n": rng.randrange(-9, 2**40),
        "x": rng.choice((0.5, -3, 1e-9)),
        "what": rng.choice(_TEXTS),
        "flag": rng.random() < 0.5,
        "maybe": rng.choice((None, 3)),
        "items": [1, "a", None, [rng.choice(_TEXTS[:1])]],
        "table": {"k": rng.random() < 0.5, "deep": {"er": [1.5]}},
    }
    return {key: drawn[key] for key in rng.sample(sorted(drawn), rng.randrange(4))}


def calls(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Return up to three calls."""
    return [(rng.choice(("look", "take_it")), arguments(rng)) for _ in range(rng.randrange(4))]


def outputs(family: Family, rng: random.Random) -> Iterator[str]:
    """Yield outputs without end: parts glued at random, and calls in order that are then cut, doubled and overwritten."""
    begin, end = family.think
    while True:
        yield "".join(rng.choices((*family.pieces, *family.pieces, *_COMMON), k=rng.randrange(12)))
        written = family.write(calls(rng))
        drafted = f"{begin}{rng.choice(_TEXTS)}{family.write(calls(rng))}{end * rng.randrange(2)}"
        text = rng.choice(("", "Well. ", drafted)) + written + rng.choice(("", "", "\nDone.", written))
        yield text
        for _ in range(rng.randrange(1, 4)):
            at, to = sorted(rng.choices(range(len(text) + 1), k=2))
            text = rng.choice(
                (text[:at], text[:at] + text[to:], text[:to] + text[at:], text[:at] + _glue(family, rng) + text[at:])
            )
        yield text


def _glue(family: Family, rng: random.Random) -> str:
    return "".join(rng.choices((*family.pieces, *_COMMON), k=rng.randrange(1, 3)))


def faults(message: Any, text: str, family: Family) -> Iterator[str]:
    """Yield what is wrong with the message of a text, as far as the text alone shows it."""
    if plain_data(message) != message or json.loads(json.dumps(message, allow_nan=False)) != message:
        yield "no plain data"
    if not (
        message["role"] == "assistant" and isinstance(message["content"], str) and message.get("reasoning_content", "x")
    ):
        yield "no message"
    found = [call["function"] for call in message.get("tool_calls", ())]
    if found and not re.search(family.opening, text):
        yield "a call of nothing"
    decoded = _decoded(text)
    for called in found:
        if not called["name"]:
            if called["arguments"] not in decoded:
                yield "a malformed call that was not written"
            continue
        num_written = re.sub(r"\s", " ", decoded).count(re.sub(r"\s", " ", called["name"]))
        if sum(other["name"] == called["name"] for other in found) > num_written:
            yield "more calls than were written"
        for said in _strings(called["arguments"]):
            if not all(word in decoded for word in re.findall(r"\w+", said)):
                yield f"an argument that was not written: {said[:40]!r}"


def _decoded(text: str) -> str:
    """Return a text followed by what its JSON escapes stand for."""
    text = text.encode(errors="replace").decode()
    escapes = re.sub(r"\\u([0-9a-fA-F]{4})", lambda e: chr(int(e[1], 16)), text)
    plain = re.sub(r"\\[nrtbf]", " ", escapes).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return f"{text} {plain}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
