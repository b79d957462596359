"""Fields of a recipe for people: every section, those of plug-ins under each of their names, as text, Markdown and JSON schema.

The sentence of a field is the string under it in its class, or its entry under `Args` of a constructor.
"""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_origin, get_type_hints

import docstring_parser
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe
from agentrl.recipe.plugin import Plugin, mark_of, section_of
from agentrl.recipe.registry import Group, names, resolve


@cache
def attribute_docstrings(cls: type[Any]) -> dict[str, str]:
    """Return the string under each annotated attribute of a class and its bases, by name; none if the source is gone."""
    found: dict[str, str] = {}
    for base in (base for base in reversed(cls.__mro__) if base not in (object, BaseModel)):
        try:
            [node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # of builtins, and of what was typed in
            continue
        for line, below in pairwise(node.body if isinstance(node, ast.ClassDef) else []):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[line.target.id] = one_line(below.value.value)
    return found


def argument_docstrings(function: Callable[..., Any]) -> dict[str, str]:
    """Return the entry of each argument in a function's or constructor's docstring, by name."""
    text = inspect.getdoc(initializer(function)) or ""
    return {p.arg_name: one_line(p.description or "") for p in docstring_parser.parse(text).params}


def initializer(function: Callable[..., Any]) -> Any:
    """Return what takes the arguments: a class's `__init__`, or the function itself."""
    return getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009 - mypy forbids the dot


def first_paragraph(documented: object) -> str:
    """Return the first paragraph of a docstring of its own, on one line."""
    return one_line((getattr(documented, "__doc__", None) or "").strip().partition("\n\n")[0])


def one_line(text: str) -> str:
    """Return a text with all its white space made single spaces."""
    return " ".join(text.split())


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
    fields = {}
    required = []
    is_open = False
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
    """Return the unit in which a field's name ends."""
    if name.endswith("_s"):
        return "seconds"
    return "tokens" if name.endswith("_tokens") else "bytes" if name.endswith("_bytes") else ""


def default_words(schema: dict[str, Any]) -> str:
    """Return a field's default as a recipe has it, on one line; empty if there is none."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Field of a recipe."""

    path: str
    type: str
    """In words, with bounds."""
    unit: str
    """Empty: the sentence says it, or there is none."""
    default: str
    """Default as a recipe writes it; empty: it must be given."""
    sentence: str
    on_resume: str
    """Fate of what was sampled since the last checkpoint if a resumed run changes the field."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Fields that stand together."""

    path: str
    """Path in the recipe; empty: its top. A `0` in it is a place in a list."""
    choice: str
    """Name of the plug-in that has these fields, as in `scheme: gigpo`; empty: the section is always there."""
    sentence: str
    fields: tuple[Field, ...]
    schema: Schema

    @property
    def title(self) -> str:
        """Its path, and what it belongs to."""
        return f"{self.path or 'the top of a recipe'}{f', with {self.choice}' if self.choice else ''}"

    @property
    def plugin(self) -> str:
        """Name of the plug-in; empty if there is none."""
        return self.choice.partition(": ")[2]


@cache
def sections(*, with_environments: bool = True) -> tuple[Section, ...]:
    """Return all sections in the order of the recipe.

    A plug-in that cannot be loaded is left out: a recipe that names it is refused with the reason. Without environments it
    takes a second less: some import much.
    """
    found = list(_sections(Recipe))
    place = next(place for place, section in enumerate(found, 1) if section.path == "env")
    return (*found[:place], *(_of_environments() if with_environments else ()), *found[place:])


def _sections(model: type[BaseModel], path: str = "", choice: str = "", *, is_kept: bool = False) -> Iterator[Section]:
    """Yield a section and those within it; `is_kept` where it is marked as a whole."""
    yield _of_model(model, path, choice, is_kept=is_kept)
    for name, info in model.model_fields.items():
        within, kept = f"{path}.{name}" if path else name, is_kept or bool(mark_of(info))
        section = section_of(info.annotation)
        if within == "credit":
            yield from _of_plugins("agentrl.credit", within, "scheme", is_kept=kept)
        elif section is not None and issubclass(section, Plugin):
            yield from _of_plugins(section.seam.group, within, section.seam.key, is_kept=kept)
        elif section is not None:
            place = f"{within}.0" if get_origin(info.annotation) is tuple else within
            yield from _sections(section, place, choice, is_kept=kept)


def _of_plugins(group: Group, path: str, key: str, *, is_kept: bool = False) -> Iterator[Section]:
    for name, found in _installed(group):
        yield from _sections(found, path, f"{key}: {name}", is_kept=is_kept)


def _of_environments() -> Iterator[Section]:
    """Yield what stands under `env.options` and `env.wrappers`, and the sandboxes that some environments have."""
    for name, env in _installed("agentrl.envs"):
        yield _of_arguments(env, "env.options", f"env.id: {name}")
    for name, wrapper in _installed("agentrl.wrappers"):
        yield _of_arguments(wrapper, "env.wrappers.0", f"id: {name}", without="env")
    yield from _of_plugins("agentrl.sandboxes", "env.options.sandbox", "name")


def _installed(group: Group) -> Iterator[tuple[str, Any]]:
    for name in names(group):
        with suppress(ConfigError), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of what adapters import
            yield name, resolve(name, group=group, field=group)


def _of_model(model: type[BaseModel], path: str, choice: str, *, is_kept: bool = False) -> Section:
    schema = model_schema(model)
    marks = {name: mark_of(info) for name, info in model.model_fields.items()}
    kept = {name: f"kept {mark.condition}".strip() for name, mark in marks.items() if mark}
    sections = [name for name, info in model.model_fields.items() if _is_section(info.annotation)]
    given = {name: field for name, field in schema["properties"].items() if name not in sections}
    fields = _fields(given, path, schema, dict.fromkeys(given, "kept") if is_kept else kept)
    return Section(path=path, choice=choice, sentence=first_paragraph(model), fields=fields, schema=schema)


def _of_arguments(function: Callable[..., Any], path: str, choice: str, *, without: str | None = None) -> Section:
    schema = arguments_schema(function, without=without)
    if schema["additionalProperties"] and (
        model := getattr(function, "options_model", None)
    ):  # they are its `**options`
        further = model_schema(model)
        schema |= {key: schema.get(key, {}) | further.get(key, {}) for key in ("properties", "$defs")}
        schema["additionalProperties"] = False
    fields = _fields(schema["properties"], path, schema, {})
    return Section(path=path, choice=choice, sentence=first_paragraph(function), fields=fields, schema=schema)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _fields(given: Schema, path: str, schema: Schema, on_resume: Mapping[str, str]) -> tuple[Field, ...]:
    return tuple(
        Field(
            path=f"{path}.{name}" if path else name,
            type=type_words(field, schema.get("$defs", {})),
            unit=unit_of(name),
            default=default_words(field),
            sentence=field.get("description", ""),
            on_resume=on_resume.get(name, "sampled again"),
        )
        for name, field in given.items()
    )


_HEAD = """# Fields of a recipe

Written by `agentrl fields --markdown`; `agentrl fields SECTION` prints a part of it, with the plug-ins that are installed,
and `agentrl fields --json-schema` writes the same for editors. Every field can be given on the command line:
`--rollout.group_size 4`.

*On resume*: a resumed run may change any field. Where it says *kept*, the field changes how a run is carried out, and what
was sampled since the last checkpoint is kept; where it says *sampled again*, the field changes what is learned, and those
episodes are sampled again.
"""


def page(sections: Sequence[Section]) -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(line for section in sections for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    choice = f", with `{section.choice}`" if section.choice else ""
    yield f"## {f'`{section.path}`' if section.path else 'At the top'}{choice}\n"
    yield f"{section.sentence}\n"
    if section.fields:
        yield "| field | takes | default | what it is | on resume |\n|---|---|---|---|---|"
        yield from map(_row, section.fields)
        yield ""


def _row(field: Field) -> str:
    takes = f"{field.type}{f' ({field.unit})' if field.unit else ''}"
    default = f"`{field.default}`" if field.default else "must be given"
    cells = (f"`{field.name}`", takes, default, field.sentence, field.on_resume)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


Found = list[tuple[Section, tuple[Field, ...]]]


def find(what: str, sections: Sequence[Section]) -> Found:
    """Return the sections of a path with all their fields; else a plug-in's (`credit.gigpo`, `gigpo`), and single fields."""
    if not what:
        return [(section, section.fields) for section in sections]
    if within := [s for s in sections if s.path == what or s.path.startswith(f"{what}.")]:
        return [(section, section.fields) for section in within]
    seam, _, name = what.rpartition(".")
    plugins = [(s, s.fields) for s in sections if s.plugin == name and s.path.startswith(seam)]
    chosen = ((s, tuple(f for f in s.fields if what in (f.path, f.name))) for s in sections)
    return [*plugins, *((section, fields) for section, fields in chosen if fields)]
