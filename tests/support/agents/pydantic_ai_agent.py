"""An agent of pydantic-ai over `chat`, `responses` or `anthropic`."""

import sys
from typing import Any

from pydantic_ai import Agent

from tests.support.agents.tools import FIRST, MODEL, SECOND, multiply

prefix = {"chat": "openai-chat", "responses": "openai-responses", "anthropic": "anthropic"}[sys.argv[1]]
agent = Agent(f"{prefix}:{MODEL}", instructions="You are a calculator.", tools=[multiply])
history: Any = None
for question in (FIRST, SECOND):
    if "--stream" in sys.argv:
        with agent.run_stream_sync(question, message_history=history) as result:
            print(result.get_output())
    else:
        result = agent.run_sync(question, message_history=history)
        print(result.output)
    history = result.all_messages()
