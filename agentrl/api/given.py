"""What a script hands in where a recipe has names: classes, functions and sections, as a recipe writes them down."""

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agentrl.credit import CreditScheme
from agentrl.errors import ConfigError
from agentrl.plain_data import PlainDataError, abbreviated, plain_data
from agentrl.plugin import Plugin
from agentrl.registry import Group, spec_of

_KEYS = {"env": "id", "model": "name_or_path", "credit": "scheme", "engine": "name", "chat": "renderer"}
"""Field of a section that a lone name stands for: `env=MyEnv` is `env={"id": MyEnv}`."""
_GROUPS: dict[str, Group] = {"env": "agentrl.envs", "credit": "agentrl.credit"}


def sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections of a recipe as plain data; those that are None are left out.

    A class or a function becomes its name, and resolves in this process even where it cannot be imported. A credit scheme, or
    the config of an engine or a renderer, becomes its name and its fields.

    Raises:
        ConfigError: naming the field, for what cannot be written down, with what to give instead.
    """
    return {name: _section(name, value) for name, value in given.items() if value is not None}


def _section(name: str, value: Any) -> Any:
    if isinstance(value, CreditScheme | Plugin):
        return {_KEYS[name]: spec_of(type(value), group=_GROUPS.get(name)), **_fields(value)}
    if isinstance(value, BaseModel):
        return _fields(value)
    if callable(getattr(value, "state_dict", None)):
        raise ConfigError(
            f"{name}: give the name or the folder of a model, so that the run can be resumed; write this one with "
            "model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER)"
        )
    plain = _plain(value, name, group=_GROUPS.get(name))
    return {_KEYS[name]: plain} if name in _KEYS and not isinstance(plain, dict) else plain


def _fields(section: BaseModel) -> dict[str, Any]:
    fields: dict[str, Any] = section.model_dump(mode="json")
    if isinstance(section, Plugin):
        fields.pop(section.seam.key, None)
    return fields


def _plain(value: Any, place: str, *, group: Group | None = None) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _plain(item, f"{place}.{key}", group=group if key == "id" else None) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, type) or inspect.isroutine(value):
        if value.__name__ == "<lambda>":
            raise ConfigError(
                f"{place}: a lambda has no name that a recipe could hold; write it as a function with `def`"
            )
        return spec_of(value, group=group)
    try:
        return plain_data(value, place)
    except PlainDataError as error:
        raise ConfigError(
            f"{error}; give a class or a function, whose name a recipe can hold, or plain data (got {abbreviated(value)})"
        ) from error
