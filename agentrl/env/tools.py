"""`@tool`: a method becomes a tool, with a JSON schema from its annotations and its docstring."""

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from docstring_parser import parse
from pydantic import TypeAdapter, ValidationError

from agentrl.plain_data import PlainDataError, abbreviated, plain_data
from agentrl.types import Message

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__agentrl_tool__"


def tool(function: F) -> F:
    """Offer a method of a `ToolEnv` to the agent as a tool.

    Its name, annotations and docstring (Google, NumPy or reST style) become the tool's JSON schema. Coroutine functions
    run on a shared background loop under the environment's `tool_timeout_s`.
    """
    setattr(function, _MARK, True)
    return function


def tool_call(name: str, /, **arguments: Any) -> Message:
    """Return the assistant message that calls one tool: what an oracle says."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


class ToolCallError(Exception):
    """What the model wrote cannot be called; the message is for the model."""


def arguments_object(name: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call of tool `name` as a model writes them, an object or JSON of one.

    Raises:
        ToolCallError: in words that tell the model what is wrong.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ToolCallError(f"arguments of {name} are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolCallError(f"arguments of {name} must be a JSON object, got {type(arguments).__name__}")
    return arguments


def tool_schemas(tools: object) -> list[dict[str, Any]]:
    """Return what an environment offers as `tools`, as plain data in which every property has a schema that is a dict.

    Raises:
        PlainDataError: naming the entry that is no OpenAI-style schema.
    """
    schemas = plain_data(tools, "tools")
    if not isinstance(schemas, list):
        raise PlainDataError(f"tools is {abbreviated(tools)}; give a list of JSON schemas, OpenAI style")
    for number, schema in enumerate(schemas):
        function = schema.get("function") if isinstance(schema, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            raise PlainDataError(
                f"tools[{number}] is {abbreviated(schema)}, which is no OpenAI-style schema; give "
                "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}"
            )
        place, parameters = f"tools[{number}], {abbreviated(function['name'])}", function.get("parameters", {})
        if not isinstance(parameters, dict):
            raise PlainDataError(
                f"{place}: parameters is {abbreviated(parameters)}; give a JSON schema of type 'object'"
            )
        required = parameters.get("required", [])
        if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
            raise PlainDataError(f"{place}: required is {abbreviated(required)}; give a list of names")
        properties = parameters.get("properties", {})
        if not isinstance(properties, dict):
            raise PlainDataError(f"{place}: properties is {abbreviated(properties)}; map names to JSON schemas")
        for name, declared in properties.items():
            if isinstance(declared, bool):  # JSON schema's short form of anything, and of nothing
                properties[name] = {} if declared else {"not": {}}
            elif not isinstance(declared, dict) or not isinstance(declared.get("enum", []), list):
                raise PlainDataError(
                    f"{place}: property {abbreviated(name)} is {abbreviated(declared)}, no JSON schema"
                )
    return schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the environment's class declares it."""

    name: str
    schema: dict[str, Any]
    """JSON schema, OpenAI style: `{"type": "function", "function": {name, description, parameters}}`."""
    arguments: TypeAdapter[Any]
    """Validates keyword arguments; returns them, coerced, as a dict."""
    is_coroutine: bool

    def validate(self, arguments: Any) -> dict[str, Any]:
        """Return the keyword arguments for a call.

        Raises:
            ToolCallError: in words that tell the model what is wrong.
        """
        try:
            validated: dict[str, Any] = self.arguments.validate_python(arguments_object(self.name, arguments))
        except ValidationError as error:
            details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise ToolCallError(f"wrong arguments for {self.name}: {details}") from None
        return validated


def tool_specs(cls: type) -> dict[str, ToolSpec]:
    """Collect the tools of an environment class by name, in the order they are defined, base classes first."""
    specs = {}
    for base in reversed(cls.__mro__):
        for name, function in vars(base).items():
            if is_tool(function):
                specs[name] = _spec(name, function)
    return specs


@cache
def function_spec(function: Callable[..., Any]) -> ToolSpec:
    """Return a function that is no method as a tool."""
    return _spec(function.__name__, function, num_bound=0)


def is_tool(function: object) -> bool:
    """Tell whether a function is marked with `@tool`."""
    return bool(getattr(function, _MARK, False))


def _spec(name: str, function: Callable[..., Any], *, num_bound: int = 1) -> ToolSpec:
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = [p.replace(annotation=hints.get(p.name, Any)) for p in _parameters(function, num_bound)]

    def arguments(**kwargs: Any) -> dict[str, Any]:
        return kwargs

    # pydantic reads the signature and the annotations of the function it is given: those of the method without `self`.
    declared: Any = arguments
    declared.__signature__ = inspect.Signature(parameters)
    declared.__annotations__ = {p.name: p.annotation for p in parameters}
    adapter: TypeAdapter[Any] = TypeAdapter(declared)
    doc = parse(inspect.getdoc(function) or "")
    schema = adapter.json_schema()
    schema.setdefault("properties", {})
    for parameter in doc.params:
        if parameter.arg_name in schema["properties"] and parameter.description:
            schema["properties"][parameter.arg_name]["description"] = parameter.description
    for entry in schema["properties"].values():
        entry.pop("title", None)
    description = " ".join(filter(None, (doc.short_description, doc.long_description)))
    return ToolSpec(
        name=name,
        schema={"type": "function", "function": {"name": name, "description": description, "parameters": schema}},
        arguments=adapter,
        is_coroutine=inspect.iscoroutinefunction(function),
    )


def _parameters(function: Callable[..., Any], num_bound: int) -> list[inspect.Parameter]:
    """List the parameters after those that are bound (`self`), all as keywords: that is how a model gives them."""
    parameters = list(inspect.signature(function).parameters.values())[num_bound:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {function.__qualname__}: parameter {parameter} has no name a model could give")
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
