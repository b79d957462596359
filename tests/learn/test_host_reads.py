"""Values that the host reads from the device while it computes a gradient: each waits for all that was launched."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from agentrl.credit import Credit
from agentrl.learn.batch import LossColumns
from agentrl.learn.config import LossConfig
from agentrl.policy.host_reads import read, reading_together, require
from tests.support.each import each
from tests.support.learners import make_learner
from tests.support.trajectories import some_groups

GROUPS = some_groups([4, 4, 4])
RNG = np.random.default_rng(0)
CREDITS = [[Credit.from_tokens(t, RNG.normal(size=t.num_action_tokens)) for t in g.trajectories] for g in GROUPS]
LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {"trust": "fixed"},
    "by length, rejecting": {"trust": "fixed", "clip_by_length": 64, "reject": 5.0},
    "gmpo": {"trust": "geometric", "unit": "trajectory", "clip_low": 0.3, "clip_high": 0.4},
    "calibrated": {"trust": "calibrated"},
    "further terms": {"nll": {"coefficient": 0.1}, "entropy_coefficient": 0.01, "covariance": {}},
    "mismatch": {"anchor": "recomputed", "mismatch": "truncate"},
}
WAIT = {"__bool__", "__int__", "__float__", "item", "tolist", "cpu", "nonzero", "unique", "bincount", "masked_select"}


class Events(TorchFunctionMode):
    """Backward passes and host reads in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in WAIT | {"backward"}:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@each("name", LOSSES)
@each("layout", ["packed", "tree"])
def test_a_minibatch_is_read_once_after_its_last_pass(name: str, layout: Any) -> None:
    learner = make_learner(
        loss=LossConfig(**LOSSES[name]), layout=layout, num_minibatches=1, max_tokens_per_micro_batch=60
    )
    (minibatch, *_) = learner.draw(GROUPS, CREDITS, version=1)
    plan = learner.plan(minibatch)
    anchors = learner._current_anchors(plan)
    learner.state.wrapped.train()
    with Events() as events:
        gradient = learner.add_gradients(plan, anchors, version=1)
    assert len(plan) > 1
    assert gradient.stats.grad_norm > 0
    while events.found[0] == "cpu":  # ranges by measurements, before the first pass
        assert name == "calibrated"
        events.found.pop(0)
    assert events.found == ["backward"] * len(plan) + ["tolist"]


def test_a_number_that_is_not_finite_still_ends_the_update() -> None:
    learner = make_learner(loss=LossConfig(trust="fixed"), max_tokens_per_micro_batch=60)
    (minibatch, *_) = learner.draw(GROUPS, CREDITS, version=1)
    plan = learner.plan(minibatch)

    def broken(columns: LossColumns) -> LossColumns:
        columns.weight_T[2] = torch.nan
        return columns

    plan = [plan[0], *(each._replace(columns=broken(each.columns)) for each in plan[1:])]
    with pytest.raises(ValueError, match="expected finite weight_T, got nan at token 2"):
        learner.add_gradients(plan, learner._current_anchors(plan), version=1)


def test_reads_are_received_in_their_order_and_at_once_outside_of_a_context() -> None:
    received: list[float] = []
    read(torch.tensor(1.5), received.append)
    assert received == [1.5]

    def read_more() -> None:
        with reading_together():
            read(torch.tensor(0.1, dtype=torch.float64), received.append)
            require(torch.tensor(True), lambda: ValueError("first"))
            require(torch.tensor(False), lambda: ValueError("second"))
            read(torch.tensor(2.0), received.append)
            assert received == [1.5]

    with pytest.raises(ValueError, match="second"):
        read_more()
    assert received == [1.5, 0.1]
