"""Tokens that are too old: masked or kept, and counted either way."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.credit import Credit
from agentrl.learn.batch import fraction_too_old, mask_stale
from agentrl.rollout import RolloutConfig
from agentrl.testing import make_group
from agentrl.types import StopReason, TrajectoryGroup


def aged() -> TrajectoryGroup:
    """Two trajectories of two turns of two tokens, sampled by versions 3 to 5, and one that failed."""
    group = make_group([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], action_lengths=[[2, 2]] * 3)
    versions = [[(3, 3), (3, 4)], [(4, 5), (5, 5)], [(0, 0), (0, 0)]]
    trajectories = [
        replace(t, turns=tuple(replace(turn, versions=v) for turn, v in zip(t.turns, of_turns, strict=True)))
        for t, of_turns in zip(group.trajectories, versions, strict=True)
    ]
    trajectories[2] = replace(trajectories[2], stop_reason=StopReason.ENV_ERROR)
    return replace(group, trajectories=tuple(trajectories))


def test_tokens_of_older_versions_leave_the_loss_and_are_counted() -> None:
    group = aged()
    credits = [
        [Credit.from_tokens(t, [1.0, 2.0, 3.0, 4.0], keep_T=[True, True, False, True]) for t in group.trajectories]
    ]
    (found,) = mask_stale([group], credits, oldest=4)
    assert found[0].keep_T.tolist() == [False, False, False, True]
    assert found[1].keep_T.tolist() == [True, True, False, True]
    assert np.array_equal(found[0].advantages_T, credits[0][0].advantages_T)
    assert fraction_too_old([group], oldest=4) == 3 / 8
    assert fraction_too_old([group], oldest=3) == 0
    assert fraction_too_old([], oldest=3) == 0


def test_in_sync_mode_there_is_nothing_to_mask() -> None:
    settings: dict[str, Any] = {"mode": "sync", "stale": "mask"}
    with pytest.raises(ValueError, match="stale: mask has nothing to act on with mode: sync"):
        RolloutConfig.model_validate(settings)
