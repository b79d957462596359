"""Environments: messages in, messages out, plain Gymnasium. An environment never sees a token."""

from agentrl.env.endpoint import SimulatedUser
from agentrl.env.make import EnvDescription, describe, make_env
from agentrl.env.message_env import ActionSpace, MessageEnv, MessagesSpace, as_message, ask_oracle, base_env, close_env
from agentrl.env.sandbox import ExecResult, Language, Sandbox, SandboxConfig, sandbox_config
from agentrl.env.subprocesses import run_command
from agentrl.env.task_env import TaskEnv
from agentrl.env.tool_env import ToolCallError, ToolEnv, arguments_object, tool, tool_call, tool_schemas
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
    "SimulatedUser",
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
