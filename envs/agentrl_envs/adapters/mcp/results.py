"""What goes between a model and an MCP server, as text: schemas of tools, arguments, results."""

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from mcp.types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
    Tool,
)

from agentrl import UserError
from agentrl.env import ToolCallError, arguments_object
from agentrl_envs.adapters.arguments import check_arguments

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 64


def offered(tools: Sequence[Tool], patterns: Sequence[str] | None) -> dict[str, Tool]:
    """Return the tools whose names match one of the patterns, by the names that models may call them by.

    Raises:
        UserError: for a pattern that matches none, and for two tools of one name.
    """
    found: dict[str, Tool] = {}
    for pattern in patterns or ():
        if not any(fnmatchcase(tool.name, pattern) for tool in tools):
            raise UserError(
                f"tool_names: {pattern!r} matches none of {', '.join(tool.name for tool in tools) or 'no tools'}"
            )
    for tool in tools:
        if patterns is None or any(fnmatchcase(tool.name, pattern) for pattern in patterns):
            name = _NOT_IN_NAMES.sub("_", tool.name)[:_MAX_NAME]
            if name in found:
                raise UserError(
                    f"tool_names: {tool.name!r} and {found[name].name!r} are both offered as {name!r}; leave one out"
                )
            found[name] = tool
    return found


def schema_of(name: str, tool: Tool) -> dict[str, Any]:
    """Return a tool's schema, OpenAI style."""
    function = {
        "name": name,
        "description": tool.description or tool.title or tool.name,
        "parameters": {"type": "object", "properties": {}} | tool.input_schema,
    }
    return {"type": "function", "function": function}


def checked_arguments(name: str, tool: Tool, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        ToolCallError: where they do not fit the tool's schema.
    """
    given = arguments_object(name, arguments)
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ToolCallError(f"wrong arguments for {name}: {error}") from None
    check_arguments(name, given, tool.input_schema)
    return given


def result_text(result: CallToolResult) -> str:
    """Return what a tool's message says: its texts, a note for what is none, and structured data where there is no text."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text, result.content))


def _text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        return f"[{block.type}: {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
    if isinstance(block, EmbeddedResource):
        content = block.resource
        if isinstance(content, TextResourceContents):
            return content.text
        return f"[resource: {content.uri}, {content.mime_type}, {len(content.blob) * 3 // 4} bytes]"
    return f"[resource: {block.uri}, {block.name}]"
