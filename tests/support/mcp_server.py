"""An MCP server for tests, in process (`server`), on stdio, or on HTTP: `python mcp_server.py stdio`, or `http PORT`."""

import asyncio
import os
import sys
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ImageContent, TextContent
from pydantic import Field

server = MCPServer("counter")
count = 0
_messages = os.dup(1)  # the SDK gives tools another one


@server.tool()
def add(a: int, b: Annotated[int, Field(ge=0)]) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(name="count.up")
def count_up(by: int = 1) -> str:
    """Count, and tell how far."""
    global count
    count += by
    return str(count)


@server.tool()
def variable(name: str) -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, "unset")


@server.tool()
async def slowly_count(seconds: float) -> str:
    """Count at once, and tell it late."""
    count_up()
    await asyncio.sleep(seconds)
    return "counted"


@server.tool()
def babble(words: str) -> str:
    """Write what is no message where messages go."""
    os.write(_messages, f"{words}\n".encode())
    return "said"


@server.tool()
def die(words: str) -> str:
    """End the server."""
    print(words, file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def die_once(path: str) -> str:
    """End the server, unless there is a file."""
    if os.path.exists(path):
        return "alive"
    open(path, "w", encoding="utf-8").close()
    os._exit(3)


@server.tool()
async def only_once(path: str) -> str:
    """Answer at once, and where there is a file not within a minute."""
    if os.path.exists(path):
        await asyncio.sleep(60)
    open(path, "w", encoding="utf-8").close()
    return "once"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such thing")


@server.tool()
def data() -> dict[str, Any]:
    """Return data."""
    return {"a": [1, 2]}


@server.tool()
def only_data() -> CallToolResult:
    """Return data without text."""
    return CallToolResult(content=[], structured_content={"b": "ü"})


@server.tool()
def picture() -> CallToolResult:
    """Return a text and an image."""
    return CallToolResult(content=[TextContent(text="see"), ImageContent(data="MTIzNDU2", mime_type="image/png")])


@server.tool()
def long_text(length: int) -> CallToolResult:
    """Return much text."""
    return CallToolResult(content=[TextContent(text="x" * length)])


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
