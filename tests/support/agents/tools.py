"""The tool and the questions of the client programs."""

from typing import Any

MODEL = "policy"
FIRST, SECOND = "What is 6 times 7?", "And 7 more?"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b
