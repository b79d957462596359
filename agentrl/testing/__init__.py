"""Conformance checks and fixtures for authors of plug-ins and for tests."""

from agentrl.testing.check_credit import check_credit
from agentrl.testing.check_engine import check_engine
from agentrl.testing.check_env import CheckedEnv, check_env
from agentrl.testing.check_renderer import check_renderer, check_sandbox
from agentrl.testing.groups import make_group
from agentrl.testing.scripted_engine import ScriptedEngine

__all__ = [
    "CheckedEnv",
    "ScriptedEngine",
    "check_credit",
    "check_engine",
    "check_env",
    "check_renderer",
    "check_sandbox",
    "make_group",
]
