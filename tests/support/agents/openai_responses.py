"""A loop by hand over OpenAI's responses: the items are sent again, or `--previous` names the answer before."""

import json
import sys
from typing import Any

from openai import OpenAI

from tests.support.agents.tools import FIRST, MODEL, SECOND, TOOL, multiply

client = OpenAI()
tool: Any = {"type": "function", **TOOL["function"]}
items: list[Any] = []
answer: Any = None
for question in (FIRST, SECOND):
    new: list[Any] = [{"role": "user", "content": question}]
    while new:
        items += new
        if "--previous" in sys.argv:
            previous = answer.id if answer else None
            answer = client.responses.create(model=MODEL, input=new, tools=[tool], previous_response_id=previous)
        else:
            answer = client.responses.create(model=MODEL, input=items, tools=[tool])
            items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        new = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(multiply(**json.loads(call.arguments))),
            }
            for call in calls
        ]
    print(answer.output_text)
