"""Data of the built-in environments, each file read once a process."""

import functools
import importlib.resources
from typing import Any

import yaml


def read_text(name: str) -> str:
    """Return the text of a file of this folder."""
    return importlib.resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def read_yaml(name: str) -> Any:
    """Return what a file of this folder holds; treat it as read-only."""
    return yaml.safe_load(read_text(name))
