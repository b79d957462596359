"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.endpoint.call import Asked, Form, RefusalKind, RefusedError, Said
from agentrl.endpoint.reading import (
    MAX_MESSAGES,
    MAX_SAMPLES,
    MAX_STOP,
    MAX_TOOLS,
    Body,
    Content,
    Name,
    Outside,
    Tool,
    arguments_of,
    arguments_text,
    assistant,
    count,
    event,
    function_tool,
    ignored_of,
    one_dialogue,
    read_body,
    text_of,
    text_tool,
    tool_call,
)
from agentrl.types import Message

NAME = "chat"
_NEUTRAL = {"parallel_tool_calls": True, "response_format": {"type": "text"}, "tool_choice": "auto"}


class _Function(Outside):
    name: Name
    arguments: str | dict[str, Any] | None = None


class _Custom(Outside):
    name: Name
    input: str = ""


class _Call(Outside):
    id: Name | None = None
    function: _Function | None = None
    custom: _Custom | None = None


class _Message(Outside):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    tool_calls: list[_Call] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Declared(Outside):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Outside):
    type: Name = "function"
    function: _Declared | None = None
    custom: _Declared | None = None


class _StreamOptions(Outside):
    include_usage: bool | None = None


class _Body(Body):
    messages: Annotated[list[_Message], Field(min_length=1), count(MAX_MESSAGES)]
    model: Name = ""
    tools: Annotated[list[_Tool], count(MAX_TOOLS)] | None = None
    tool_choice: Any = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], count(MAX_STOP)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def read(body: bytes) -> Asked:
    """Return what a request asks for."""
    found = read_body(body, _Body)
    if found.top_logprobs:
        words = "top_logprobs: only the log-probabilities of the sampled tokens are known; leave it out"
        raise RefusedError(RefusalKind.INVALID, words, param="top_logprobs")
    tools, custom, hosted = _tools(found.tools or ())
    is_none = found.tool_choice == "none"
    return Asked(
        dialect="chat",
        messages=one_dialogue([_read_message(each, index) for index, each in enumerate(found.messages)]),
        tools=tools,
        max_tokens=found.max_completion_tokens or found.max_tokens,
        stop=tuple(filter(None, [found.stop] if isinstance(found.stop, str) else found.stop or ())),
        n=found.n or 1,
        model=found.model,
        logprobs=bool(found.logprobs),
        calls_as_text=is_none,
        ignored=ignored_of(
            found, neutral=_NEUTRAL, tools=hosted or None, tool_choice=None if is_none else found.tool_choice
        ),
        form=Form(
            stream=bool(found.stream),
            with_usage=bool(found.stream_options and found.stream_options.include_usage),
            custom_tools=custom,
        ),
    )


def _read_message(message: _Message, index: int) -> Message:
    text = text_of(message.content, f"messages.{index}.content")
    if message.role == "assistant":
        calls = [_read_call(call) for call in message.tool_calls or ()]
        thought = message.reasoning_content or message.reasoning or ""
        return assistant(text or message.refusal or "", thought=thought, calls=list(filter(None, calls)))
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id or "", "content": text}
    return {"role": "user" if message.role == "user" else "system", "content": text}


def _read_call(call: _Call) -> dict[str, Any] | None:
    if call.custom is not None:
        return tool_call(call.custom.name, {"input": call.custom.input}, call.id)
    if call.function is None:
        return None
    return tool_call(call.function.name, arguments_of(call.function.arguments), call.id)


def _tools(declared: Sequence[_Tool]) -> tuple[tuple[Tool, ...], frozenset[str], list[str]]:
    """Return the tools, the names of those that take text, and the types of those that only OpenAI has."""
    tools: list[Tool] = []
    custom: set[str] = set()
    hosted: list[str] = []
    for tool in declared:
        if tool.function is not None:
            tools.append(function_tool(tool.function.name, tool.function.description, tool.function.parameters))
        elif tool.custom is not None:
            custom.add(tool.custom.name)
            tools.append(text_tool(tool.custom.name, tool.custom.description))
        else:
            hosted.append(tool.type)
    return tuple(tools), frozenset(custom), hosted


def write(asked: Asked, said: Sequence[Said]) -> dict[str, Any]:
    """Return the body of an answer."""
    choices = []
    for index, each in enumerate(said):
        message = {"role": "assistant", "content": each.message["content"] or None, "refusal": None}
        message |= _thought(asked, each)
        if calls := _calls(asked, each):
            message["tool_calls"] = calls
        choices.append({"index": index, "message": message, "logprobs": _logprobs(each), **_finish(each)})
    return {**_head(asked, said, "chat.completion"), "choices": choices, "usage": _usage(said)}


def events(asked: Asked, said: Sequence[Said]) -> Iterator[str]:
    """Yield the chunks of an answer."""
    head = _head(asked, said, "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], finish: dict[str, Any], logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **finish}
        return event({**head, "choices": [choice]})

    unfinished = {"finish_reason": None}
    for index, each in enumerate(said):
        yield chunk(index, {"role": "assistant", "content": ""} | _thought(asked, each), unfinished)
        if each.message["content"] or each.logprobs:
            yield chunk(index, {"content": each.message["content"]}, unfinished, _logprobs(each))
        for place, call in enumerate(_calls(asked, each)):
            yield chunk(index, {"tool_calls": [{"index": place, **call}]}, unfinished)
        yield chunk(index, {}, _finish(each))
    if asked.form.with_usage:
        yield event({**head, "choices": [], "usage": _usage(said)})
    yield "data: [DONE]\n\n"


def error(refusal: RefusedError) -> dict[str, Any]:
    """Return the body of a refusal."""
    code = _CODES.get(refusal.kind)
    kind = "authentication_error" if refusal.kind is RefusalKind.UNAUTHORIZED else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": code}}


_CODES = {
    RefusalKind.TOO_LONG: "context_length_exceeded",
    RefusalKind.UNAUTHORIZED: "invalid_api_key",
    RefusalKind.NOT_FOUND: "not_found",
    RefusalKind.TOO_LARGE: "request_too_large",
    RefusalKind.HEADERS_TOO_LARGE: "headers_too_large",
    RefusalKind.ENDED: "episode_ended",
    RefusalKind.FAILED: "engine_failed",
}


def error_events(asked: Asked, refusal: RefusedError) -> Iterator[str]:  # noqa: ARG001 - all streams end alike
    """Yield the event of a refusal in a stream that has begun."""
    yield event(error(refusal))


def _head(asked: Asked, said: Sequence[Said], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said[0].number}", "object": kind, "created": said[0].created, "model": asked.model}


def _thought(asked: Asked, said: Said) -> dict[str, str]:
    thought = said.message.get("reasoning_content") if asked.form.with_thoughts else None
    return {"reasoning_content": thought} if thought else {}


def _calls(asked: Asked, said: Said) -> list[dict[str, Any]]:
    calls = []
    for call in said.message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in asked.form.custom_tools:
            text = input_of(arguments)
            calls.append({"id": call["id"], "type": "custom", "custom": {"name": name, "input": text}})
        else:
            function = {"name": name, "arguments": arguments_text(arguments)}
            calls.append({"id": call["id"], "type": "function", "function": function})
    return calls


def input_of(arguments: dict[str, Any] | str) -> str:
    """Return the text of a call of a tool that takes text."""
    text = arguments.get("input") if isinstance(arguments, dict) else arguments
    return text if isinstance(text, str) else arguments_text(arguments)


def _finish(said: Said) -> dict[str, str]:
    reason = "length" if said.is_cut else "tool_calls" if said.message.get("tool_calls") else "stop"
    return {"finish_reason": reason}


def _logprobs(said: Said) -> dict[str, Any] | None:
    if not said.logprobs:
        return None
    tokens = [
        {"token": each.text, "logprob": each.logprob, "bytes": list(each.text.encode()), "top_logprobs": []}
        for each in said.logprobs
    ]
    return {"content": tokens, "refusal": None}


def _usage(said: Sequence[Said]) -> dict[str, Any]:
    prompt, completion = said[0].prompt_tokens, sum(each.completion_tokens for each in said)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": said[0].cached_tokens},
    }
