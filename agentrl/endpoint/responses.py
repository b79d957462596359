"""OpenAI's responses: `POST /v1/responses`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from agentrl.endpoint.call import Asked, Form, RefusalKind, RefusedError, Said
from agentrl.endpoint.chat import error, input_of
from agentrl.endpoint.reading import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Content,
    Name,
    Outside,
    Part,
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

__all__ = ["NAME", "error", "error_events", "events", "read", "write"]

NAME = "responses"
_NEUTRAL = {
    "background": False,
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "truncation": "disabled",
}
_ECHOED = ("instructions", "metadata", "parallel_tool_calls", "previous_response_id", "text", "tool_choice", "tools")


class _Item(Outside):
    type: Name = "message"
    role: Name | None = None
    content: Content = None
    summary: list[Part] | None = None
    name: Name = ""
    namespace: Name | None = None
    call_id: Name | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content = None


class _Tool(Outside):
    type: Name
    name: Name = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: "Annotated[list[_Tool], count(MAX_TOOLS)] | None" = None


class _Body(Body):
    input: str | Annotated[list[_Item], Field(min_length=1), count(MAX_MESSAGES)]
    instructions: str | None = None
    model: Name = ""
    tools: Annotated[list[_Tool], count(MAX_TOOLS)] | None = None
    tool_choice: Any = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    previous_response_id: Name | None = None


def read(body: bytes) -> Asked:
    """Return what a request asks for."""
    found = read_body(body, _Body)
    tools, custom, hosted = _tools(found.tools or ())
    is_none = found.tool_choice == "none"
    opening = [{"role": "system", "content": found.instructions}] if found.instructions else []
    if isinstance(found.input, str):
        messages = [{"role": "user", "content": found.input}]
    else:
        messages = [_read_item(each, f"input.{index}") for index, each in enumerate(found.input)]
    given = found.model_dump(include={*_ECHOED}, exclude_none=True)
    return Asked(
        dialect="responses",
        messages=one_dialogue([*opening, *messages]),
        tools=tools,
        max_tokens=found.max_output_tokens,
        model=found.model,
        calls_as_text=is_none,
        previous=found.previous_response_id or "",
        ignored=ignored_of(
            found, neutral=_NEUTRAL, tools=hosted or None, tool_choice=None if is_none else found.tool_choice
        ),
        form=Form(
            stream=bool(found.stream),
            custom_tools=custom,
            namespaces=tuple(tool.name for tool in found.tools or () if tool.type == "namespace"),
            echo=given,
        ),
    )


def _read_item(item: _Item, param: str) -> Message:
    match item.type:
        case "message" if item.role == "assistant":
            return assistant(text_of(item.content, f"{param}.content"))
        case "message" if item.role in ("system", "developer", "user"):
            role = "user" if item.role == "user" else "system"
            return {"role": role, "content": text_of(item.content, f"{param}.content")}
        case "reasoning":
            return assistant("", thought=text_of(item.content, param) or text_of(item.summary, param))
        case "function_call":
            return assistant(
                "", calls=[tool_call(_name(item.name, item.namespace), arguments_of(item.arguments), item.call_id)]
            )
        case "custom_tool_call":
            return assistant(
                "", calls=[tool_call(_name(item.name, item.namespace), {"input": item.input or ""}, item.call_id)]
            )
        case "function_call_output" | "custom_tool_call_output":
            content = text_of(item.output, f"{param}.output")
            return {"role": "tool", "tool_call_id": item.call_id or "", "content": content}
    found = f"of type {item.type!r}" if item.role is None else f"of role {item.role!r}"
    fix = "send messages, reasoning, function calls and their outputs themselves (store: false)"
    raise RefusedError(RefusalKind.INVALID, f"{param}: an item {found} is not known here; {fix}", param=param)


def _name(name: str, namespace: str | None) -> str:
    return f"{namespace}.{name}" if namespace else name


def _tools(
    declared: Sequence[_Tool], namespace: str | None = None
) -> tuple[tuple[Tool, ...], frozenset[str], list[str]]:
    """Return the tools, the names of those that take text, and the types of those that only OpenAI has.

    A tool of a namespace bears its name before its own, with a dot.
    """
    tools: list[Tool] = []
    custom: set[str] = set()
    hosted: list[str] = []
    for tool in declared:
        name = _name(tool.name, namespace)
        if tool.type == "function":
            tools.append(function_tool(name, tool.description, tool.parameters))
        elif tool.type == "custom":
            custom.add(name)
            tools.append(text_tool(name, tool.description))
        elif tool.type == "namespace" and namespace is None:
            inner = _tools(tool.tools or (), tool.name)
            tools += inner[0]
            custom |= inner[1]
            hosted += inner[2]
        else:
            hosted.append(tool.type)
    return tuple(tools), frozenset(custom), hosted


def write(asked: Asked, said: Sequence[Said]) -> dict[str, Any]:
    """Return the body of an answer."""
    return _response(asked, said[0], _output(asked, said[0]), _usage(said[0]))


def _response(
    asked: Asked, said: Said, output: Sequence[dict[str, Any]], usage: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a response. Without its usage it is under way."""
    status = "in_progress" if usage is None else "incomplete" if said.is_cut else "completed"
    return {
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "instructions": None,
        "metadata": {},
        **asked.form.echo,
        "id": f"resp_{said.number}",
        "object": "response",
        "created_at": said.created,
        "model": asked.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": list(output),
        "usage": usage,
    }


def _output(asked: Asked, said: Said) -> list[dict[str, Any]]:
    number, message = said.number, said.message
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content})
    calls = [_call(asked, call) for call in message.get("tool_calls", ())]
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        status = "incomplete" if said.is_cut else "completed"
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": [part]}
        )
    return items + calls


def _call(asked: Asked, call: dict[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    space = next((found for found in asked.form.namespaces if name.startswith(f"{found}.")), None)
    item = {"call_id": call["id"], "name": name, "status": "completed"}
    if space is not None:
        item |= {"name": name.removeprefix(f"{space}."), "namespace": space}
    if name in asked.form.custom_tools:
        return {"type": "custom_tool_call", "id": f"ctc_{call['id']}", "input": input_of(arguments), **item}
    return {"type": "function_call", "id": f"fc_{call['id']}", "arguments": arguments_text(arguments), **item}


def _usage(said: Said) -> dict[str, Any]:
    return {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": said.cached_tokens},
        "output_tokens": said.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + said.completion_tokens,
    }


def events(asked: Asked, said: Sequence[Said]) -> Iterator[str]:
    """Yield the events of an answer."""
    (one,) = said
    begun = _response(asked, one, [], None)
    output = _output(asked, one)
    happened: list[tuple[str, dict[str, Any]]]
    happened = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
    for index, item in enumerate(output):
        happened += [(name, {"output_index": index, **data}) for name, data in _item_events(item)]
    end = "response.incomplete" if one.is_cut else "response.completed"
    happened.append((end, {"response": _response(asked, one, output, _usage(one))}))
    for number, (name, data) in enumerate(happened):
        yield event({"type": name, "sequence_number": number, **data}, name)


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events in which an item is sent, each with its name."""
    item_id = {"item_id": item["id"]}
    field = {"message": "content", "reasoning": "content", "custom_tool_call": "input", "function_call": "arguments"}
    content = field[item["type"]]
    empty = [] if content == "content" else ""
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", content: empty}}
    if content != "content":
        kind = "custom_tool_call_input" if content == "input" else "function_call_arguments"
        yield f"response.{kind}.delta", {**item_id, "delta": item[content]}
        yield f"response.{kind}.done", {**item_id, content: item[content], "name": item["name"]}
    else:
        part = item["content"][0]
        place = {**item_id, "content_index": 0}
        yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
        yield f"response.{part['type']}.delta", {**place, "delta": part["text"], "logprobs": []}
        yield f"response.{part['type']}.done", {**place, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"item": item}


def error_events(asked: Asked, refusal: RefusedError) -> Iterator[str]:
    """Yield the event of a refusal in a stream that has begun."""
    told = error(refusal)["error"]
    response = {"id": "resp_refused", "object": "response", "created_at": 0, "model": asked.model, "output": []}
    failed = {
        **response,
        "status": "failed",
        "error": {"code": told["code"], "message": told["message"]},
        "usage": None,
    }
    yield event({"type": "response.failed", "sequence_number": 0, "response": failed}, "response.failed")
