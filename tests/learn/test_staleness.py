"""Tokens that are too old: masked or kept, and counted either way."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from agentrl.credit import Credit
from agentrl.learn.loss import LossConfig
from agentrl.learn.staleness import mask_stale, share_too_old
from agentrl.rollout import RolloutConfig
from agentrl.testing import make_group
from agentrl.types import StopReason, TrajectoryGroup
from tests.learn.test_trainer import Loop, make_trainer


@pytest.fixture
def runner() -> Iterator[Loop]:
    with closing(Loop()) as runner:
        yield runner


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
    assert share_too_old([group], oldest=4) == 3 / 8
    assert share_too_old([group], oldest=3) == 0


@pytest.mark.parametrize("rule", ["wait", "mask", "keep"])
def test_the_recipe_says_what_becomes_of_tokens_that_are_too_old(
    rule: Literal["wait", "mask", "keep"], runner: Loop
) -> None:
    rollout = RolloutConfig(
        mode="partial",
        max_staleness=1,
        stale=rule,
        num_groups=2,
        group_size=2,
        max_live_episodes=2,  # so that a group waits for a long time until all of it is played
        max_turns=6,
        max_turn_tokens=16,
        max_episode_tokens=64,
        max_context_tokens=512,
    )
    trainer = make_trainer(runner, rollout=rollout, loss=LossConfig(unit="version"), num_minibatches=1)
    # Two steps' groups are complete, and the trainer is three versions ahead of them: as after a long wait.
    for _ in range(2):
        trainer.step()
    trainer.finished_steps += 3
    result = trainer.step()
    trained = [v for g in result.groups for t in g.trajectories for turn in t.turns for v in turn.versions]
    kept = np.concatenate([credit.keep_T for credits in result.credits for credit in credits])
    oldest = result.step - 1 - 1
    assert min(trained) < oldest
    metrics = result.metrics
    assert metrics["staleness/too_old"] == pytest.approx(np.mean(np.array(trained) < oldest))
    if rule == "mask":
        assert kept.tolist() == [version >= oldest for version in trained]
        assert metrics["staleness/max"] <= 1
    else:
        assert kept.all()
        assert metrics["staleness/max"] > 1


def test_in_sync_mode_there_is_nothing_to_mask() -> None:
    settings: dict[str, Any] = {"mode": "sync", "stale": "mask"}
    with pytest.raises(ValueError, match="stale: mask has nothing to act on with mode: sync"):
        RolloutConfig.model_validate(settings)
