"""A field's type, bounds, unit and default, said in words."""

from typing import Any

import yaml

_TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "null", "object": "mapping"}
_FORMATS = {"path": "path", "date": "date", "date-time": "time", "regex": "regular expression"}


def type_words(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return what a field takes: `int > 0, <= 100`, `sync | async`, `float | null`."""
    if reference := schema.get("$ref"):
        found = definitions.get(reference.rpartition("/")[2], {})
        return "section" if "properties" in found else type_words(found, definitions)
    if "enum" in schema:
        return " | ".join(map(_plain, schema["enum"]))
    if "const" in schema:
        return _plain(schema["const"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " | ".join(dict.fromkeys(type_words(part, definitions) for part in schema[several]))
    kind = schema.get("type")
    if kind == "array":
        if items := schema.get("prefixItems"):
            return f"[{', '.join(type_words(item, definitions) for item in items)}]"
        return f"list of {type_words(schema.get('items', {}), definitions)}"
    name = _FORMATS.get(schema.get("format", ""), _TYPES.get(kind or "", "any"))
    return f"{name} {', '.join(_bounds(schema))}".rstrip()


def unit_of(name: str) -> str:
    """Return the unit that a field's name tells: it ends in it."""
    if name.endswith("_s"):
        return "seconds"
    return "tokens" if name.endswith("_tokens") else "bytes" if name.endswith("_bytes") else ""


def default_words(schema: dict[str, Any]) -> str:
    """Return a field's default as a recipe has it, on one line; empty where there is none."""
    return _plain(schema["default"]) if "default" in schema else ""


def _bounds(schema: dict[str, Any]) -> list[str]:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    return [f"{sign} {_number(schema[key])}" for key, sign in signs.items() if key in schema]


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,g}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
