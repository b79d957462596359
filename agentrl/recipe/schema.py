"""A whole recipe for editors, which complete and check: the JSON schema of its file, the types of its sections in Python."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from agentrl.learn.config import algorithms
from agentrl.recipe.config import NAMED, Recipe
from agentrl.recipe.fields import Schema, Section, attribute_docstrings, first_paragraph, model_schema
from agentrl.recipe.plugin import Plugin

_HEAD = '''"""Sections of a recipe as `agentrl.train` takes them. Made by `make fields`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import BaseModel
'''
_CREDIT, _DRAFT = "#/$defs/credit", "https://json-schema.org/draft/2020-12/schema"


def recipe_schema(sections: Sequence[Section]) -> Schema:
    """Return the schema: the recipe's own sections, and in each that names a plug-in those of all that are installed.

    What is given as `module:Class` may have any field.
    """
    schema = model_schema(Recipe)
    definitions, properties = schema["$defs"], schema["properties"]
    for path, key in (("chat", "renderer"), ("engine", "name"), ("credit", "scheme")):
        plugins = [section for section in sections if section.path == path and section.choice]
        definitions[path] = _by_name(key, plugins, definitions)
        properties[path] = {"$ref": f"#/$defs/{path}", "description": properties[path].get("description", "")}
    _add_fallback(definitions["credit"])
    _add_names(properties, definitions)
    _add_environments(definitions["EnvConfig"], sections, definitions)
    for unused in ("EngineConfig", "RendererConfig"):
        definitions.pop(unused, None)
    for part in (schema, *definitions.values()):
        for field in part.get("properties", {}).values():
            if isinstance(field.get("default"), dict) and "$ref" in field:
                del field["default"]
    return {"$schema": _DRAFT, "title": "a recipe of agentrl", **schema}


def _by_name(key: str, plugins: Iterable[Section], definitions: Schema) -> Schema:
    """Return the schema of a section that names a plug-in under `key`."""
    names = []
    rules = []
    naming = {}
    for section in plugins:
        names.append(section.plugin)
        fields = dict(section.schema["properties"])
        naming = fields.pop(key, {})
        condition: Schema = {"properties": {key: {"const": section.plugin}}}
        if section.plugin != naming.get("default"):
            condition["required"] = [key]
        rules.append({"if": condition, "then": _closed(section, fields, key)})
        definitions.update(section.schema.get("$defs", {}))
    words = {"description": naming["description"]} if naming else {}
    name = {"anyOf": [{"enum": names}, {"type": "string", "pattern": ":"}], **words}
    return {"type": "object", "properties": {key: name}, "allOf": rules}


def _closed(section: Section, fields: dict[str, Any], key: str) -> Schema:
    """Return the schema of a plug-in's fields and the field that names it, and no other."""
    nested = {name: _nested_credit(field) for name, field in fields.items()}
    return {"properties": {key: {}, **nested}, "additionalProperties": False, "description": section.sentence}


def _nested_credit(field: Schema) -> Schema:
    """Let a field that holds another credit scheme be completed as such."""
    default = field.get("default")
    is_scheme = isinstance(default, dict) and "scheme" in default
    return {"$ref": _CREDIT, "description": field.get("description", "")} if is_scheme else field


def _add_fallback(credit: Schema) -> None:
    fallback = {"const": "uniform", "description": "Replaces a scheme that the environment cannot serve."}
    credit["required"] = ["scheme"]
    credit["properties"]["fallback"] = fallback
    for rule in credit["allOf"]:
        rule["then"]["properties"]["fallback"] = {}


def _add_names(properties: Schema, definitions: Schema) -> None:
    """Let a name stand for the sections `loss` and `credit`."""
    names = {"enum": list(algorithms())}
    definitions["LossConfig"]["properties"]["algorithm"] |= names
    schemes = definitions["credit"]["properties"]["scheme"]
    for section, name in (("loss", names), ("credit", {"anyOf": schemes["anyOf"]})):
        reference = properties[section].pop("$ref")
        properties[section] = {"anyOf": [name, {"$ref": reference}], **properties[section]}


def _add_environments(env: Schema, sections: Sequence[Section], definitions: Schema) -> None:
    """Say what stands under `options` for each environment, and beside `id` for each wrapper."""
    options = [section for section in sections if section.path == "env.options"]
    env["allOf"] = [_options_rule(section, env["properties"]["id"].get("default")) for section in options]
    names = {"enum": [section.plugin for section in options]}
    env["properties"]["id"] |= {"anyOf": [names, {"type": "string"}]}
    wrappers = [section for section in sections if section.path == "env.wrappers.0"]
    item = _by_name("id", wrappers, definitions)
    env["properties"]["wrappers"]["items"] = item | {"required": ["id"]}
    for section in options:
        definitions.update(section.schema.get("$defs", {}))


def _options_rule(section: Section, default: str | None) -> Schema:
    fields = {key: value for key, value in section.schema.items() if key not in ("$defs", "description")}
    condition: Schema = {"properties": {"id": {"const": section.plugin}}}
    if section.plugin != default:
        condition["required"] = ["id"]
    return {"if": condition, "then": {"properties": {"options": fields | {"description": section.sentence}}}}


def section_types() -> str:
    """Return a stub with a `TypedDict` for each section, by which editors complete `agentrl.train(rollout={...})`.

    Sections of plug-ins are plain mappings: their fields depend on the plug-in that they name.
    """
    classes: dict[str, str] = {}
    for alone in ("env", "model"):
        _type_source(Recipe.model_fields[alone].annotation, classes)
    _add_class(Recipe, classes, leave_out={"env", "agent", "model", "credit"})
    return "\n\n".join([_HEAD, *classes.values()])


def _add_class(model: type[BaseModel], classes: dict[str, str], *, leave_out: Collection[str] = ()) -> str:
    """Add the `TypedDict` of a section behind those that it needs; return its name."""
    name = "Sections" if model is Recipe else model.__name__.removesuffix("Config") + "Section"
    if name not in classes:
        words = attribute_docstrings(model)
        lines = [f"class {name}(TypedDict, total=False):", f'    """{first_paragraph(model)}"""', ""]
        for field, info in model.model_fields.items():
            if field not in leave_out:
                short = "str | " if model is Recipe and field in NAMED else ""
                lines.append(f"    {field}: {short}{_type_source(info.annotation, classes)}")
                lines += [f'    r"""{words[field]}"""'] if field in words else []
        classes[name] = "\n".join(lines) + "\n"
    return name


def _type_source(annotation: Any, classes: dict[str, str]) -> str:
    """Return the source of a type that accepts what a recipe accepts at a field."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _type_source(arguments[0], classes)
    if kind is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if kind in (Union, UnionType):
        return " | ".join(dict.fromkeys(_type_source(each, classes) for each in arguments))
    if kind in (list, tuple):
        return f"Sequence[{_type_source(arguments[0], classes)}]"
    if kind is dict:
        return "Mapping[str, Any]"
    if annotation in (int, float, str, bool):
        return str(annotation.__name__)
    if annotation in (None, NoneType):
        return "None"
    if annotation is Path:
        return "str | Path"
    if not isinstance(annotation, type) or not issubclass(annotation, BaseModel) or issubclass(annotation, Plugin):
        return "Any"
    return f"{_add_class(annotation, classes)} | Mapping[str, Any] | BaseModel"
