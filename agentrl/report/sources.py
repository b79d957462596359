"""The files of code that a recipe names: noted as a run begins, so that what was trained on other code is found out."""

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from agentrl.data.files import read_json, write_whole
from agentrl.report.folder import RunFolder

Sources = Mapping[str, str]
"""SHA-256 of the file of each module, by the module's name."""

_SOURCES = TypeAdapter(dict[str, str])
_NAME = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_][\w./-]*")
"""`module:Class`, or `module:id` of Gymnasium's."""


def sources(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a recipe: of the modules that it names in `module:attribute`, where each is a file.

    What such a file imports is not looked at. Nothing is imported.
    """
    modules = sorted({match[1] for text in _strings(config) if (match := _NAME.fullmatch(text))})
    files = {module: _file_of(module) for module in modules}
    return {module: hashlib.sha256(file.read_bytes()).hexdigest() for module, file in files.items() if file is not None}


def note_sources(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Note the sources with which a run begins, if its recipe names some."""
    if found := sources(config):
        write_whole(folder.sources, _SOURCES.dump_json(found, indent=1))


def read_sources(folder: RunFolder) -> dict[str, str]:
    """Return the sources with which a run began; empty if none are noted.

    Raises:
        ConfigError: if the file is damaged.
    """
    if not os.path.lexists(folder.sources):
        return {}
    return read_json(
        folder.sources, _SOURCES, fix="delete it, and nothing is known of the code that the run began with"
    )


def differing(one: Sources, other: Sources) -> list[str]:
    """List the modules of both whose files are not the same."""
    return [module for module in one if module in other and one[module] != other[module]]


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _strings(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _strings(value)


def _file_of(module: str) -> Path | None:
    """Return the file of a module: the first on the path."""
    for folder in sys.path:
        place = Path(folder, *module.split("."))
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None
