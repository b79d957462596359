"""agentrl: multi-turn reinforcement learning for language-model agents.

`import agentrl` is cheap: the names below are loaded when first used, and neither torch nor a plug-in before that.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.api.evaluation import evaluate
    from agentrl.api.playing import play
    from agentrl.api.trained_run import TrainedRun
    from agentrl.api.training import train
    from agentrl.credit import Credit, CreditScheme, LoneRule, Need, assign_credit, load_credit
    from agentrl.env import (
        ExecResult,
        Language,
        MessageEnv,
        Sandbox,
        SandboxConfig,
        SimulatedUser,
        TaskEnv,
        ToolEnv,
        run_command,
        sandbox_config,
        tool,
        tool_call,
    )
    from agentrl.errors import AgentRLError, ConfigError, CreditError, EnvironmentFailure, UserError
    from agentrl.types import (
        Completion,
        FinishReason,
        Message,
        Prompt,
        Sampling,
        StopReason,
        Trajectory,
        TrajectoryGroup,
        Turn,
    )

__version__ = "0.1.0"

# Read when torch is imported. Its threads wait for one another by spinning, for long: beside a busy program that takes twice as
# long. Asleep at once they take a quarter longer on an idle machine; a short spin costs neither (benchmarks/busy_core.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOMES = {
    "agentrl.api.evaluation": ("evaluate",),
    "agentrl.api.playing": ("play",),
    "agentrl.api.trained_run": ("TrainedRun",),
    "agentrl.api.training": ("train",),
    "agentrl.credit": ("Credit", "CreditScheme", "LoneRule", "Need", "assign_credit", "load_credit"),
    "agentrl.env": (
        "ExecResult",
        "Language",
        "MessageEnv",
        "Sandbox",
        "SandboxConfig",
        "SimulatedUser",
        "TaskEnv",
        "ToolEnv",
        "run_command",
        "sandbox_config",
        "tool",
        "tool_call",
    ),
    "agentrl.errors": ("AgentRLError", "ConfigError", "CreditError", "EnvironmentFailure", "UserError"),
    "agentrl.types": (
        "Completion",
        "FinishReason",
        "Message",
        "Prompt",
        "Sampling",
        "StopReason",
        "Trajectory",
        "TrajectoryGroup",
        "Turn",
    ),
}
_HOME = {name: module for module, members in _HOMES.items() for name in members}

__all__ = [  # noqa: RUF022 - by theme
    "train", "evaluate", "play", "TrainedRun",
    "MessageEnv", "ToolEnv", "TaskEnv", "tool", "tool_call", "run_command", "Message", "Prompt", "SimulatedUser",
    "Sandbox", "SandboxConfig", "ExecResult", "Language", "sandbox_config",
    "CreditScheme", "Credit", "LoneRule", "Need", "assign_credit", "load_credit",
    "Turn", "Trajectory", "TrajectoryGroup", "StopReason", "FinishReason", "Completion", "Sampling",
    "AgentRLError", "UserError", "ConfigError", "CreditError", "EnvironmentFailure",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
