"""A loop by hand over litellm."""

import json
import os
from typing import Any

import litellm

from tests.support.agents.tools import FIRST, MODEL, SECOND, TOOL, multiply

messages: list[Any] = [{"role": "system", "content": "You are a calculator."}]
for question in (FIRST, SECOND):
    messages.append({"role": "user", "content": question})
    while True:
        base = os.environ["OPENAI_BASE_URL"]
        answer = litellm.completion(model=f"openai/{MODEL}", api_base=base, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            result = multiply(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        if not message.tool_calls:
            break
    print(message.content)
