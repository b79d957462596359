"""Environments: messages in, messages out, plain Gymnasium. An environment never sees a token."""

from agentrl.env.command import run_command
from agentrl.env.describe import EnvDescription, describe
from agentrl.env.make import make_env
from agentrl.env.message_env import MessageEnv, as_message, ask_oracle, base_env, close_env
from agentrl.env.sandbox import ExecResult, Language, Sandbox, SandboxConfig, sandbox_config
from agentrl.env.spaces import ActionSpace, MessagesSpace
from agentrl.env.task_env import TaskEnv
from agentrl.env.tool_env import ToolEnv
from agentrl.env.tools import ToolCallError, arguments_object, tool, tool_call, tool_schemas
from agentrl.types import MAX_REWARD

__all__ = [
    "MAX_REWARD",
    "ActionSpace",
    "EnvDescription",
    "ExecResult",
    "Language",
    "MessageEnv",
    "MessagesSpace",
    "Sandbox",
    "SandboxConfig",
    "TaskEnv",
    "ToolCallError",
    "ToolEnv",
    "arguments_object",
    "as_message",
    "ask_oracle",
    "base_env",
    "close_env",
    "describe",
    "make_env",
    "run_command",
    "sandbox_config",
    "tool",
    "tool_call",
    "tool_schemas",
]
