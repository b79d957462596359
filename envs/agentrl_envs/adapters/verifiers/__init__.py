"""Tasksets of verifiers, played over a process boundary: see `Verifiers`."""

from agentrl_envs.adapters.verifiers.env import Verifiers

__all__ = ["Verifiers"]
