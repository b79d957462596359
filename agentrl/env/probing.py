"""What to say to an environment of which nothing but its tools is known."""

from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.types import Message

CALL_ID = "call_0"


def bad_actions(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str | Message, bool]]:
    """Yield what it is, the action, and whether a `ToolEnv` must answer it with an error."""
    yield "plain text", "hello", False
    yield "empty text", "", False
    yield "unicode text", "naïve \u2603 \U0001f600 \x00 \u202e", False
    yield "very long text", "x" * 100_000, False
    yield "a message with content None and a call", {**call("no_such_tool", {}), "content": None}, True
    yield "an unknown tool", call("no_such_tool", {}), True
    yield "an unknown tool with a very long name", call("x" * 100_000, {}), True
    yield "a malformed call", call("", '{"name": '), True
    for function in (schema["function"] for schema in tools if is_schema(schema)):
        name, properties = function["name"], function["parameters"].get("properties", {})
        yield f"{name} with malformed JSON", call(name, "{"), True
        yield f"{name} with a list of arguments", call(name, [1]), True
        yield f"{name} with an argument it does not have", call(name, {"no such argument": "\ud800"}), True
        yield f"{name} without arguments", call(name, {}), False
        yield f"{name} with arguments of a wrong type", call(name, {p: {"no": [None]} for p in properties}), False
        yield f"{name} with huge numbers", call(name, dict.fromkeys(properties, 10**400)), False
        yield f"{name} with very long texts", call(name, dict.fromkeys(properties, "9" * 100_000)), False


def is_schema(schema: Any) -> bool:
    """Tell whether a tool's schema is sound enough to call it."""
    function = schema.get("function") if isinstance(schema, dict) else None
    return isinstance(function, dict) and "name" in function and isinstance(function.get("parameters"), dict)


def likely_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that a tool may well accept."""
    values = {"integer": 1, "number": 0.5, "string": "a", "boolean": True, "array": [], "object": {}}
    properties: dict[str, Any] = schema["function"]["parameters"].get("properties", {})
    return {name: (p.get("enum") or [values.get(str(p.get("type")), "a")])[0] for name, p in properties.items()}


def call(name: str, arguments: Any) -> Message:
    """Return a message with one call, whose arguments may be anything."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
    }
