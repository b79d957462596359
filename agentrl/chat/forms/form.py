"""Seam of all text forms of tool calls: limits of a call, and the message that is made of a text.

Arguments that a form writes as text get the JSON types that the tool's schema asks for. Values as Python and as JSON write
them are both read: models that write calls as code mix the two.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from agentrl.chat.renderer import Tools
from agentrl.data.plain import MAX_DEPTH, MAX_VALUES, abbreviated, plain_data
from agentrl.errors import RendererError
from agentrl.types import Message

Function = dict[str, object]
"""Content of a call: `name` and `arguments`."""

NAME = r"[\w.:/-]++"
"""A tool's name, in forms that do not quote it."""
_MAX_DEPTH = MAX_DEPTH // 2
"""Depth of a call: an environment may quote it in data of its own."""


class CallForm(Protocol):
    """Text form of a family's tool calls and thoughts."""

    @property
    def name(self) -> str:
        """Return the name of the form."""

    def parse(self, text: str, tools: Tools, *, is_thinking: bool) -> Message:
        """Return the assistant message that a sampled text stands for; never raises.

        A malformed call is data: it becomes a call with an empty name whose `arguments` are the text as sampled, which an
        environment answers with an error message. So is one with what no file can carry further: NaN, infinity, half a
        surrogate pair, an integer beyond a float's range, arguments that nest too deep. A call within a thought is not
        carried out. The time is in proportion to the text.

        Args:
            text: what was sampled, with control tokens as they are spelled, without the stop token.
            tools: JSON schemas, which give types to arguments where the form has only text.
            is_thinking: the prompt ends within a thought.
        """

    def write_malformed(self, text: str) -> str:
        """Return the text of a malformed call, as it was sampled."""


def function(name: str, arguments: object) -> Function | None:
    """Return what a call holds; None for what no file can carry further and for a call of nothing."""
    try:
        found: Function = {"name": name, "arguments": arguments}
        is_plain = plain_data(found, "the call", max_depth=_MAX_DEPTH) == found
    except (ValueError, RecursionError):  # ValueError: too large, too deep, a number that is too large
        return None
    return found if name and is_plain else None


def json_function(name: str, body: str) -> Function | None:
    """Return a call whose arguments are a JSON object."""
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of too many digits
        return None
    return function(name, arguments) if isinstance(arguments, dict) else None


def object_function(call: object, key: str) -> Function | None:
    """Return a call that is an object with a `name` and, under a key, an object of arguments."""
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get(key), dict)):
        return None
    return function(call["name"], call[key])


def malformed(text: str) -> Function:
    """Return a malformed call."""
    return {"name": "", "arguments": text.strip()}


def assistant(content: str, thoughts: Sequence[str], functions: Sequence[Function]) -> Message:
    """Return an assistant message."""
    message: Message = {"role": "assistant"}
    if reasoning := "\n".join(filter(None, map(str.strip, thoughts))):
        message["reasoning_content"] = reasoning
    message["content"] = content.strip()
    if functions:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(functions)
        ]
    return message


_PYTHON = {"None": "null", "True": "true", "False": "false"}
"""Words that some templates write in place of JSON's."""
_ALL = ("string", "integer", "number", "boolean", "null", "object", "array")
_MAX_STEPS = 8
"""Schemas within schemas, or referred to, that are followed to an argument's type."""


def typed(text: str, name: str, key: str, tools: Tools) -> object:
    """Return the value of an argument that was written as text.

    It stays text where the schema says so or does not know the argument, and where it is nothing of the types that the
    schema allows. Where a schema allows text and more, text that reads as the other is the other: `null` is None.

    Args:
        text: as written.
        name: of the tool.
        key: of the argument.
        tools: JSON schemas.

    Raises:
        ValueError: for a number of too many digits.
        RecursionError: for what nests too deep.
    """
    types = _types(*_schema(name, key, tools))
    if types <= {"string"}:
        return text
    word = text.strip()
    try:
        value = json.loads(_PYTHON.get(word, word))
    except json.JSONDecodeError:
        return text
    return value if types & set(_type_names(value)) - {"string"} else text


def _schema(name: str, key: str, tools: Tools) -> tuple[Any, Any]:
    """Return the schema of an argument, and the one that it is part of; None if there is none."""
    for tool in tools:
        declared = tool.get("function", tool)
        if declared.get("name") == name:
            whole = declared.get("parameters") or {}
            return whole.get("properties", {}).get(key, whole.get("additionalProperties")), whole
    return None, {}


def _types(schema: Any, whole: Any) -> set[str]:
    """Return the types that a schema allows: all where it names none, none if there is no schema.

    What is no JSON schema says nothing, wherever it stands: a server's tools may hold anything.
    """
    known: dict[tuple[int, int], set[str]] = {}

    def of(schema: Any, steps: int) -> set[str]:
        if not isinstance(schema, dict) or not steps:
            return set()
        place = id(schema), steps  # schemas that refer to one another are many paths, and few schemas
        if place not in known:
            known[place] = set()
            known[place] = found(schema, steps - 1)
        return known[place]

    def found(schema: dict[str, Any], steps: int) -> set[str]:
        if isinstance(reference := schema.get("$ref"), str):
            return of(_referred(reference, whole), steps)
        named = {name for name in [schema.get("type"), *_list(schema.get("type"))] if isinstance(name, str)}
        parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(key))]
        values = _list(schema.get("enum")) if "enum" in schema else [schema["const"]] if "const" in schema else []
        types = named.union(*(of(part, steps) for part in parts))
        if not named:
            types = types.union(*map(_type_names, values))
        if types and schema.get("nullable"):
            types = types | {"null"}
        return types or set(_ALL)

    return of(schema, _MAX_STEPS)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, whole: Any) -> Any:
    place = whole
    for step in reference.removeprefix("#").strip("/").split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def _type_names(value: Any) -> Iterator[str]:
    """Yield the types of JSON Schema that a value is of."""
    if value is None:
        yield "null"
    elif isinstance(value, bool):
        yield "boolean"
    elif isinstance(value, str):
        yield "string"
    elif isinstance(value, int | float):
        yield "number"
        if isinstance(value, int) or value.is_integer():
            yield "integer"
    else:
        yield "object" if isinstance(value, dict) else "array"


_NEXT = re.compile(r"\s*+(.?)", re.DOTALL)
_STRING = re.compile(r""""((?:[^"\\]++|\\.)*+)"|'((?:[^'\\]++|\\.)*+)'""", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d++(\.\d*+)?|(\.\d++))([eE][+-]?\d++)?", re.ASCII)
_WORD = re.compile(r"[^\W\d]\w*+")
_WORDS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {c: c for c in "\\'\"/"}


class Literals:
    """Goes through a text from value to value; raises ValueError where none is."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._num_members = 0

    def next(self) -> str:
        """Go past space and return the character that comes next; at the end of the text, nothing."""
        found = _NEXT.match(self._text, self._position)
        self._position = found.start(1) if found else self._position
        return found[1] if found else ""

    def skip(self, sign: str) -> bool:
        """Return whether a character comes next; if so, go past it."""
        is_next = self.next() == sign
        self._position += len(sign) * is_next
        return is_next

    def expect(self, sign: str) -> None:
        """Go past a character; nothing is the end of the text."""
        if not self.skip(sign):
            raise ValueError(f"no {sign!r} at character {self._position}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return what matches next, after space, and go past it."""
        self.next()
        if found := pattern.match(self._text, self._position):
            self._position = found.end()
        return found

    def members(self, close: str) -> Iterator[None]:
        """Yield before each member, with commas between them, up to what closes them."""
        while not self.skip(close):
            self._num_members += 1
            if self._num_members > MAX_VALUES:
                raise ValueError("too many values")
            yield
            if not self.skip(","):
                self.expect(close)
                return

    def value(self, depth: int = 0) -> object:
        """Return the value that comes next."""
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if self.skip("["):
            return [self.value(depth + 1) for _ in self.members("]")]
        if self.skip("{"):
            return {self.key(): self.value(depth + 1) for _ in self.members("}")}
        if (text := self.string()) is not None:
            return text
        if number := self.match(_NUMBER):
            return (float if any(number.groups()) else int)(number[0])
        if (word := self.match(_WORD)) and word[0] in _WORDS:
            return _WORDS[word[0]]
        raise ValueError(f"no value at character {self._position}")

    def string(self) -> str | None:
        """Return the string that comes next, if one does."""
        found = self.match(_STRING)
        return None if found is None else _unescaped(found[1] if found[2] is None else found[2])

    def key(self) -> str:
        """Return the key that comes next, and go past its colon."""
        key = self.string()
        self.expect(":")
        if key is None:
            raise ValueError(f"no key at character {self._position}")
        return key


def _unescaped(text: str) -> str:
    """Return a string with what its backslashes stand for; one that stands for nothing stays, as in Python."""
    if "\\" not in text:
        return text
    text = _ESCAPE.sub(lambda e: chr(int(e[1] or e[2] or e[3], 16)) if e[4] is None else _ESCAPED.get(e[4], e[0]), text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # JSON writes pairs


def check_written(message: Message, parse: Callable[[Tools], Message], *, by: str) -> None:
    """Check that the calls of a message are read as they were written, with tools that have just such arguments.

    Args:
        message: an assistant's.
        parse: reads with these tools what was written.
        by: who wrote it.

    Raises:
        RendererError: if they are not: some templates do not escape what they quote.
    """
    calls = _calls(message)
    if calls and _told(_calls(parse(_tools(calls)))) != _told(calls):
        raise RendererError(
            f"chat.renderer: a call is read otherwise than {by} writes it, because it does not escape arguments: "
            f"{abbreviated(calls)}"
        )


def _calls(message: Message) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions if function["name"]]


def _tools(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    given: dict[str, dict[str, list[object]]] = {}
    for name, arguments in calls:
        values = given.setdefault(name, {})
        for key, value in arguments.items():
            values.setdefault(key, []).append(value)
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {key: {"enum": values[key]} for key in values}},
            },
        }
        for name, values in given.items()
    ]


def _told(calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, str]]]:
    return [(name, {key: _text(value) for key, value in arguments.items()}) for name, arguments in calls]


def _text(value: object) -> str:
    """Return an argument as text, composed (NFC): some tokenizers compose what they encode."""
    text = value if isinstance(value, str) else json.dumps(value)
    with suppress(ValueError, RecursionError):  # two calls may give one argument text and a number
        text = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    return unicodedata.normalize("NFC", text)
