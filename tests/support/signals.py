"""Signals in turns, without a policy to measure them."""

from dataclasses import replace
from typing import Any

from agentrl.types import Trajectory, Turn


def with_signals(turn: Turn, **signals: Any) -> Turn:
    """Return the turn with further signals, or others."""
    return replace(turn, signals={**turn.signals, **signals})


def without_signals(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory as it was before anything was measured."""
    turns = tuple(replace(turn, signals={}) for turn in trajectory.turns)
    return replace(trajectory, turns=turns, signals={})
