"""The loss as a training step computes it, from recipe to gradient, against plain loops in float64.

Pure functions have tests of their own (`test_loss`, `test_trust`, `test_calibration`). Here is what stands between them: what a
recipe asks, which state and which units a trust region is given, what leaves the loss, and what is counted.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learn.batch import LossColumns, make_batch
from agentrl.learn.calibration import ClipTarget, clip_stats, merge_clip_stats
from agentrl.learn.config import LossConfig
from agentrl.learn.metrics import MinibatchStats, Observations, divergence, update_metrics
from agentrl.learn.micro_batch_loss import AnchorState, StaleTokens, micro_batch_loss, trust_region
from agentrl.learn.plan import Planner
from agentrl.learn.tokens import RatioUnit
from tests.support.each import each
from tests.support.loss_oracle import (
    BY_LENGTH,
    BY_STALENESS,
    VERSION,
    Measured,
    expected_step,
    filled,
    stale_batch,
)
from tests.support.ratio_batches import UNITS, close, f64
from tests.support.tiers import slow_unless

TRAJECTORIES, CREDITS, TOKENS = stale_batch()
RANGE = {"clip_low": 0.03, "clip_high": 0.05}
EXPONENTS = {"kernel": {"positive": (1.5, 0.7), "negative": (0.6, 2.2)}}
RECIPES: dict[str, tuple[dict[str, Any], Measured]] = {
    "fixed": ({"trust": "fixed", **RANGE}, {}),
    "fixed, the papers' ranges": ({"trust": "fixed", "aggregation": "token-mean"}, {}),
    "fixed, of what is left": ({"trust": "fixed", **RANGE, "reject": 1.4}, {}),
    "token": ({"trust": "token", "clip_low": 0.08, "clip_high": 0.12}, {}),
    "token, of what is left": ({"trust": "token", **RANGE, "reject": 1.4, "aggregation": "turn-mean"}, {}),
    "calibrated, before anything was measured": ({"trust": "calibrated"}, {}),
    "calibrated": ({"trust": "calibrated"}, BY_STALENESS),
    "calibrated, of what is left": ({"trust": "calibrated", "reject": 1.4}, BY_STALENESS),
    "calibrated by length": ({"trust": "calibrated", "calibrated": {"by_length": True}, "reject": 1.4}, BY_LENGTH),
    "kernel": ({"trust": "kernel", **EXPONENTS, "aggregation": "constant", "constant_length": 16}, {}),
    "kernel, its authors' exponents": ({"trust": "kernel"}, {}),
    "kernel, of what is left": ({"trust": "kernel", **EXPONENTS, "reject": 1.4}, {}),
    "fixed, by length": ({"trust": "fixed", "clip_low": 0.01, "clip_high": 0.02, "clip_by_length": 30}, {}),
    "none": ({"trust": "none", "entropy_coefficient": 0.2}, {}),
    "geometric": ({"trust": "geometric", "clip_low": 0.08, "clip_high": 0.12, "aggregation": "token-mean"}, {}),
    "geometric, of what is left": ({"trust": "geometric", "reject": 1.4}, {}),
    "cap": ({"trust": "cap", **RANGE, "off_policy_limit": 0.3}, {}),
    "cap, the papers' range": ({"trust": "cap"}, {}),
    "gate": ({"trust": "gate", "gate": {"positive": 0.7, "negative": 1.9}, "aggregation": "turn-mean"}, {}),
    "gate, its authors' temperatures": ({"trust": "gate", "off_policy_limit": 0.05, "reject": 1.4}, {}),
    "tv": ({"trust": "tv", "clip_low": 0.01, "clip_high": 0.02}, {}),
    "tv, the papers' range": ({"trust": "tv"}, {}),
    "kl": ({"trust": "kl", "clip_low": 2e-4, "clip_high": 4e-4, "anchor": "recomputed"}, {}),
    "kl, the papers' range": ({"trust": "kl", "entropy_coefficient": -0.1}, {}),
    "k3": ({"trust": "fixed", "kl_coefficient": 0.3, "kl_estimator": "k3", "off_policy_limit": 0.05}, {}),
    "unbiased": (
        {"trust": "token", "anchor": "sampled", "kl_coefficient": 0.3, "kl_estimator": "unbiased"},
        {},
    ),
    "truncated by tokens": (
        {"anchor": "recomputed", "mismatch": "truncate", "mismatch_limit": 1.05, "mismatch_level": "token"},
        {},
    ),
    "masked by tokens": (
        {"anchor": "sampled", "mismatch": "mask", "mismatch_limit": 1.05, "mismatch_level": "token"},
        {},
    ),
    "truncated by products": (
        {"anchor": "sampled", "mismatch": "truncate", "mismatch_limit": 1.2, "mismatch_level": "product"},
        {},
    ),
    "masked by products": (
        {
            "anchor": "recomputed",
            "mismatch": "mask",
            "mismatch_limit": 1.2,
            "mismatch_level": "product",
            "off_policy_limit": 0.1,
        },
        {},
    ),
    "recomputed": ({"trust": "fixed", **RANGE, "anchor": "recomputed", "kl_coefficient": 0.3}, {}),
    "truncated": ({"trust": "token", "anchor": "recomputed", "mismatch": "truncate", "mismatch_limit": 1.2}, {}),
    "sampled, masked": (
        {"trust": "calibrated", "anchor": "sampled", "mismatch": "mask", "mismatch_limit": 1.2, "reject": 1.4},
        BY_STALENESS,
    ),
}
SPLITS = [(1, 10**6), (1, 60), (1, 1), (2, 60), (3, 60), (20, 60)]
"""Processes, two of the twenty without a trajectory; tokens of a pass."""
SPLIT_IN_ALL_WAYS = (
    "fixed, by length",
    "masked by products",
    "kl, the papers' range",
    "token, of what is left",
    "calibrated by length",
    "sampled, masked",
)
"""Recipes that `make test` splits in all these ways, the others in one."""


def column(name: str) -> Tensor:
    return f64(*(getattr(token, name) for token in TOKENS))


def before(config: LossConfig, tokens_T: Tensor) -> AnchorState:
    """What a learner knows of these tokens from before the first update."""
    if config.anchor == "behavior":
        return AnchorState()
    earlier = StaleTokens(column("version")[tokens_T] != VERSION, column("sampled")[tokens_T])
    return AnchorState(column("start")[tokens_T], stale=earlier if config.anchor == "sampled" else None)


def shares(num_processes: int, max_tokens: int, config: LossConfig) -> Iterator[list[tuple[Tensor, LossColumns]]]:
    """The passes of each process: which tokens of the batch, and their columns."""
    tokens, columns = make_batch(
        TRAJECTORIES,
        CREDITS,
        unit=config.unit,
        aggregation=config.aggregation,
        constant_length=config.constant_length,
    )
    planner = Planner(max_tokens=max_tokens, dtype=torch.float64)
    for share in planner.assign(tokens, num_processes=num_processes):
        yield [
            (torch.from_numpy(micro.token_T), columns.select(micro.token_T).map(micro.to_device))
            for micro in map(planner.lay_out, share)
        ]


@each("unit", UNITS)
def test_the_batch_has_what_recipes_tell_apart(unit: RatioUnit) -> None:
    settings, measured = RECIPES["calibrated, of what is left"]
    found = expected_step(TOKENS, LossConfig(unit=unit, **settings), measured)
    assert sorted(found.shown) == ["0/0", "0/1", "0/2", "0/3"]  # of staleness 0, 1, 2 and 3, 4 to 7
    assert 0.05 < found.metrics["clip/units_rejected"] < 0.3
    for side, pushed in (("positive", lambda a: a > 0), ("negative", lambda a: a < 0)):
        share = sum(pushed(token.advantage) for token in TOKENS) / len(TOKENS)
        assert 0.05 < found.metrics[f"clip/tokens_{side}"] < 0.7 * share


def is_quick(recipe: str, unit: RatioUnit, split: tuple[int, int]) -> bool:
    return recipe in SPLIT_IN_ALL_WAYS or split == (3, 60)


@each(("recipe", "unit", "split"), slow_unless(is_quick, RECIPES, UNITS, SPLITS))
def test_loss_gradient_decisions_and_metrics_of_a_recipe_follow_the_equations(
    recipe: str, unit: RatioUnit, split: tuple[int, int]
) -> None:
    num_processes, max_tokens = split
    settings, measured = RECIPES[recipe]
    if unit == "token":  # of one length
        settings = settings | ({"clip_by_length": None} if "clip_by_length" in settings else {})
    config = LossConfig(unit=unit, **settings)
    calibration, expected = filled(measured), expected_step(TOKENS, config, measured)
    policy_T, reference_T = column("policy").requires_grad_(), column("reference")
    entropy_T = column("entropy").requires_grad_()
    loss, clipped_T = torch.zeros((), dtype=torch.float64), torch.zeros(len(TOKENS), dtype=torch.bool)
    found: list[Observations] = []
    for passes in shares(num_processes, max_tokens, config):
        found.append(Observations())
        for tokens_T, columns in passes:
            loss = loss + micro_batch_loss(
                policy_T[tokens_T],
                columns,
                config=config,
                observations=found[-1],
                trust=trust_region(config, columns, calibration=calibration, version=VERSION),
                anchor=before(config, tokens_T),
                version=VERSION,
                reference_logprobs_T=reference_T[tokens_T] if config.kl_coefficient else None,
                entropy_T=entropy_T[tokens_T] if config.entropy_coefficient else None,
            )
            clipped_T[tokens_T] = torch.from_numpy(found[-1].columns["clipped_T"][-1])
    assert sum(len(one.columns["clipped_T"]) for one in found) >= (
        len(TRAJECTORIES) if max_tokens == 1 else num_processes
    )
    close(loss.detach(), f64(expected.loss)[0])
    of_policy_T, of_entropy_T = torch.autograd.grad(loss, (policy_T, entropy_T), allow_unused=True)
    close(of_policy_T, f64(*expected.gradient))
    close(torch.zeros_like(entropy_T) if of_entropy_T is None else of_entropy_T, f64(*expected.entropy_gradient))
    assert clipped_T.tolist() == expected.clipped
    tally = MinibatchStats.merge([*map(MinibatchStats.from_observations, found)])
    metrics = update_metrics([tally], current_version=VERSION) | {"divergence": divergence(tally)}
    assert {name: metrics.get(name) for name in expected.metrics} == pytest.approx(expected.metrics, rel=1e-12)
    assert ("clip/units_rejected" in metrics) == (config.reject is not None)
    assert ("clip/off_policy_tokens" in metrics) == (config.off_policy_limit is not None)
    for is_updated in (True, False):
        shown = merge_clip_stats(
            clip_stats(one, ClipTarget.from_config(config), version=VERSION, is_updated=is_updated) for one in found
        )
        told = expected_step(TOKENS, config, measured, is_updated=is_updated).shown
        assert shown.keys() == told.keys()
        for name, alike in shown.items():
            assert [alike.distance.num, *(sums.total for sums in alike)] == pytest.approx(told[name], rel=1e-12)
