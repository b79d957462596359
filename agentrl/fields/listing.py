"""Every section of the recipe, those of plug-ins under each of their names, and what each field takes."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel

from agentrl.config import Recipe
from agentrl.errors import ConfigError
from agentrl.fields.docstrings import first_paragraph
from agentrl.fields.schema import Schema, arguments_schema, model_schema
from agentrl.fields.words import default_words, type_words, unit_of
from agentrl.may_change import mark_of
from agentrl.plugin import Plugin, section_of
from agentrl.registry import Group, names, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What a recipe may say at one place."""

    path: str
    type: str
    """In words, with bounds."""
    unit: str
    """Empty: the sentence says it, or there is none."""
    default: str
    """As a recipe has it; empty: it must be given."""
    sentence: str
    on_resume: str
    """What becomes of what was sampled since the last checkpoint where a resumed run changes the field."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Fields that stand together."""

    path: str
    """Of the recipe; empty: its top. A `0` in it is a place in a list."""
    choice: str
    """What names the plug-in that has these fields, as in `scheme: gigpo`; empty: the section is always there."""
    sentence: str
    fields: tuple[Field, ...]
    schema: Schema

    @property
    def title(self) -> str:
        """Its path, and what it belongs to."""
        return f"{self.path or 'the top of a recipe'}{f', with {self.choice}' if self.choice else ''}"

    @property
    def plugin(self) -> str:
        """Name of the plug-in; empty where there is none."""
        return self.choice.partition(": ")[2]


@cache
def sections(*, with_environments: bool = True) -> tuple[Section, ...]:
    """Return all sections in the order of the recipe; a plug-in that cannot be loaded is left out: who names it is told why.

    Without environments it takes a second less: some import much.
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
