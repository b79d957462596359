"""What an update notes of each token, beside what a pass by itself computes of it.

`T` sampled tokens of a trajectory, `P` those that were trained.
"""

from dataclasses import replace

import numpy as np
import pytest

from agentrl import Credit
from agentrl.learn.config import LossConfig
from agentrl.testing import make_group
from tests.support.learners import make_learner

GROUPS = [
    make_group([[1.0, 0.0], [0.0, 0.5]], action_lengths=[[3, 2], [1, 4]], group_id=str(number)) for number in range(3)
]


def credits() -> list[list[Credit]]:
    """Return credit of both signs; of the first trajectory a token is left out, and the last has no gradient."""
    rng = np.random.default_rng(0)
    found = [
        [Credit.from_tokens(t, rng.normal(size=t.num_action_tokens)) for t in group.trajectories] for group in GROUPS
    ]
    keep_T = found[0][0].keep_T.copy()
    keep_T[1] = False
    found[0][0] = replace(found[0][0], keep_T=keep_T)
    found[2][1] = Credit.uniform(GROUPS[2].trajectories[1], 0.0)
    return found


@pytest.mark.parametrize("max_tokens", [16384, 8], ids=["one pass", "many passes"])
def test_each_token_has_its_own_ratio_entropy_and_clipping(max_tokens: int) -> None:
    loss = LossConfig(unit="token", clip_low=0.01, clip_high=0.01)
    learner = make_learner(loss=loss, max_tokens_per_micro_batch=max_tokens, num_minibatches=1)
    given = credits()
    alone = {}  # with the weights that the update starts from
    for group in GROUPS:
        for trajectory in group.trajectories:
            logprobs, context = [], list[int]()
            for turn in trajectory.turns:
                context += turn.observation_ids
                logprobs.append(learner.logprobs(context, turn.action_ids).double().numpy())
                context += turn.action_ids
            alone[trajectory.group_id, trajectory.trajectory_id] = np.concatenate(logprobs)
    learner.update(GROUPS, given, version=0)
    notes_of = learner.diagnostics.gather()
    for group, row in zip(GROUPS, given, strict=True):
        for trajectory, credit in zip(group.trajectories, row, strict=True):
            notes = notes_of(trajectory)
            if not credit.advantages_T.any():
                assert all(np.isnan(column_T).all() for column_T in notes.values())
                continue
            behavior_T = np.concatenate([turn.behavior_logprobs for turn in trajectory.turns])
            ratio_T = np.exp(alone[trajectory.group_id, trajectory.trajectory_id] - behavior_T)
            clipped_T = np.where(credit.advantages_T > 0, ratio_T > 1.01, ratio_T < 0.99)
            expected = np.where(credit.keep_T, ratio_T, np.nan)
            np.testing.assert_allclose(notes["ratio"], expected, rtol=1e-5)  # float32 passes of other shapes
            np.testing.assert_array_equal(notes["clipped"][credit.keep_T], clipped_T[credit.keep_T])
            assert np.isnan(notes["entropy"]).tolist() == (~credit.keep_T).tolist()
            assert (notes["entropy"][credit.keep_T] > 0).all()


def test_a_unit_of_many_tokens_has_one_ratio_and_an_entropy_is_each_tokens_own() -> None:
    learner = make_learner(num_minibatches=2)
    learner.update(GROUPS, credits(), version=0)
    notes = learner.diagnostics.gather()(GROUPS[1].trajectories[0])
    assert len(set(notes["ratio"])) == 1
    assert len(set(notes["entropy"])) > 1
    assert notes["entropy"].max() <= np.log(261) + 1e-6  # of the tokenizer's tokens


def test_notes_are_of_the_newest_update_alone() -> None:
    learner = make_learner()
    learner.update(GROUPS[:1], credits()[:1], version=0)
    learner.update(GROUPS[1:], credits()[1:], version=1)
    assert learner.diagnostics.gather()(GROUPS[0].trajectories[0]) == {}
