"""Names to classes: an entry point's name, or `module:attribute`."""

import difflib
import importlib
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from agentrl.data.files import absolute
from agentrl.data.plain import line_of
from agentrl.errors import ConfigError
from agentrl.recipe.foreign_names import of_value

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


_handed_in: dict[str, Any] = {}
"""Classes and functions that a script or notebook has defined, by the names under which recipes of this process know them."""
importing: list[str] = []
"""Modules that are being imported because something names them, the outermost first."""


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
        ModuleNotFoundError: if there is none.
        ConfigError: naming `field`, for whatever else it ends in.
    """
    importing.append(name)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise
        words = f"ended in sys.exit({error})" if isinstance(error, SystemExit) else f"raised {line_of(error)}"
        raise ConfigError(f"{field}: importing {name!r} of {spec!r} {words}") from error
    finally:
        importing.pop()


def spec_of(defined: Any, *, group: Group | None = None) -> str:
    """Return the name of a class or a function: an entry point of `group`, or `module:attribute`.

    In this process the name resolves to it wherever it was defined. Elsewhere, what a script defines is found where its
    file can be imported from the working directory (`examples/mine.py`: `examples.mine:MyEnv`).
    """
    module, attribute = defined.__module__, defined.__qualname__
    spec = f"{_module_of_script() if module == '__main__' else module}:{attribute}"
    known = {point.value: name for name, point in (_points(group) if group else {}).items()}
    if spec in known:
        return known[spec]
    if module == "__main__" or getattr(sys.modules.get(module), attribute, None) is not defined:
        _handed_in[spec] = defined
    return spec


def _module_of_script() -> str:
    """Return the name under which the script that is running could be imported, if it can."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return "__main__"
    path = Path(file).resolve().with_suffix("")
    here = absolute("")
    parts = path.relative_to(here).parts if path.is_relative_to(here) else (path.name,)
    return ".".join(parts) if all(part.isidentifier() for part in parts) else "__main__"


def import_attribute(spec: str, *, field: str, kind: str = "Class") -> Any:
    """Return what `module:attribute` names.

    Args:
        spec: the two names.
        field: of the recipe, for error messages.
        kind: what to call the attribute in them.

    Raises:
        ConfigError: naming `field`, when there is no such thing, or when the module cannot be imported.
    """
    if spec in _handed_in:
        return _handed_in[spec]
    name, _, attribute = spec.partition(":")
    if name == "__main__" or "<locals>" in attribute:
        raise ConfigError(
            f"{field}: {spec!r} was defined in a notebook or inside a function, where nothing else finds it. Go on there, with "
            f"agentrl.train(RUN, ...), or move it into a module and name it 'module:{kind}'"
        )
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
