"""Agents of smolagents: `tools` calls tools, `code` writes code."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

from tests.support.agents.tools import FIRST, MODEL, SECOND, multiply

model = OpenAIServerModel(model_id=MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if sys.argv[1] == "code" else ToolCallingAgent
agent = kind(tools=[tool(multiply)], model=model, max_steps=4, verbosity_level=0)
print(agent.run(FIRST))
print(agent.run(SECOND, reset=False))
