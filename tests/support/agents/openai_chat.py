"""A loop by hand over OpenAI's chat completions, streaming with `--stream`."""

import json
import sys
from typing import Any

from openai import OpenAI

from tests.support.agents.tools import FIRST, MODEL, SECOND, TOOL, multiply

client = OpenAI()
messages: list[Any] = [{"role": "system", "content": "You are a calculator."}]


def say(question: str) -> Any:
    messages.append({"role": "user", "content": question})
    while True:
        answer = complete()
        messages.append(answer)
        for call in answer.get("tool_calls") or ():
            result = multiply(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
        if not answer.get("tool_calls"):
            return answer["content"]


def complete() -> Any:
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [TOOL], "temperature": 0.2}
    if "--stream" not in sys.argv:
        return client.chat.completions.create(**asked).choices[0].message.model_dump(exclude_none=True)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        message = stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls") or ():
        call["function"].pop("parsed_arguments", None)
    return message


print(say(FIRST), say(SECOND))
