"""OpenAI's Agents SDK over responses, or over chat completions with `--chat`; streaming with `--stream`."""

import asyncio
import sys
from typing import Any

import agents

from tests.support.agents.tools import FIRST, MODEL, SECOND, multiply

agents.set_tracing_disabled(True)
if "--chat" in sys.argv:
    agents.set_default_openai_api("chat_completions")
agent = agents.Agent(
    name="calculator", instructions="You are a calculator.", model=MODEL, tools=[agents.function_tool(multiply)]
)


async def main() -> None:
    said: Any = []
    for question in (FIRST, SECOND):
        said.append({"role": "user", "content": question})
        if "--stream" in sys.argv:
            result: Any = agents.Runner.run_streamed(agent, said)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, said)
        said = result.to_input_list()
        print(result.final_output)


asyncio.run(main())
