"""A loop by hand over Anthropic's messages, streaming with `--stream`, with a cache mark on the newest message."""

import sys
from typing import Any

from anthropic import Anthropic

from tests.support.agents.tools import FIRST, MODEL, SECOND, TOOL, multiply

client = Anthropic()
function: Any = TOOL["function"]
tool = {"name": "multiply", "description": function["description"], "input_schema": function["parameters"]}
messages: list[Any] = []


def complete() -> Any:
    last = messages[-1]["content"]
    marked = [*last[:-1], {**last[-1], "cache_control": {"type": "ephemeral"}}]
    sent = [*messages[:-1], {**messages[-1], "content": marked}]
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 1024,
        "system": "You are a calculator.",
        "tools": [tool],
        "messages": sent,
    }
    if "--stream" not in sys.argv:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


for question in (FIRST, SECOND):
    messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
    while True:
        answer = complete()
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(multiply(**call.input))} for call in calls
        ]
        messages.append({"role": "user", "content": results})
    print(answer.content[-1].text)
