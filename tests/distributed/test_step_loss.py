"""Updates under ranges that were measured before: those of one process and of several are what plain loops compute."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl import Credit, TrajectoryGroup
from agentrl.distributed.processes import is_main
from agentrl.learn.config import LossConfig
from agentrl.learn.learner import Learner
from tests.distributed.test_processes import Sharding, gradients, together
from tests.support.learners import make_learner
from tests.support.loss_oracle import (
    BY_LENGTH,
    BY_STALENESS,
    VERSION,
    Measured,
    Token,
    expected_step,
    filled,
    stale_batch,
)
from tests.support.models import action_logprobs
from tests.support.tiers import first_quick

pytestmark = pytest.mark.process

RECIPES: dict[str, tuple[dict[str, Any], Measured]] = {
    "calibrated": ({"trust": "calibrated", "unit": "turn", "reject": 1.4}, BY_STALENESS),
    "calibrated by length": ({"trust": "calibrated", "unit": "version", "calibrated": {"by_length": True}}, BY_LENGTH),
    "kernel": (
        {"trust": "kernel", "kernel": {"positive": (1.5, 0.7), "negative": (0.6, 2.2)}, "reject": 1.4},
        {},
    ),
    "token": ({"trust": "token", "clip_low": 0.03, "clip_high": 0.05, "reject": 1.4}, {}),
}


def learner_of(recipe: str, sharding: Sharding = "none") -> Learner:
    settings, measured = RECIPES[recipe]
    learner = make_learner(
        loss=LossConfig(**settings),
        is_double=True,
        num_minibatches=1,
        max_tokens_per_micro_batch=60,
        max_grad_norm=1e9,
        sharding=sharding,
    )
    learner.state.calibration = filled(measured)
    return learner


def batch_under(model: Any) -> tuple[list[TrajectoryGroup], list[list[Credit]], list[Token], Tensor]:
    """The drawn batch as if the model were its policy; and the log-probabilities of its tokens, with a gradient."""
    trajectories, credits, tokens = stale_batch()
    sampled, found, logprobs = [], list[Token](), []
    for trajectory, credit in zip(trajectories, credits, strict=True):
        policy_T = action_logprobs(model, trajectory)
        known_T = policy_T.detach().numpy()
        behavior_T = known_T.copy()
        for t in np.flatnonzero(credit.keep_T):
            token = tokens[len(found)]
            behavior_T[t] -= (token.policy - token.behavior) or 1e-3  # no rounding between moved and not moved
            found.append(replace(token, policy=float(known_T[t]), behavior=float(behavior_T[t])))
        logprobs.append(policy_T[torch.from_numpy(credit.keep_T)])
        ends = np.cumsum([len(turn.action_ids) for turn in trajectory.turns])[:-1]
        turns = zip(trajectory.turns, np.split(behavior_T, ends), strict=True)
        sampled.append(
            replace(trajectory, turns=tuple(replace(turn, behavior_logprobs=tuple(of.tolist())) for turn, of in turns))
        )
    return [TrajectoryGroup(group_id="g", trajectories=tuple(sampled))], [credits], found, torch.cat(logprobs)


def updated(recipe: str, sharding: Sharding) -> tuple[dict[str, float], list[Tensor]]:
    learner = learner_of(recipe, sharding)
    groups, credits, _, _ = batch_under(learner_of(recipe).state.policy.model)
    return gradients(learner, groups if is_main() else [], credits if is_main() else [], version=VERSION)


@cache
def expected(recipe: str) -> tuple[dict[str, float], list[Tensor]]:
    """Metrics and gradient by the equations of each token, and a pass for each turn."""
    learner = learner_of(recipe)
    _, _, tokens, logprobs_T = batch_under(learner.state.policy.model)
    step = expected_step(tokens, learner.loss, RECIPES[recipe][1], is_updated=False)
    if learner.loss.trust == "calibrated":
        _, _, _, down, up, left_down, left_up = np.sum(list(step.shown.values()), axis=0)
        step.metrics["clip/pushed_tokens"] = float((left_down + left_up) / (down + up))
    loss = logprobs_T @ torch.tensor(step.gradient, dtype=torch.float64)
    grads = torch.autograd.grad(loss, list(learner.state.policy.parameters()))
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    del step.metrics["divergence"]  # of which a step of one minibatch tells nothing
    return step.metrics | {"grad_norm": float(norm)}, list(grads)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("num_processes", "sharding"), first_quick([(2, "full"), (1, "none"), (2, "none"), (3, "none")], num=1)
)
def test_an_update_of_any_number_of_processes_follows_the_equations(
    num_processes: int, sharding: Sharding, recipe: str, tmp_path: Path
) -> None:
    metrics, grads = expected(recipe)
    largest = max(float(grad.abs().max()) for grad in grads)
    assert largest > 1e-3
    for found_metrics, found in together(num_processes, tmp_path, updated, recipe, sharding):
        assert {name: found_metrics.get(name) for name in metrics} == pytest.approx(metrics, rel=1e-9)
        for one, other in zip(found, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * largest)
