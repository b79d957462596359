"""Anthropic's messages: `POST /v1/messages`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.endpoint.call import Asked, Form, RefusalKind, RefusedError, Said
from agentrl.endpoint.reading import (
    MAX_MESSAGES,
    MAX_STOP,
    MAX_TOOLS,
    Body,
    Content,
    Name,
    Outside,
    arguments_of,
    arguments_text,
    assistant,
    count,
    event,
    function_tool,
    ignored_of,
    not_text,
    one_dialogue,
    read_body,
    text_of,
    tool_call,
)
from agentrl.types import Message

NAME = "messages"
_NEUTRAL = {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}


class _Block(Outside):
    type: Name
    text: str | None = None
    thinking: str | None = None
    id: Name = ""
    name: Name = ""
    input: dict[str, Any] | None = None
    tool_use_id: Name = ""
    content: Content = None


class _Message(Outside):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Block]


class _Tool(Outside):
    type: Name | None = None
    name: Name = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Choice(Outside):
    type: Name


class _Body(Body):
    messages: Annotated[list[_Message], Field(min_length=1), count(MAX_MESSAGES)]
    system: Content = None
    model: Name = ""
    tools: Annotated[list[_Tool], count(MAX_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[str], count(MAX_STOP)] | None = None
    stream: bool | None = None


def read(body: bytes) -> Asked:
    """Return what a request asks for."""
    found = read_body(body, _Body)
    system = text_of(found.system, "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, each in enumerate(found.messages):
        messages += _read_message(each, f"messages.{index}.content")
    declared = found.tools or ()
    own = [tool for tool in declared if tool.type in (None, "custom")]
    hosted = [tool.type for tool in declared if tool not in own]
    choice = found.tool_choice and found.tool_choice.type
    thinking = (found.model_extra or {}).get("thinking")
    return Asked(
        dialect="messages",
        messages=one_dialogue(messages),
        tools=tuple(function_tool(tool.name, tool.description, tool.input_schema) for tool in own),
        max_tokens=found.max_tokens,
        stop=tuple(filter(None, found.stop_sequences or ())),
        model=found.model,
        calls_as_text=choice == "none",
        ignored=ignored_of(
            found,
            neutral=_NEUTRAL,
            tools=hosted or None,
            tool_choice=choice if choice not in ("auto", "none") else None,
        ),
        form=Form(
            stream=bool(found.stream),
            with_thoughts=isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"),
        ),
    )


def _read_message(message: _Message, param: str) -> Iterator[Message]:
    """Yield the messages that a message stands for: results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # what it hides was never said here
            case "tool_use":
                calls.append(tool_call(block.name, arguments_of(block.input), block.id))
            case "tool_result":
                content = text_of(block.content, param)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            case _:
                raise not_text(block.type, param)
    text = "\n".join(filter(None, texts))
    if message.role == "assistant":
        yield assistant(text, thought="\n".join(filter(None, thoughts)), calls=calls)
    elif text:
        yield {"role": message.role, "content": text}


def write(asked: Asked, said: Sequence[Said]) -> dict[str, Any]:
    """Return the body of an answer."""
    (one,) = said
    return {**_head(asked, one), "content": _blocks(asked, one), **_stop(one), "usage": _usage(one)}


def _head(asked: Asked, said: Said) -> dict[str, Any]:
    return {"id": f"msg_{said.number}", "type": "message", "role": "assistant", "model": asked.model}


def _blocks(asked: Asked, said: Said) -> list[dict[str, Any]]:
    message = said.message
    blocks: list[dict[str, Any]] = []
    thought = message.get("reasoning_content")
    if thought and asked.form.with_thoughts:
        blocks.append({"type": "thinking", "thinking": thought, "signature": f"thought_{said.number}"})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def _stop(said: Said) -> dict[str, str | None]:
    calls = said.message.get("tool_calls")
    if said.stopped_by and not calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": said.stopped_by}
    reason = "max_tokens" if said.is_cut else "tool_use" if calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(said: Said) -> dict[str, int]:
    return {
        "input_tokens": said.prompt_tokens - said.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": said.cached_tokens,
        "output_tokens": said.completion_tokens,
    }


def events(asked: Asked, said: Sequence[Said]) -> Iterator[str]:
    """Yield the events of an answer."""
    (one,) = said
    begun = {**_head(asked, one), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**begun, "usage": {**_usage(one), "output_tokens": 0}})
    for index, block in enumerate(_blocks(asked, one)):
        empty, deltas = _pieces(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stop(one), usage={"output_tokens": one.completion_tokens})
    yield _event("message_stop")


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and what is added to it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [thought, signature]
    written = {"type": "input_json_delta", "partial_json": arguments_text(block["input"])}
    return {**block, "input": {}}, [written]


def _event(name: str, **data: Any) -> str:
    return event({"type": name, **data}, name)


def error(refusal: RefusedError) -> dict[str, Any]:
    """Return the body of a refusal."""
    return {"type": "error", "error": {"type": _TYPES[refusal.kind], "message": refusal.message}}


_TYPES = {
    RefusalKind.INVALID: "invalid_request_error",
    RefusalKind.TOO_LONG: "invalid_request_error",
    RefusalKind.UNAUTHORIZED: "authentication_error",
    RefusalKind.NOT_FOUND: "not_found_error",
    RefusalKind.TOO_LARGE: "request_too_large",
    RefusalKind.HEADERS_TOO_LARGE: "request_too_large",
    RefusalKind.ENDED: "invalid_request_error",
    RefusalKind.FAILED: "invalid_request_error",
}


def error_events(asked: Asked, refusal: RefusedError) -> Iterator[str]:  # noqa: ARG001 - all streams end alike
    """Yield the event of a refusal in a stream that has begun."""
    yield event(error(refusal), "error")
