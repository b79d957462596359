"""An agent with a tool, written with the openai SDK and nothing of agentrl: it plays the tasks of examples/agent.yaml."""

import json
import operator
from typing import Any

from openai import AsyncOpenAI

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBER = {"type": "integer"}
PARAMETERS = {"a": NUMBER, "operator": {"enum": list(OPERATORS)}, "b": NUMBER}
CALC = {
    "name": "calc",
    "description": "Compute one operation.",
    "parameters": {"type": "object", "properties": PARAMETERS, "required": list(PARAMETERS)},
}


def calc(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(OPERATORS[given["operator"]](int(given["a"]), int(given["b"])))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error!r}"


async def solve(task: dict[str, Any], session: Any) -> dict[str, Any]:
    client: Any = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [{"role": "user", "content": f"{task['question']} Answer with the number alone."}]
    for _ in range(4):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": CALC}]
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            success = (message.content or "").strip() == task["answer"]
            return {"reward": float(success), "success": success}
        for call in message.tool_calls:
            result = calc(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"reward": 0.0, "success": False}
