"""Names to classes: an entry point's name, or `module:attribute`."""

import difflib
import importlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.foreign_names import of_value
from agentrl.plain_data import line_of

Group = Literal[
    "agentrl.envs",
    "agentrl.credit",
    "agentrl.engines",
    "agentrl.renderers",
    "agentrl.rewards",
    "agentrl.group_rewards",
    "agentrl.sandboxes",
    "agentrl.wrappers",
]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known name, or the list of all where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known) or 'none'}."


def names(group: Group) -> list[str]:
    """List the names that installed packages registered under an entry-point group."""
    return sorted(_points(group))


@cache
def _points(group: Group) -> dict[str, EntryPoint]:
    """Read the metadata of what is installed once: it takes milliseconds, and every episode makes an environment."""
    return {point.name: point for point in entry_points(group=group)}


def resolve(spec: str, *, group: Group, field: str, kind: str = "Class") -> Any:
    """Return what `spec` names: `name` (an entry point of `group`) or `module:attribute` (importable from here).

    Args:
        spec: the name.
        group: of entry points.
        field: of the recipe, for error messages.
        kind: what to call the attribute in them.

    Raises:
        ConfigError: naming `field`, when nothing of that name exists, or when its module cannot be imported.
    """
    if ":" in spec:
        return import_attribute(spec, field=field, kind=kind)
    if spec not in (points := _points(group)):
        hint = of_value(field, spec) or f"{suggest(spec, names(group))} Or give it as 'module:{kind}'."
        raise ConfigError(f"{field}: no {spec!r} is installed.{hint}")
    try:
        return points[spec].load()
    except (Exception, SystemExit) as error:  # a stranger's package may raise anything while it is imported
        raise ConfigError(
            f"{field}: the installed {spec!r} ({points[spec].value}) could not be loaded: {type(error).__name__}: {error}"
        ) from error


def import_named(name: str, *, spec: str, field: str) -> ModuleType:
    """Return a module.

    Args:
        name: of the module.
        spec: what names it, for error messages.
        field: of the recipe, for error messages.

    Raises:
        ModuleNotFoundError: where there is none.
        ConfigError: naming `field`, for whatever else it ends in.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise
        words = f"ended in sys.exit({error})" if isinstance(error, SystemExit) else f"raised {line_of(error)}"
        raise ConfigError(f"{field}: importing {name!r} of {spec!r} {words}") from error


def import_attribute(spec: str, *, field: str, kind: str = "Class") -> Any:
    """Return what `module:attribute` names.

    Args:
        spec: the two names.
        field: of the recipe, for error messages.
        kind: what to call the attribute in them.

    Raises:
        ConfigError: naming `field`, when there is no such thing, or when the module cannot be imported.
    """
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise ConfigError(f"{field}: {spec!r} lacks its {'attribute' if name else 'module'}; write 'module:{kind}'")
    try:
        module = import_named(name, spec=spec, field=field)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{field}: cannot import {name!r} of {spec!r} ({error}). Run from the folder that holds it, or install it."
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{field}: module {name!r} has no {attribute!r}.{suggest(attribute, known)}") from None
