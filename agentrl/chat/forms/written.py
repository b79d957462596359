"""Whether calls are read as they were written."""

import json
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agentrl.chat.renderer import Tools
from agentrl.errors import RendererError
from agentrl.plain_data import abbreviated
from agentrl.types import Message


def check_written(message: Message, parse: Callable[[Tools], Message], *, by: str) -> None:
    """Check that the calls of a message are read as they were written, with tools that have just such arguments.

    Args:
        message: an assistant's.
        parse: reads with these tools what was written.
        by: who wrote it.

    Raises:
        RendererError: where they are not: some templates do not escape what they quote.
    """
    calls = _calls(message)
    if calls and _told(_calls(parse(_tools(calls)))) != _told(calls):
        raise RendererError(
            f"chat.renderer: a call is read otherwise than {by} writes it, because it does not escape arguments: "
            f"{abbreviated(calls)}"
        )


def _calls(message: Message) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions if function["name"]]


def _tools(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    given: dict[str, dict[str, list[object]]] = {}
    for name, arguments in calls:
        values = given.setdefault(name, {})
        for key, value in arguments.items():
            values.setdefault(key, []).append(value)
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {key: {"enum": values[key]} for key in values}},
            },
        }
        for name, values in given.items()
    ]


def _told(calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, str]]]:
    return [(name, {key: _text(value) for key, value in arguments.items()}) for name, arguments in calls]


def _text(value: object) -> str:
    """Return an argument as text, composed (NFC): some tokenizers compose what they encode."""
    text = value if isinstance(value, str) else json.dumps(value)
    with suppress(ValueError, RecursionError):  # two calls may give one argument text and a number
        text = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    return unicodedata.normalize("NFC", text)
