"""Reading of requests from outside: JSON, its validation, and messages in agentrl's form; the seam of dialects."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from agentrl.data.plain import PlainDataError, plain_data, printable
from agentrl.endpoint.call import Asked, RefusalKind, RefusedError, Said
from agentrl.types import Message

MAX_MESSAGES = 20_000
MAX_TOOLS = 1_000
MAX_STOP = 64
MAX_SAMPLES = 128
_MAX_DEPTH = 32
"""Depth of a tool's schema and of a call's arguments: records quote them in data of their own."""

Name = Annotated[str, StringConstraints(max_length=1_000)]
Tool = dict[str, Any]


class Dialect(Protocol):
    """Form of requests and answers; a module is one."""

    NAME: str

    def read(self, body: bytes) -> Asked:
        """Return what a request asks for.

        Raises:
            RefusedError: for a body that this dialect does not know, naming the field.
        """

    def write(self, asked: Asked, said: Sequence[Said]) -> dict[str, Any]:
        """Return the body of an answer: one `Said` for each of `asked.n`."""

    def events(self, asked: Asked, said: Sequence[Said]) -> Iterator[str]:
        """Yield the server-sent events of an answer."""

    def error(self, refusal: RefusedError) -> dict[str, Any]:
        """Return the body of a refusal."""

    def error_events(self, asked: Asked, refusal: RefusedError) -> Iterator[str]:
        """Yield the events of a refusal in a stream that has begun."""


class Outside(BaseModel):
    """Data from outside, of which only the fields that count are read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Body(Outside):
    """Body of a request: what is no field of it is ignored, and told."""

    model_config = ConfigDict(extra="allow")


class Part(Outside):
    """Part of a content."""

    type: Name
    text: str | None = None
    refusal: str | None = None


Content = str | list[Part] | None
_Body = TypeVar("_Body", bound=BaseModel)


def read_body(body: bytes, model: type[_Body]) -> _Body:
    """Return the validated body of a request.

    Raises:
        RefusedError: naming the first field at fault.
    """
    try:
        found = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RefusedError(RefusalKind.INVALID, f"the body is no JSON: {error}") from None
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        raise RefusedError(RefusalKind.INVALID, f"{param or 'the body'}: {first['msg']}", param=param) from None


def text_of(content: Content, param: str) -> str:
    """Return a content as one text, its parts on lines of their own, as vLLM joins them.

    Raises:
        RefusedError: for images, audio and files.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"):
            raise not_text(part.type, param)
        texts.append(part.refusal if part.type == "refusal" else part.text)
    return "\n".join(filter(None, texts))


def not_text(kind: str, param: str) -> RefusedError:
    """Return the refusal of a part that is no text."""
    words = f"{param}: this model takes text alone, got a part of type {printable(kind)[:40]!r}"
    return RefusedError(RefusalKind.INVALID, words, param=param)


def arguments_of(text: str | Mapping[str, Any] | None) -> dict[str, Any] | str:
    """Return the arguments of a call: an object, or the text of what is none."""
    try:
        found = from_json(text or "{}", allow_inf_nan=False) if text is None or isinstance(text, str) else text
        return dict(plain_data(found, max_depth=_MAX_DEPTH)) if isinstance(found, Mapping) else str(text)
    except (ValueError, PlainDataError):
        return text if isinstance(text, str) else json.dumps(text)


def tool_call(name: str, arguments: dict[str, Any] | str, call_id: str | None) -> dict[str, Any]:
    """Return a call of an assistant message."""
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
    """Return the schema of a tool.

    Raises:
        RefusedError: for one that nests too deep.
    """
    declared: Tool = {"name": name} | ({"description": description} if description else {})
    try:
        schema = _schema(json.dumps(parameters or {"type": "object", "properties": {}}))
    except PlainDataError as error:
        raise RefusedError(RefusalKind.INVALID, f"tools: {error}", param="tools") from None
    return {"type": "function", "function": declared | {"parameters": schema}}


@lru_cache(maxsize=1_000)
def _schema(text: str) -> dict[str, Any]:
    """Return a schema as plain data; clients send the same ones with each request."""
    return dict(plain_data(json.loads(text), max_depth=_MAX_DEPTH))


def text_tool(name: str, description: str | None) -> Tool:
    """Return the schema of a tool that takes text: its one argument is `input`."""
    field = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, description, field)


def one_dialogue(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages as renderers take them.

    Neighbouring assistant messages become one, and so do the system messages at the beginning: many templates refuse more
    than one. Results bear the names of their tools.
    """
    found: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        last = found[-1] if found else {}
        if message["role"] == "assistant":
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == last.get("role") == "assistant":
            found[-1] = _joined(last, message)
        elif message["role"] == "system" and len(found) == 1 and last["role"] == "system":
            found[0] = last | {"content": f"{last['content']}\n\n{message['content']}"}
        elif message["role"] == "tool" and message.get("tool_call_id") in names:
            found.append({"role": "tool", "name": names[message["tool_call_id"]]} | message)
        else:
            found.append(message)
    return tuple(found)


def _joined(first: Message, second: Message) -> Message:
    joined: Message = {"role": "assistant"}
    for name in ("reasoning_content", "content"):
        if text := "\n".join(filter(None, (first.get(name), second.get(name)))):
            joined[name] = text
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return joined | {"content": joined.get("content", "")} | ({"tool_calls": calls} if calls else {})


def assistant(text: str, *, thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> Message:
    """Return an assistant message."""
    found: Message = {"role": "assistant"} | ({"reasoning_content": thought} if thought else {})
    return found | {"content": text} | ({"tool_calls": list(calls)} if calls else {})


def ignored_of(body: BaseModel, *, neutral: Mapping[str, Any], **more: Any) -> dict[str, str]:
    """Return the parameters of a request that are not carried out, with their values as bounded text.

    Args:
        body: the request; what it has beyond its fields is ignored.
        neutral: values that ask for nothing, as null and empty ones do.
        more: further parameters.
    """
    given = {**(body.model_extra or {}), **more}
    return {
        printable(name)[:80]: printable(json.dumps(value))[:80]
        for name, value in given.items()
        if value not in (None, "", [], {}) and neutral.get(name) != value
    }


def arguments_text(arguments: dict[str, Any] | str) -> str:
    """Return the arguments of a call as they are sent."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def event(data: Mapping[str, Any], name: str = "") -> str:
    """Return a server-sent event."""
    return f"event: {name}\n" * bool(name) + f"data: {json.dumps(data)}\n\n"


def count(limit: int) -> Any:
    """Return the constraints of a list with at most so many members."""
    return Field(max_length=limit)
