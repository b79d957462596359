"""Arguments that a form writes as text get the JSON types that the tool's schema asks for."""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.chat.renderer import Tools

_PYTHON = {"None": "null", "True": "true", "False": "false"}
"""What some templates write in place of JSON's words."""
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
    """Return the schema of an argument, and the one that it is part of; None where there is none."""
    for tool in tools:
        declared = tool.get("function", tool)
        if declared.get("name") == name:
            whole = declared.get("parameters") or {}
            return whole.get("properties", {}).get(key, whole.get("additionalProperties")), whole
    return None, {}


def _types(schema: Any, whole: Any) -> set[str]:
    """Return the types that a schema allows: all where it names none, none where there is no schema.

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
