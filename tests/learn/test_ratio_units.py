"""What a ratio unit does to credit that differs from turn to turn: the numbers of docs/ratio-units.md."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentrl.learn.loss import policy_loss
from agentrl.learn.metrics import MinibatchStats, Observations, update_metrics
from agentrl.learn.trust import fixed
from tests.support.tallies import add_pass

LOG_RATIOS = (0.02, 0.04, 0.0, -0.10, 0.02)
ADVANTAGES = (1.0, 1.0, 1.0, -0.5, -0.5)
TRAJECTORY, TURN = [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]
LOW, HIGH = 0.03, 0.04
PAGE = Path(__file__).parents[2] / "docs" / "ratio-units.md"


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def gspo_token(unit_T: list[int], *, log_ratios: tuple[float, ...] = LOG_RATIOS) -> list[float]:
    """Return what multiplies grad log pi of each token in our objective, at weight 1/5."""
    policy_T = f64(*log_ratios).requires_grad_()
    result = policy_loss(
        policy_T,
        anchor_logprobs_T=f64(0, 0, 0, 0, 0),
        advantages_T=f64(*ADVANTAGES),
        unit_T=torch.tensor(unit_T),
        weight_T=torch.full((5,), 0.2, dtype=torch.float64),
        trust=partial(fixed, low=LOW, high=HIGH),
    )
    coefficients: list[float] = (-torch.autograd.grad(result.loss, policy_T)[0]).tolist()
    return coefficients


def through_the_mean() -> list[float]:
    """The same, where token advantages are put into GSPO's own objective: s * A_t / 5 with the gradient of s in it."""
    policy_T = f64(*LOG_RATIOS).requires_grad_()
    ratio = policy_T.mean().exp()
    advantages_T = f64(*ADVANTAGES)
    terms_T = torch.minimum(ratio * advantages_T, ratio.clamp(1 - LOW, 1 + HIGH) * advantages_T)
    coefficients: list[float] = torch.autograd.grad(terms_T.mean(), policy_T)[0].tolist()
    return coefficients


def test_a_gradient_through_the_sequence_mean_averages_turn_credit_away() -> None:
    found = through_the_mean()
    # s = exp(-.004) on each of five tokens; its gradient is s / 5 on every one of them, times the mean advantage .4.
    assert found == pytest.approx([math.exp(-0.004) / 5 * 0.4] * 5, rel=1e-12)
    # The second turn earned -.5 and is pushed up as much as the first.
    assert found[4] > 0 > ADVANTAGES[4]
    assert gspo_token(TRAJECTORY)[4] < 0


def test_both_forms_agree_where_advantages_are_constant_and_so_does_their_sum() -> None:
    assert sum(through_the_mean()) == pytest.approx(sum(gspo_token(TRAJECTORY)), rel=1e-12)


def test_a_turn_unit_clips_the_turn_that_moved_and_leaves_the_other_its_own_ratio() -> None:
    assert gspo_token(TRAJECTORY) == pytest.approx([0.199202] * 3 + [-0.099601] * 2, abs=5e-7)
    assert gspo_token(TURN) == pytest.approx([0.204040] * 3 + [0.0] * 2, abs=5e-7)


def test_one_ratio_over_a_change_of_sign_stops_one_side_alone() -> None:
    # Every token .05 up: above 1.04, so that what is to go up stops, and what is to go down goes on at exp(.05) / 5 * .5.
    up = gspo_token(TRAJECTORY, log_ratios=(0.05,) * 5)
    assert up == pytest.approx([0.0] * 3 + [-0.105127] * 2, abs=5e-7)
    down = gspo_token(TRAJECTORY, log_ratios=(-0.05,) * 5)
    assert down == pytest.approx([0.190246] * 3 + [0.0] * 2, abs=5e-7)


def test_one_sided_clipping_is_counted_by_unit() -> None:
    # Unit 0: mixed and clipped. Unit 1: mixed, not clipped. Unit 2: clipped whole. Unit 3 of another micro-batch: neither.
    found = Observations()
    add_pass(found, unit_T=[0, 0, 1, 1, 2, 2], clipped_T=[1, 0, 0, 0, 1, 1], advantage_T=[1, -0.5, 1, -1, 2, 2])
    add_pass(found, unit_T=[0, 0], clipped_T=[0, 0], advantage_T=[1, 0])
    metrics = update_metrics([MinibatchStats.from_observations(found)], current_version=0)
    assert metrics["clip/units"] == 2 / 4
    assert metrics["credit/mixed_sign_units"] == 2 / 4
    assert metrics["clip/units_one_sided"] == 1 / 4


def test_the_page_shows_these_numbers() -> None:
    rows = dict(re.findall(r"^\| (.+?) \|((?: *[+-]?[\d.]+ *\|){5})$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    numbers = {name: [float(cell) for cell in row.strip(" |").split("|")] for name, row in rows.items()}
    expected = {
        "advantage": list(ADVANTAGES),
        "log-ratio": list(LOG_RATIOS),
        "through the mean": through_the_mean(),
        "`unit: trajectory`": gspo_token(TRAJECTORY),
        "`unit: turn`": gspo_token(TURN),
        "all log-ratios +0.05": gspo_token(TRAJECTORY, log_ratios=(0.05,) * 5),
        "all log-ratios -0.05": gspo_token(TRAJECTORY, log_ratios=(-0.05,) * 5),
    }
    assert numbers.keys() == expected.keys()
    for name, row in expected.items():
        assert numbers[name] == pytest.approx(row, abs=5e-5), name
