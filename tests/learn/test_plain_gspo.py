"""Whole steps of the default loss with one advantage a trajectory: plain GSPO, written out. Everything is float64."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl import Trajectory, TrajectoryGroup, assign_credit
from agentrl.credit import load_credit_for
from agentrl.learn.learner import Gradient, Learner
from agentrl.recipe.config import load_recipe
from tests.support.learners import make_learner, weights
from tests.support.models import action_logprobs
from tests.support.trajectories import some_groups

RATE = 3e-4
"""With which between none and all of a minibatch's trajectories are clipped."""


class Minibatch(NamedTuple):
    """A minibatch's loss, gradient and trajectories that are clipped."""

    loss: float
    gradient: Tensor
    clipped: set[str]


def gspo(model: Any, members: list[Trajectory], advantages: dict[str, float], old: dict[str, Tensor]) -> Minibatch:
    """GSPO, arXiv 2507.18071 eq. 5 to 7: J = mean of min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)."""
    terms, clipped = [], set()
    for member in members:
        name, advantage = member.trajectory_id, advantages[member.trajectory_id]
        now_T = action_logprobs(model, member)
        ratio = ((now_T - old[name]).sum() / len(now_T)).exp()  # (7): (pi(y) / pi_old(y))^(1 / |y|)
        bound = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        terms.append(torch.minimum(ratio * advantage, bound * advantage))
        if bound * advantage < ratio * advantage:
            clipped.add(name)
    loss = -torch.stack(terms).mean()
    model.zero_grad()
    loss.backward()
    return Minibatch(loss.item(), gradient_of(model), clipped)


def gradient_of(model: Any) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


class Watched(Learner):
    """Keeps what each minibatch showed."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: list[Minibatch] = []

    def add_gradients(self, *parts: Any, **options: Any) -> Gradient:
        gradient = super().add_gradients(*parts, **options)
        observations = gradient.observations
        clipped_T = observations.column("clipped_T") > 0
        clipped = {str(int(number)) for number in observations.column("trajectory_T")[clipped_T]}
        self.seen.append(Minibatch(observations.loss, gradient_of(self.state.policy.model), clipped))
        return gradient


def played(model: Any, version: int) -> tuple[list[TrajectoryGroup], dict[str, Tensor]]:
    """Episodes that the model sampled, those of the last group with equal rewards, and their log-probabilities."""
    rng, groups, old = np.random.default_rng(version), [], {}
    for group in some_groups([8, 8, 8, 4, 4], seed=version):
        members = []
        for member in group.trajectories:
            with torch.no_grad():
                logprobs_T = action_logprobs(model, member)
            old[member.trajectory_id] = logprobs_T
            rest, turns = logprobs_T.tolist(), []
            for turn in member.turns:
                num = len(turn.action_ids)
                reward = float(rng.normal()) if group.group_id != "g4" else 0.25
                own = tuple(rest[:num])
                turns.append(replace(turn, behavior_logprobs=own, versions=(version,) * num, reward=reward))
                del rest[:num]
            members.append(replace(member, turns=tuple(turns)))
        groups.append(replace(group, trajectories=tuple(members)))
    return groups, old


def standardized(groups: list[TrajectoryGroup]) -> dict[str, float]:
    """GSPO's advantages (6): the reward less the group's mean, over its deviation; kept in float32."""
    found = {}
    for group in groups:
        rewards = [member.reward for member in group.trajectories]
        mean, deviation = np.mean(rewards), np.std(rewards, ddof=1)
        for member in group.trajectories:
            found[member.trajectory_id] = float(np.float32((member.reward - mean) / (deviation + 1e-6)))
    return found


@pytest.mark.parametrize(
    "sections",
    [
        {"credit": "uniform"},
        {"credit": {"scheme": "turn_gae", "fallback": "uniform"}},
        {"loss": "gspo"},
    ],
    ids=["uniform", "fallback", "gspo"],
)
def test_two_steps_of_four_minibatches_are_those_of_plain_gspo(sections: dict[str, Any]) -> None:
    recipe = load_recipe(sections)
    assert (recipe.train.target_kl, recipe.train.num_minibatches) == (None, 4)
    scheme, _ = load_credit_for(recipe.credit, provided=frozenset(), hints={}, env_id="e")
    learner = make_learner(
        loss=recipe.loss,
        is_double=True,
        learner_class=Watched,
        num_minibatches=recipe.train.num_minibatches,
        learning_rate=RATE,
        max_grad_norm=1e9,
        max_tokens_per_micro_batch=150,
    )
    assert isinstance(learner, Watched)
    model = copy.deepcopy(learner.state.policy.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    clipped = num = 0
    for version in range(2):
        groups, old = played(model, version)
        credits = assign_credit(scheme, groups)
        drawn = learner.draw(groups, credits, version=version)
        learner.seen.clear()
        learner.update(groups, credits, version=version)
        assert len(learner.seen) == len(drawn) == 4
        for minibatch, got in zip(drawn, learner.seen, strict=True):
            members = [member for member, _ in minibatch.pairs]
            expected = gspo(model, members, standardized(groups), old)
            if expected.gradient.any():  # the learner leaves weights alone, which Adam would move by momentum
                optimizer.step()
            assert got.loss == pytest.approx(expected.loss, rel=1e-9)
            torch.testing.assert_close(got.gradient, expected.gradient, rtol=1e-8, atol=1e-12)
            assert {members[int(number)].trajectory_id for number in got.clipped} == expected.clipped
            clipped, num = clipped + len(expected.clipped), num + len(members)
        theirs = torch.cat([weight.flatten() for weight in model.state_dict().values()])
        torch.testing.assert_close(weights(learner), theirs, rtol=1e-9, atol=1e-11)
    assert 0.1 < clipped / num < 0.7
