"""JSON schemas of the recipe's sections, with the sentence of each field as its description."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from agentrl.fields.docstrings import argument_docstrings, attribute_docstrings, first_paragraph, initializer

Schema = dict[str, Any]


class _Described(GenerateJsonSchema):
    """Takes descriptions from the strings under fields; what JSON has no type for may be anything."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        cls: Any = schema["cls"]
        sentences = attribute_docstrings(cls)
        for name, field in found.get("properties", {}).items():
            field.pop("title", None)
            if sentence := sentences.get(name):
                field.setdefault("description", sentence)
        found.pop("title", None)
        found["description"] = first_paragraph(cls)
        return found

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:  # noqa: ARG002
        return {}

    def emit_warning(self, kind: Any, detail: str) -> None:
        """Say nothing of defaults that are no JSON."""


def model_schema(cls: type[BaseModel]) -> Schema:
    """Return the schema of a section."""
    found: Schema = cls.model_json_schema(schema_generator=_Described)
    return found


def arguments_schema(function: Callable[..., Any], *, without: str | None = None) -> Schema:
    """Return the schema of the keyword arguments of a function or a constructor; all but `without`."""
    sentences, hints = argument_docstrings(function), _hints(function)
    fields, required, is_open = {}, [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif name != without and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            field = _type_schema(hints.get(name, Any))
            if sentence := sentences.get(name):
                field["description"] = sentence
            if parameter.default is parameter.empty:
                required.append(name)
            elif isinstance(parameter.default, bool | int | float | str | None):
                field["default"] = parameter.default
            fields[name] = field
    found: Schema = {"type": "object", "properties": fields, "additionalProperties": is_open}
    return found | ({"required": required} if required else {})


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(initializer(function), include_extras=True)
    except (NameError, TypeError):  # of names that only a type checker imports
        return {}


def _type_schema(annotation: Any) -> Schema:
    try:
        found: Schema = TypeAdapter(annotation).json_schema(schema_generator=_Described)
    except PydanticUserError:
        return {}
    return {} if "$defs" in found else found
