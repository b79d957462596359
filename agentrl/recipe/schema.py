"""The JSON schema of a whole recipe, by which editors complete and check."""

from collections.abc import Iterable, Sequence
from typing import Any

from agentrl.recipe.config import Recipe
from agentrl.recipe.fields import Schema, Section, model_schema

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
