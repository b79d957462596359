"""The tools of any MCP server (stdio or streamable HTTP) as an environment's tools: see `McpEnv`."""

from agentrl import UserError

try:
    import mcp.types
except ModuleNotFoundError as error:
    raise UserError(f"MCP servers need the package mcp, version 2 ({error}); pip install 'agentrl[mcp]'") from error
if not hasattr(mcp, "Client"):
    raise UserError("MCP servers need the package mcp, version 2; pip install 'agentrl[mcp]'")

from agentrl_envs.adapters.mcp.env import McpEnv, McpTaskEnv

__all__ = ["McpEnv", "McpTaskEnv"]
