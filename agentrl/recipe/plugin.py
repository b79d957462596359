"""A section of the recipe that names a plug-in and holds its fields: `chat: {renderer: template, date: 2026-01-01}`.

Fields marked with `MayChange` may change when a run is resumed, and keep what was sampled. A change of any other is carried out
as well, but episodes since the last checkpoint are sampled again.
"""

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo

from agentrl.data.plain import abbreviated
from agentrl.errors import ConfigError, UserError
from agentrl.recipe import foreign_names
from agentrl.recipe.registry import Group, names, resolve, suggest

M = TypeVar("M", bound=BaseModel)

ELSEWHERE = "elsewhere"
"""In the context of a validation: fields of other sections, one of which may have been meant."""


class Seam(NamedTuple):
    """Kind of plug-ins: their entry points, and the section that names one."""

    group: Group
    """Group of the entry points."""
    section: str
    """Section of the recipe."""
    key: str
    """The section's field that names a plug-in: an entry point of the group, or `module:Class`."""


class Plugin(BaseModel):
    """Base of the recipe's sections that name a plug-in.

    A seam subclasses it and sets `seam`; a plug-in subclasses the seam, and its fields may stand in the section. Whatever
    validates the seam's class gets an instance of the class that the section names.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seam: ClassVar[Seam]

    @classmethod
    def named(cls, name: object) -> type[Self]:
        """Return the plug-in of this seam that has a name.

        Raises:
            ConfigError: when there is none.
        """
        return plugin_class(name, base=cls, group=cls.seam.group, field=f"{cls.seam.section}.{cls.seam.key}")

    @classmethod
    def _with_field(cls, field: str) -> list[str]:
        """List the installed plug-ins of this seam that have a field."""
        found = []
        for name in names(cls.seam.group):
            with suppress(ConfigError):  # one that cannot be loaded is reported when it is named
                found += [name] if field in cls.named(name).model_fields else []
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _of_the_class_named(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if "seam" not in vars(cls) or not isinstance(data, Mapping):
            return handler(data)
        _, section, key = cls.seam
        name = data.get(key, cls.model_fields[key].default)
        known = cls.named(name).model_fields
        for field in data:
            if field not in known and (others := cls._with_field(str(field))):
                raise ConfigError(
                    f"{section}.{field}: {name!r} has no such option; {' and '.join(map(repr, others))} "
                    f"{'has' if len(others) == 1 else 'have'}: remove it, or set {section}.{key}"
                )
        elsewhere = (info.context or {}).get(ELSEWHERE, ())
        return with_fields(cls.named(name), {**data, key: name}, name=name, section=section, elsewhere=elsewhere)


def plugin_class(name: object, *, base: type[M], group: Group, field: str) -> type[M]:
    """Return a class by its entry point's name or `module:Class`.

    Raises:
        ConfigError: naming `field`, when there is none, or it is no `base`, or is not whole.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{field}: expected an installed name or 'module:Class', got {name!r}")
    cls = resolve(name, group=group, field=field)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(f"{field}: {name!r} is {cls!r}, not a subclass of {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{field}: {name!r} does not define {', '.join(missing)}")
    return cls


def with_fields(
    cls: type[M], values: Mapping[str, Any], *, name: str, section: str, elsewhere: Iterable[str] = ()
) -> M:
    """Return a plug-in with the fields that its section of the recipe gives it.

    Args:
        cls: of the plug-in.
        values: of its fields.
        name: of the plug-in.
        section: of the recipe.
        elsewhere: fields of other sections, one of which may have been meant.

    Raises:
        ConfigError: a line for each field that is unknown (with the nearest name) or has an impossible value.
    """
    if unknown := [key for key in values if key not in cls.model_fields]:
        raise ConfigError(
            "\n".join(
                f"{section}.{key}: {name!r} has no such option."
                f"{suggest_field(str(key), cls.model_fields, value=values[key], elsewhere=elsewhere)}"
                for key in unknown
            )
        )
    try:
        return cls.model_validate(values, context={"section": section})  # for fields that hold another plug-in's
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, cls, section))) from error


def suggest_field(name: str, known: Iterable[str], *, value: object = None, elsewhere: Iterable[str] = ()) -> str:
    """Return what may have been meant by a field that its section does not have, as the end of an error.

    A field of this very name in another section comes first, then what other libraries call so, then the nearest name.
    """
    return foreign_names.at_home(name, elsewhere) or foreign_names.of_field(name, value) or suggest(name, known)


def explain(error: ValidationError, model: type[BaseModel], *path: str, elsewhere: Iterable[str] = ()) -> Iterator[str]:
    """Yield one line for each mistake: the field, what is wrong with it, what was given.

    Args:
        error: of validating `model`.
        model: a part of the recipe.
        path: the section of the recipe that it is.
        elsewhere: fields of all sections, one of which may have been meant.
    """
    misspelt = {entry["loc"][:-1] for entry in error.errors() if entry["type"] == "extra_forbidden"}
    for entry in error.errors():
        if entry["type"] == "missing" and entry["loc"][:-1] in misspelt:
            continue  # it may be the misspelt one
        where = ".".join(map(str, (*path, *entry["loc"])))
        if entry["type"] == "extra_forbidden":
            section: type[BaseModel] | None = model
            for part in (part for part in entry["loc"][:-1] if isinstance(part, str)):  # not a place in a list
                section = section_of(section.model_fields[str(part)].annotation) if section else None
            known, name = section.model_fields if section else (), str(entry["loc"][-1])
            value = entry["input"]
            hint = foreign_names.of_path(where, value) or suggest_field(name, known, value=value, elsewhere=elsewhere)
            # A section of another library's, whose own name says nothing or little.
            is_foreign = "Did you mean" not in hint or hint == foreign_names.of_field(name, value)
            below = (
                [f"{path}: no such field.{words}" for path, words in _known_below(where, value)] if is_foreign else []
            )
            yield from below or [f"{where}: no such field.{hint}"]
        elif entry["type"] == "value_error" and isinstance(cause := entry.get("ctx", {}).get("error"), ValueError):
            words = str(cause)
            if not isinstance(cause, UserError):  # begins with the name of a field of the section
                yield f"{where}.{words}" if where else words
            else:  # names a field of the recipe, unless it comes from a section within this one
                yield words if words.startswith(where) else f"{where}: {words}"
        elif entry["type"] == "model_type":
            yield f"{where}: expected a mapping of fields (got {_short(entry['input'])}){_hint(where, entry['input'])}"
        else:
            yield f"{where}: {entry['msg']} (got {_short(entry['input'])}){_hint(where, entry['input'])}"


def _known_below(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield each field of another library's section whose name here is known, and what it is."""
    for name, below in value.items() if isinstance(value, Mapping) else ():
        inner = f"{path}.{name}"
        if isinstance(below, Mapping):
            yield from _known_below(inner, below)
        elif hint := foreign_names.of_path(inner, below) or foreign_names.of_field(str(name), below):
            yield inner, hint


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model that a field holds. None: it is no section, or a mapping of them."""
    if get_origin(annotation) is dict:
        return None
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _hint(field: str, value: object) -> str:
    while field.rpartition(".")[2].isdigit():  # a place in a list
        field = field.rpartition(".")[0]
    hint = foreign_names.of_value(field, value)
    return hint and f".{hint}"


def _short(value: object) -> str:
    text = repr(value)
    return f"{text[:200]}{'...' if len(text) > 200 else ''}"


def checked_options(
    function: Callable[..., Any], options: Mapping[str, Any], *, told: Iterable[str], where: str
) -> dict[str, Any]:
    """Return a function's options as their annotations have them: a pattern compiled, a path as one.

    Args:
        function: that a recipe names.
        options: that the recipe gives it.
        told: names of arguments that it is given, and that are no options.
        where: it stands in the recipe, for error messages.

    Raises:
        UserError: for what it does not take, with the nearest name, and for a value that does not fit.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name, p in parameters.items() if name not in told and p.kind is not p.VAR_KEYWORD]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # noqa: BLE001 - of names that only a type checker imports, and of what is no function
        hints = {}
    checked = {}
    for name, value in options.items():
        if name in told or (name not in known and not takes_all):
            hint = suggest(name, known) if known else " It has none."
            raise UserError(f"{where} has no option {name!r}.{hint}")
        try:
            checked[name] = TypeAdapter(hints[name]).validate_python(value) if name in hints else value
        except PydanticUserError:  # of a class that pydantic does not know
            checked[name] = value
        except ValidationError as error:
            raise UserError(f"{where}: {name}: {error.errors()[0]['msg']}, got {abbreviated(value)}") from error
    return checked


@dataclass(frozen=True, slots=True)
class MayChange:
    """Mark of a field, or of a whole section: `env_timeout_s: Annotated[Seconds, MayChange()] = 60.0`.

    It is what one changes to get over a fault, or to look at a run otherwise: deadlines, bounds, budgets. Nothing but rounding
    comes out otherwise by it, so that episodes recorded since the last checkpoint stay as good as they were.
    """

    when: Callable[[Any], bool] = lambda _: True
    """Predicate of the section: whether the mark holds."""
    condition: str = ""
    """The same in words. Empty: it always holds."""


def fixed(section: BaseModel) -> dict[str, Any]:
    """Return the fields without a mark: what decides which weights come out of which episodes."""
    return _without_marked(section, section.model_dump(mode="json"))


def marked(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the names of the fields that may change, those of inner sections with dots."""
    for name, info in section.model_fields.items():
        if mark_of(info):
            yield prefix + name
            continue
        for inner in (info.annotation, *get_args(info.annotation)):  # the latter of a section that may be left out
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from marked(inner, f"{prefix}{name}.")


def _without_marked(section: BaseModel, dumped: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        mark, value = mark_of(info), getattr(section, name)
        if mark is None or not mark.when(section):
            kept[name] = _without_marked(value, dumped[name]) if isinstance(value, BaseModel) else dumped[name]
    return kept


def mark_of(info: FieldInfo) -> MayChange | None:
    """Return the mark of a field. None: it has none."""
    return next((entry for entry in info.metadata if isinstance(entry, MayChange)), None)
