"""Environments: messages in, messages out, plain Gymnasium. An environment never sees a token."""

from agentrl.env.command import run_command
from agentrl.env.message_env import MessageEnv, as_message
from agentrl.env.spaces import ActionSpace, MessagesSpace
from agentrl.env.tool_env import ToolEnv
from agentrl.env.tools import tool

__all__ = ["ActionSpace", "MessageEnv", "MessagesSpace", "ToolEnv", "as_message", "run_command", "tool"]
