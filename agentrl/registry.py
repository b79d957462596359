"""Names to classes: an entry point's name, or `module:attribute`."""

import difflib
import importlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from agentrl.errors import ConfigError

Group = Literal["agentrl.envs", "agentrl.credit"]


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


def resolve(spec: str, *, group: Group, field: str) -> Any:
    """Return what `spec` names: `name` (an entry point of `group`) or `module:attribute` (importable from here).

    Raises:
        ConfigError: naming `field`, when nothing of that name exists.
    """
    if ":" in spec:
        module, _, attribute = spec.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{field}: cannot import {module!r} of {spec!r} ({error}). Run from the folder that holds it, or install it."
            ) from error
        except AttributeError:
            known = [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]
            raise ConfigError(f"{field}: module {module!r} has no {attribute!r}.{suggest(attribute, known)}") from None
    if spec in (points := _points(group)):
        return points[spec].load()
    raise ConfigError(f"{field}: no {spec!r} is installed.{suggest(spec, names(group))} Or give it as 'module:Class'.")
