"""What an episode is counted by: its tool calls, their errors, and what its environment logged."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from agentrl.plain_data import is_number
from agentrl.types import FinishReason, Turn

MAX_TOOLS = 64
"""Tools that are counted by name; calls of further ones are counted together."""


def episode_metrics(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return sums over the turns: `tool_errors`, `tool/NAME` of each tool offered, `tool/other`, and `log/NAME`.

    `tool/other` counts calls of what is no tool. A call in a turn that was cut off was not carried out, and is not counted.
    """
    errors = [turn.extras.get("tool_errors") for turn in turns]
    found = {"tool_errors": sum(float(count) for count in errors if is_number(count))}
    if tools:
        names = islice((str(tool["function"]["name"]) for tool in tools), MAX_TOOLS)
        found |= dict.fromkeys([f"tool/{name}" for name in names] + ["tool/other"], 0.0)
    for turn in turns:
        for name in _called(turn) if tools else ():
            key = f"tool/{name}"
            found[key if key in found else "tool/other"] += 1.0
        logged = turn.extras.get("logged")
        for name, number in logged.items() if isinstance(logged, dict) else ():
            if is_number(number):
                found[f"log/{name}"] = found.get(f"log/{name}", 0.0) + float(number)
    return found


def _called(turn: Turn) -> list[str]:
    """Return the names in a turn's calls, as the model wrote them."""
    if turn.finish_reason is not FinishReason.STOP:
        return []
    calls = turn.message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function.get("name")) if isinstance(function, dict) else "" for function in functions]
