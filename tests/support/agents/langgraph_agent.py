"""A ReAct agent of LangGraph."""

import asyncio
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from tests.support.agents.tools import FIRST, MODEL, SECOND, multiply


async def main() -> None:
    agent = create_react_agent(ChatOpenAI(model=MODEL), [tool(multiply)], prompt="You are a calculator.")
    state: dict[str, Any] = {"messages": []}
    for question in (FIRST, SECOND):
        state = await agent.ainvoke({"messages": [*state["messages"], {"role": "user", "content": question}]})
        print(state["messages"][-1].content)


asyncio.run(main())
