"""Ranges that follow the spread of ratios: what they hold, what cannot widen them, what they are kept in."""

from dataclasses import replace
from math import exp, log, log1p, pi, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from agentrl import Credit
from agentrl.learn.batch import LossColumns
from agentrl.learn.calibration import (
    Band,
    Calibration,
    ClipStats,
    ClipTarget,
    Units,
    clip_stats,
    range_metrics,
    unit_clip_stats,
)
from agentrl.learn.config import CalibratedConfig, LossConfig
from agentrl.learn.learner import Learner
from agentrl.learn.metrics import Array, Observations
from agentrl.learn.micro_batch_loss import AnchorState, micro_batch_loss, trust_region
from agentrl.types import TrajectoryGroup
from tests.support.learners import make_learner
from tests.support.tallies import add_pass
from tests.support.tiers import first_quick
from tests.support.trajectories import some_groups, some_ids, trajectory, turn

AIM = ClipTarget.from_config(LossConfig(trust="calibrated"))
NUM_UNITS = 32
NORMAL = 1.880794 * sqrt(pi / 2)
"""The normal quantile at .97, in mean absolute deviations."""


def shown(
    log_ratio_U: Array, *, length_U: Array, calibration: Calibration, target: ClipTarget = AIM, staleness: float = 0
) -> ClipStats:
    """What a minibatch shows under the present ranges; every second unit is pushed up, the others down."""
    staleness_U = np.full(len(length_U), staleness)
    low_U, high_U = calibration.widths(Units(staleness_U, length_U), target)
    up_U = np.where(np.arange(len(length_U)) % 2 == 0, length_U, 0.0)
    down_U = length_U - up_U
    clipped_down_U, clipped_up_U = down_U * (log_ratio_U < -low_U), up_U * (log_ratio_U > high_U)
    units = Units(staleness_U, length_U)
    return unit_clip_stats(units, log_ratio_U, down_U, up_U, clipped_down_U, clipped_up_U, target=target)


def clipped_share(length: int, *, seed: int, tail: float, together: float) -> float:
    """Share that is clipped in steps 20 to 40 of four minibatches, in which ratios spread more and more.

    `together`: by how much the units of a minibatch move alike, in what they move apart.
    """
    rng, calibration = np.random.default_rng(seed), Calibration()
    clipped = pushed = 0.0
    for step in range(40):
        for minibatch in range(4):
            length_U = rng.poisson(length, NUM_UNITS).clip(1).astype(np.float64)
            spread_U = 0.03 * sqrt(minibatch) / np.sqrt(length_U)
            moved_U = (rng.standard_t(tail, NUM_UNITS) + together * rng.normal()) / sqrt(1 + together**2)
            found = shown(moved_U * spread_U, length_U=length_U, calibration=calibration)
            calibration = calibration.updated(found, AIM)
            if step >= 20 and minibatch:
                (alike,) = found.values()
                clipped += alike.clipped_down.total + alike.clipped_up.total
                pushed += alike.down.total + alike.up.total
    return clipped / pushed


@pytest.mark.parametrize("together", [0, 3], ids=["apart", "together"])
@pytest.mark.parametrize("tail", [4, 1000], ids=["heavy", "normal"])
@pytest.mark.parametrize("length", first_quick([100, 20, 1000]))
def test_the_share_that_is_clipped_is_within_a_fifth_of_its_aim_after_twenty_steps(
    length: int, tail: float, together: float
) -> None:
    shares = [clipped_share(length, seed=seed, tail=tail, together=together) for seed in range(24)]
    assert np.mean(shares) == pytest.approx(AIM.clipped, rel=0.2)


def test_before_anything_was_measured_ranges_are_those_of_the_unit_and_after_that_of_the_spread() -> None:
    length_U = np.full(2, 100.0)
    low_U, high_U = Calibration().widths(Units(np.zeros(2), length_U), AIM)
    assert (low_U[0], high_U[0]) == (-log1p(-3e-4), log1p(4e-4))
    found = shown(np.array([0.002, -0.002]), length_U=length_U, calibration=Calibration())
    low_U, high_U = Calibration().updated(found, AIM).widths(Units(np.zeros(2), length_U), AIM)
    assert low_U.tolist() == high_U.tolist() == pytest.approx([0.002 * NORMAL] * 2)


def test_units_that_no_update_has_moved_tell_nothing() -> None:
    found = shown(np.zeros(4), length_U=np.full(4, 10.0), calibration=Calibration())
    assert Calibration().updated(found, AIM) == Calibration()


def test_a_first_minibatch_that_hardly_moved_does_not_hold_the_range_down() -> None:
    rng, calibration, length_U = np.random.default_rng(0), Calibration(), np.full(NUM_UNITS, 40.0)
    for spread in (1e-7, 1e-2, 1e-2, 1e-2):
        found = shown(rng.normal(size=NUM_UNITS) * spread, length_U=length_U, calibration=calibration)
        calibration = calibration.updated(found, AIM)
    assert calibration.widths(Units(np.zeros(1), np.full(1, 40.0)), AIM)[1][0] > 0.01


def test_a_policy_that_runs_away_takes_its_range_no_further_than_single_tokens_allow() -> None:
    rng, calibration, length_U = np.random.default_rng(0), Calibration(), np.full(NUM_UNITS, 100.0)
    for step in range(40):
        log_ratio_U = rng.normal(size=NUM_UNITS) * 1e-3 * 2**step
        calibration = calibration.updated(shown(log_ratio_U, length_U=length_U, calibration=calibration), AIM)
    low_U, high_U = calibration.widths(Units(np.zeros(1), np.full(1, 100.0)), AIM)
    assert (low_U[0], high_U[0]) == pytest.approx((-log1p(-0.2) / 2.5, log1p(0.27) / 2.5))
    for _ in range(40):  # and comes back with it
        calibration = calibration.updated(
            shown(rng.normal(size=NUM_UNITS) * 1e-3, length_U=length_U, calibration=calibration), AIM
        )
    low_U, high_U = calibration.widths(Units(np.zeros(1), np.full(1, 100.0)), AIM)
    assert low_U[0] < 0.04


def test_a_single_unit_does_not_double_the_range() -> None:
    rng, calibration, length_U = np.random.default_rng(0), Calibration(), np.full(NUM_UNITS, 20.0)
    for _ in range(20):
        found = shown(rng.normal(size=NUM_UNITS) * 1e-3, length_U=length_U, calibration=calibration)
        calibration = calibration.updated(found, AIM)
    before = calibration.widths(Units(np.zeros(1), np.full(1, 20.0)), AIM)[1][0]
    log_ratio_U = rng.normal(size=NUM_UNITS) * 1e-3
    log_ratio_U[0] = 30.0
    calibration = calibration.updated(shown(log_ratio_U, length_U=length_U, calibration=calibration), AIM)
    assert calibration.widths(Units(np.zeros(1), np.full(1, 20.0)), AIM)[1][0] < 2 * before


def test_each_staleness_has_its_range_and_one_never_seen_that_of_the_nearest() -> None:
    calibration, length_U = Calibration(), np.full(NUM_UNITS, 100.0)
    for staleness, spread in ((0, 1e-3), (4, 5e-3)):
        found = shown(
            np.where(np.arange(NUM_UNITS) % 4 < 2, spread, -spread),
            length_U=length_U,
            calibration=calibration,
            staleness=staleness,
        )
        calibration = Calibration(bands={**calibration.bands, **Calibration().updated(found, AIM).bands})
    widths_U = calibration.widths(Units(np.array([0.0, 1, 4, 7, 64]), np.full(5, 100.0)), AIM)[0]
    assert widths_U / NORMAL == pytest.approx([1e-3, 1e-3, 5e-3, 5e-3, 5e-3])


def test_lengths_have_ranges_of_their_own_where_a_recipe_asks() -> None:
    asked = ClipTarget.from_config(
        LossConfig(trust="calibrated", calibrated=CalibratedConfig(by_length=True, clipped=0.1))
    )
    length_U = np.array([4.0, 5.0, 100.0, 101.0])
    found = shown(np.array([0.02, -0.02, 0.001, -0.001]), length_U=length_U, calibration=Calibration(), target=asked)
    widths_U = Calibration().updated(found, asked).widths(Units(np.zeros(4), length_U), asked)[0]
    assert widths_U == pytest.approx(
        1.281552 * sqrt(pi / 2) * np.array([0.02, 0.02, 0.001, 0.001])
    )  # the normal quantile at .9


@pytest.mark.parametrize("share", [0.03, 0.003])
@pytest.mark.parametrize("spread", [1e-7, 0.01, 1.0], ids=["narrowest", "between", "widest"])
def test_ranges_follow_the_equations(spread: float, share: float) -> None:
    rng, calibration = np.random.default_rng(0), Calibration()
    target = ClipTarget.from_config(LossConfig(trust="calibrated", calibrated=CalibratedConfig(clipped=share)))
    k = NormalDist().inv_cdf(1 - share)
    kept: dict[int, tuple[int, float, list[float]]] = {}
    for number in range(14):
        for staleness in (0, 5):
            begun = kept.get(0, (0, 0.0, [log(k * sqrt(pi / 2))] * 2))  # of the nearest, where there is one
            num, m, gains = kept.get(staleness, (begun[0], begun[1], begun[2].copy()))
            length_U = rng.integers(1, 60, 8).astype(np.float64)
            log_ratio_U, down_U, up_U = rng.normal(size=8) * spread, rng.integers(1, 9, 8), rng.integers(1, 9, 8)
            # More is clipped below than above, in one band more than in the other.
            down, up = down_U * rng.integers(0, 2, 8), up_U * (number % 3 == 0) * (staleness == 0)
            units = Units(np.full(8, float(staleness)), length_U)
            tokens = [np.asarray(column, dtype=np.float64) for column in (down_U, up_U, down, up)]
            calibration = calibration.updated(unit_clip_stats(units, log_ratio_U, *tokens, target=target), target)
            bound_U = max(target.token) * np.minimum(1, 4 / np.sqrt(length_U)) / 2
            m += max(0.1, 1 / (num + 1)) * (np.minimum(np.abs(log_ratio_U), bound_U).mean() - m)
            for side, (pushed, clipped) in enumerate(((down_U, down), (up_U, up))):
                excess = (clipped.sum() - share * pushed.sum()) / ((down_U.sum() + up_U.sum()) / 2)
                step = 0.3 * excess / (k * NormalDist().pdf(k)) if num >= 8 else 0
                gains[side] += min(max(step, -3), 3)
                widest = target.token[side] * min(1, 4 / sqrt(length_U.mean()))
                gains[side] = min(max(gains[side], log(1e-5 / m)), log(widest / m))
            kept[staleness] = (num + 1, m, gains)
    for staleness, (num, m, gains) in kept.items():
        band = calibration.bands["0/3" if staleness else "0/0"]
        assert (band.num_minibatches, band.spread, *band.gains) == pytest.approx((num, m, *gains), rel=1e-12)
        widths = calibration.widths(Units(np.full(3, float(staleness)), np.array([1.0, 4.0, 100.0])), target)
        for side, width_U in enumerate(widths):
            expected = np.clip(m * exp(gains[side]), 1e-5, target.token[side] * np.array([1, 1, 0.4]))
            np.testing.assert_allclose(width_U, expected, rtol=1e-12)


def test_what_passes_show_is_told_apart_by_sign_and_staleness() -> None:
    observations = Observations()
    add_pass(  # a unit of two old tokens that has moved, and one that has not
        observations,
        unit_T=[0, 0, 1],
        ratio_U=[exp(0.01), 1.0],
        advantage_T=[-0.5, 0.0, 0.5],
        clipped_T=[1, 1, 1],
        version_T=[3, 5, 7],
    )
    add_pass(observations, unit_T=[0] * 3, ratio_U=[exp(-0.02)], advantage_T=[0.5, 0.5, -1], version_T=[7] * 3)
    add_pass(
        observations, unit_T=[0] * 5, ratio_U=[exp(0.03)], advantage_T=[0.5] * 5, clipped_T=[1] * 5, version_T=[7] * 5
    )
    found = clip_stats(observations, AIM, version=7, is_updated=True)
    assert sorted(found) == ["0/0", "0/2"]
    old, new = found["0/2"], found["0/0"]  # of a mean staleness of three; of none
    assert (old.length.total, new.length.total) == (2, 8)
    assert (old.distance.mean, new.distance.mean) == pytest.approx((0.01, 0.025))
    assert [sums.total for sums in old[2:]] == [1, 0, 1, 0]
    assert [sums.total for sums in new[2:]] == [1, 7, 0, 5]
    bands = {name: Band(num_minibatches=9, spread=0.01, gains=(0.5, 0.7)) for name in ("0/0", "0/2")}
    bands["0/2"] = bands["0/2"].model_copy(update={"spread": 0.09})
    metrics = range_metrics(Calibration(bands=bands), [found, found])
    assert metrics == pytest.approx(
        {"clip/pushed_tokens": 6 / 9, "clip/width_low": 0.01 * exp(0.5), "clip/width_high": 0.01 * exp(0.7)}
    )
    assert range_metrics(Calibration(), [{}]) == {"clip/pushed_tokens": 0.0}


def test_rejected_units_leave_ranges_as_they_would_be_without_them() -> None:
    rng, config = np.random.default_rng(0), LossConfig(trust="calibrated", unit="turn", reject=1.5)
    target, num_units, length = ClipTarget.from_config(config), 64, 20
    with_them, without = Calibration(), Calibration()
    for _ in range(40):
        log_ratio_U = rng.normal(size=num_units) * 0.004
        log_ratio_U[::8] = -0.5
        sign_U = rng.choice([-1.0, 1.0], size=num_units)
        calibrations = []
        for calibration, chosen_U in (
            (with_them, np.arange(num_units)),
            (without, np.flatnonzero(log_ratio_U != -0.5)),
        ):
            unit_T = torch.arange(len(chosen_U)).repeat_interleave(length)
            log_ratio_T, sign_T = (torch.from_numpy(column_U[chosen_U])[unit_T] for column_U in (log_ratio_U, sign_U))
            columns = LossColumns(
                advantage_T=sign_T,
                weight_T=torch.full_like(sign_T, 1 / len(sign_T)),
                behavior_T=torch.full_like(sign_T, -2),
                unit_T=unit_T,
                count_U=torch.full((len(chosen_U),), length),
                version_T=torch.full_like(unit_T, 3),
                trajectory_T=unit_T,
            )
            observations = Observations()
            micro_batch_loss(
                columns.behavior_T + log_ratio_T,
                columns,
                config=config,
                observations=observations,
                trust=trust_region(config, columns, calibration=calibration, version=3),
                anchor=AnchorState(),
                version=3,
            )
            calibrations.append(
                calibration.updated(clip_stats(observations, target, version=3, is_updated=True), target)
            )
        with_them, without = calibrations
    (band,), (expected,) = with_them.bands.values(), without.bands.values()
    assert (band.spread, *band.gains) == pytest.approx((expected.spread, *expected.gains), rel=1e-12)
    assert max(with_them.widths(Units(np.zeros(1), np.full(1, 20.0)), target)[1]) < 0.02  # not its bound, .107


GROUPS = some_groups([4, 3, 4])
RNG = np.random.default_rng(0)
CREDITS = [[Credit.from_tokens(t, RNG.normal(size=t.num_action_tokens)) for t in g.trajectories] for g in GROUPS]


def learner(**train: Any) -> Learner:
    loss = LossConfig(trust="calibrated", unit="turn", anchor="recomputed")
    return make_learner(loss=loss, is_double=True, **{"num_minibatches": 3, "learning_rate": 1e-3, **train})


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_an_engine_rounds_before_the_first_update_of_a_step_is_no_movement(staleness: int) -> None:
    """Against the engine's log-probabilities a fresh minibatch shows what it does against the trainer's own: nothing."""
    rng, clipped, bands = np.random.default_rng(0), {}, {}
    asked = [(some_ids(rng, 3, 9), some_ids(rng, 8, 20)) for _ in range(24)]
    for anchor in ("behavior", "recomputed"):
        one = make_learner(
            loss=LossConfig(trust="calibrated", unit="turn", anchor=anchor), is_double=True, num_minibatches=2
        )
        trajectories = []
        for number, (prompt, action) in enumerate(asked):
            noise_T = 1e-5 * rng.standard_normal(len(action))
            sampled = turn(prompt, action, logprobs=(one.logprobs(prompt, action).numpy() + noise_T).tolist())
            trajectories.append(trajectory(number, replace(sampled, versions=(0,) * len(action))))
        group = TrajectoryGroup(group_id="g", trajectories=tuple(trajectories))
        credits = [Credit.uniform(t, (-1.0) ** number) for number, t in enumerate(trajectories)]
        clipped[anchor] = one.update([group], [credits], version=staleness)["clip/pushed_tokens"]
        (bands[anchor],) = one.state.calibration.bands.values()
    # Stale units differ by updates of steps before, which only the engine's log-probabilities tell.
    assert (bands["behavior"].num_minibatches, bands["recomputed"].num_minibatches) == (1 + staleness, 1)
    if not staleness:
        assert bands["behavior"].spread == pytest.approx(bands["recomputed"].spread, rel=1e-2)
        assert clipped["behavior"] == pytest.approx(clipped["recomputed"], rel=1e-12)
        assert clipped["behavior"] > 0.1


def test_no_budget_of_a_pass_changes_what_is_measured() -> None:
    small, large = (learner(max_tokens_per_micro_batch=tokens) for tokens in (40, 4000))
    for version in range(4):
        of_small, of_large = (one.update(GROUPS, CREDITS, version=version) for one in (small, large))
        assert of_small == pytest.approx(of_large, rel=1e-6, abs=1e-9)
    bands, other_bands = small.state.calibration.bands, large.state.calibration.bands
    assert list(bands) == list(other_bands)
    for name, band in bands.items():
        other = other_bands[name]
        assert band.num_minibatches == other.num_minibatches
        assert (band.spread, *band.gains) == pytest.approx((other.spread, *other.gains), rel=1e-6)
    assert max(band.num_minibatches for band in bands.values()) > 2
    assert 0 < of_small["clip/width_low"] < exp(0.3) - 1
    assert 0 <= of_small["clip/pushed_tokens"] < 1


def test_a_checkpoint_keeps_what_was_measured(tmp_path: Path) -> None:
    whole, resumed = learner(), learner()
    for version in range(2):
        whole.update(GROUPS, CREDITS, version=version)
    whole.state.save(tmp_path)
    resumed.state.load(tmp_path)
    assert resumed.state.calibration == whole.state.calibration != Calibration()
    assert whole.update(GROUPS, CREDITS, version=2) == resumed.update(GROUPS, CREDITS, version=2)
