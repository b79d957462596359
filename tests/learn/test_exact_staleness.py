"""Ratios against the weights that sampled each token. `T` trained tokens of a minibatch."""

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from agentrl import Credit, TrajectoryGroup
from agentrl.learn.config import LossConfig
from agentrl.learn.learner import Gradient, Learner
from agentrl.learn.line_search import KeptVersions
from agentrl.learn.metrics import Observations
from agentrl.policy.config import LoraSettings
from tests.support.learners import make_learner, weights
from tests.support.models import action_logprobs
from tests.support.trajectories import some_groups

RNG = np.random.default_rng(0)


def credits_of(groups: list[TrajectoryGroup]) -> list[list[Credit]]:
    return [[Credit.from_tokens(t, RNG.normal(size=t.num_action_tokens)) for t in g.trajectories] for g in groups]


def aged(groups: list[TrajectoryGroup], versions: list[int]) -> list[TrajectoryGroup]:
    """The groups, whose turns were sampled by these versions in turn."""
    return [
        replace(
            group,
            trajectories=tuple(
                replace(
                    t,
                    turns=tuple(
                        replace(turn, versions=(versions[k % len(versions)],) * len(turn.action_ids))
                        for k, turn in enumerate(t.turns)
                    ),
                )
                for t in group.trajectories
            ),
        )
        for group in groups
    ]


class Watched(Learner):
    """Keeps what each minibatch showed."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: list[Observations] = []

    def add_gradients(self, *parts: Any, **options: Any) -> Gradient:
        gradient = super().add_gradients(*parts, **options)
        self.seen.append(gradient.observations)
        return gradient


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["whole", "adapters"])
def test_each_token_is_compared_with_the_weights_that_sampled_it(lora: LoraSettings | None) -> None:
    loss = LossConfig(unit="turn", trust="token", anchor="sampled", kept_versions=2, clip_low=0.5, clip_high=0.5)
    learner = make_learner(
        loss=loss, is_double=True, lora=lora, learner_class=Watched, num_minibatches=2, max_tokens_per_micro_batch=60
    )
    assert isinstance(learner, Watched)
    assert loss.warnings(staleness_bound=2) == []
    groups = some_groups([4, 3, 4])
    models = {}
    for version in range(3):
        models[version] = copy.deepcopy(learner.state.policy.model).eval()
        learner.update(aged(groups, [version]), credits_of(groups), version=version)
    models[3] = copy.deepcopy(learner.state.policy.model).eval()
    mixed = aged(groups, [0, 1, 2, 3])
    credits = credits_of(mixed)
    drawn = learner.draw(mixed, credits, version=3)
    learner.seen.clear()
    metrics = learner.update(mixed, credits, version=3)
    unkept = num_tokens = 0
    for minibatch, seen in zip(drawn, learner.seen, strict=True):
        expected_T, behavior_T = [], []
        for trajectory, _ in minibatch.pairs:
            with torch.no_grad():
                under = {version: action_logprobs(model, trajectory).tolist() for version, model in models.items()}
            behavior = list(chain(*(turn.behavior_logprobs for turn in trajectory.turns)))
            versions = list(chain(*(turn.versions for turn in trajectory.turns)))
            under[0] = behavior  # two versions are kept: of 0, only the engine knows
            expected_T += [under[version][t] for t, version in enumerate(versions)]
            behavior_T += behavior
            unkept += versions.count(0)
            num_tokens += len(versions)
        order = seen.column("token_T").astype(int)
        anchor_T = seen.column("engine_difference_T") - seen.column("log_ratio_T") + np.array(behavior_T)[order]
        np.testing.assert_allclose(anchor_T, np.array(expected_T)[order], rtol=0, atol=1e-9)
    assert metrics["staleness/unkept"] == pytest.approx(unkept / num_tokens)
    assert metrics["staleness/difference"] > 1e-3
    assert metrics["mismatch/difference"] > 1e-3


def test_without_staleness_it_is_the_recomputed_anchor_bit_for_bit() -> None:
    groups = some_groups([4, 3, 4])
    recomputed, sampled = (make_learner(loss=LossConfig(anchor=anchor)) for anchor in ("recomputed", "sampled"))
    for version in range(3):
        credits = credits_of(groups)
        expected, found = (
            learner.update(aged(groups, [version]), credits, version=version) for learner in (recomputed, sampled)
        )
        of_anchor = {"staleness/difference": 0.0, "staleness/unkept": 0.0}
        assert found == expected | of_anchor | {"mismatch/difference": found["mismatch/difference"]}
    assert torch.equal(weights(sampled), weights(recomputed))


def test_the_newest_versions_are_kept_and_the_weights_come_back() -> None:
    layer = torch.nn.Linear(1, 1)
    layer.bias.requires_grad_(False)
    kept = KeptVersions(layer.parameters(), most=2)
    for version in range(4):
        with torch.no_grad():
            layer.weight.fill_(version)
            layer.bias.fill_(version)
        kept.keep(version)
    assert kept.versions == {2, 3}
    with kept.at(2):
        assert (layer.weight.item(), layer.bias.item()) == (2, 3)  # what is not trained has one value
    assert layer.weight.item() == 3
    KeptVersions(layer.parameters(), most=0).keep(1)
