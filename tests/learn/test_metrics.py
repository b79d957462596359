"""What a step reports of its trajectories, its minibatches and the process it runs in."""

import mmap
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.credit import Credit
from agentrl.learn.metrics import (
    MinibatchStats,
    Observations,
    Sums,
    anchor_metrics,
    divergence,
    effective_samples,
    first_metrics,
    process_metrics,
    rollout_metrics,
    update_metrics,
)
from agentrl.testing import make_group
from agentrl.types import StopReason
from tests.support.each import each
from tests.support.tallies import add_pass, make_tally


def test_sums_of_parts_are_those_of_the_whole() -> None:
    values = np.random.default_rng(0).lognormal(size=50)
    parts = [Sums.from_values(part) for part in np.split(values, [0, 7, 30])]  # the first had nothing to do
    joined = reduce(Sums.plus, parts)
    assert (joined.num, joined.peak) == (50, values.max())
    assert (joined.mean, joined.spread) == pytest.approx((values.mean(), values.std()), rel=1e-12)
    assert Sums().plus(parts[1]) == parts[1].plus(Sums()) == parts[1]
    assert (Sums().mean, Sums().spread, Sums().peak) == (0, 0, 0)


def test_of_no_tokens_all_is_zero() -> None:
    found = (
        update_metrics([MinibatchStats()], current_version=3)
        | first_metrics(MinibatchStats())
        | anchor_metrics([MinibatchStats()], known=[3])
    )
    assert found.pop("ratio/effective_samples") == 1
    assert not any(found.values())


def test_observations_are_kept_as_narrow_as_they_are() -> None:
    observations = Observations()
    observations.add(
        of_float32=torch.tensor([0.5], dtype=torch.bfloat16),
        of_float64=torch.tensor([0.1], dtype=torch.float64),
        of_int32=torch.tensor([7]),
        of_bool=torch.tensor([True]),
    )
    assert {name: columns[0].dtype for name, columns in observations.columns.items()} == {
        f"of_{kind}": np.dtype(kind) for kind in ("float32", "float64", "int32", "bool")
    }
    assert [observations.column(name).tolist() for name in observations.columns] == [[0.5], [0.1], [7], [True]]
    assert {column.dtype for part in observations.passes() for column in part.values()} == {np.dtype("float64")}


def test_ratios_beyond_all_numbers_end_no_run() -> None:
    observations = Observations()
    add_pass(observations, log_ratio_T=[0.0])
    add_pass(observations, log_ratio_T=[400.0])
    metrics = update_metrics([MinibatchStats.from_observations(observations)], current_version=0)
    assert metrics["ratio/token_spread"] == np.inf


@pytest.mark.parametrize("num", [1, 3])
def test_metrics_are_those_of_all_tokens_however_they_are_split(num: int) -> None:
    rng = np.random.default_rng(num)
    size = (5, 12)  # passes, tokens of each
    unit = np.sort(rng.integers(0, 4, size), axis=1)
    unit = np.array([np.unique(row, return_inverse=True)[1] for row in unit])
    log_ratio, advantage = rng.normal(size=size), rng.integers(-1, 2, size) * 0.5
    clipped, entropy = rng.integers(0, 2, size), rng.random(size)
    difference, version = rng.normal(size=size), rng.integers(3, 9, size)
    ratio = [np.exp(rng.normal(size=row.max() + 1)) for row in unit]
    observations = [Observations() for _ in range(num)]
    for index, passes in enumerate(np.array_split(np.arange(5), num)):
        for p in passes:
            add_pass(
                observations[index],
                unit_T=unit[p].tolist(),
                ratio_U=ratio[p].tolist(),
                log_ratio_T=log_ratio[p].tolist(),
                moved_T=log_ratio[p].tolist(),
                advantage_T=advantage[p].tolist(),
                clipped_T=clipped[p].tolist(),
                entropy_T=entropy[p].tolist(),
                engine_difference_T=difference[p].tolist(),
                version_T=version[p].tolist(),
                reference_kl_T=(2 * difference[p]).tolist(),
                mismatch_U=(3 * ratio[p]).tolist(),
                limited_U=(ratio[p] > 1).astype(float).tolist(),
                rejected_U=(ratio[p] > 2).astype(float).tolist(),
                trajectory_T=(np.arange(12) // 4).astype(float).tolist(),  # each in every pass
            )
        observations[index].loss = float(index)
    tally = MinibatchStats.merge([MinibatchStats.from_observations(part) for part in observations])
    assert tally.loss == sum(range(num))
    totals = difference.reshape(5, 3, 4).sum((0, 2))
    assert tally.trajectories == pytest.approx(dict(enumerate(totals)), rel=1e-12)
    assert divergence(tally) == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-12)
    ratio_U = np.concatenate(ratio)
    is_in_unit = [[row == u for u in range(row.max() + 1)] for row in unit]
    clipped_U = np.array([bool(clipped[p][at].any()) for p in range(5) for at in is_in_unit[p]])
    mixed_U = np.array(
        [bool((advantage[p][at] > 0).any() and (advantage[p][at] < 0).any()) for p in range(5) for at in is_in_unit[p]]
    )
    expected = {
        "staleness/mean": (9 - version).mean(),
        "staleness/max": (9 - version).max(),
        "ratio/mean": ratio_U.mean(),
        "ratio/spread": ratio_U.std(),
        "ratio/token_spread": np.exp(log_ratio).std(),
        "clip/tokens": clipped.mean(),
        "clip/tokens_positive": (clipped * (advantage > 0)).mean(),
        "clip/tokens_negative": (clipped * (advantage < 0)).mean(),
        "clip/units": clipped_U.mean(),
        "clip/units_one_sided": (clipped_U & mixed_U).mean(),
        "credit/mixed_sign_units": mixed_U.mean(),
        "entropy": entropy.mean(),
        "kl/behavior": -difference.mean(),
        "kl/reference": 2 * difference.mean(),
        "mismatch/mean": 3 * ratio_U.mean(),
        "mismatch/max": 3 * ratio_U.max(),
        "mismatch/limited": (ratio_U > 1).mean(),
        "clip/units_rejected": (ratio_U > 2).mean(),
        "first/ratio_deviation": np.abs(ratio_U - 1).max(),
        "first/clipped_tokens": clipped.mean(),
        "first/engine_difference": np.abs(difference).mean(),
    }
    found = update_metrics([tally], current_version=9) | first_metrics(tally)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    of_anchor = anchor_metrics([tally], known={9, 7, 4})
    kept = np.isin(version, [7, 4])
    assert of_anchor == pytest.approx(
        {
            "staleness/difference": np.abs(log_ratio).mean(),
            "staleness/unkept": 1 - kept.mean(),
            "mismatch/difference": np.abs(difference - log_ratio)[kept].mean(),
        },
        rel=1e-12,
    )


def test_what_processes_tell_one_another_does_not_grow_with_tokens() -> None:
    few, many = (
        len(pickle.dumps(make_tally(log_ratio_T=[0.1] * num, unit_T=[float(u) for u in range(num)])))
        for num in (10, 10_000)
    )
    assert many < few + 100


def test_the_share_without_an_advantage_counts_what_is_excluded_and_nothing_that_failed() -> None:
    group = make_group([[0.0]] * 5)
    lost = replace(group.trajectories[4], stop_reason=StopReason.ENV_ERROR)
    group = replace(group, trajectories=(*group.trajectories[:4], lost))
    credits = [Credit.uniform(t, advantage) for t, advantage in zip(group.trajectories, (1, 0, -1, 1, 0), strict=True)]
    credits[3] = Credit.excluded(group.trajectories[3])
    assert rollout_metrics([group], [credits])["credit/zero_advantage"] == pytest.approx(2 / 4)
    stale = replace(credits[0], keep_T=np.zeros_like(credits[0].keep_T))  # what is too old is not trained on
    assert rollout_metrics([group], [[stale, *credits[1:]]])["credit/zero_advantage"] == pytest.approx(3 / 4)


def test_the_length_of_thoughts_is_told_of_all_turns() -> None:
    group = make_group([[0.0, 0.0], [0.0, 1.0]])
    said = iter([{"reasoning_content": "Hm, 3."}, {}, {"content": "Yes."}, {"reasoning_content": "Ah"}])
    trajectories = [
        replace(t, turns=tuple(replace(turn, message=next(said)) for turn in t.turns)) for t in group.trajectories
    ]
    group = replace(group, trajectories=tuple(trajectories))
    found = rollout_metrics([group], [[Credit.uniform(t, 0.0) for t in group.trajectories]])
    assert found["turn/thinks"] == 2 / 4
    assert found["turn/thought_characters"] == (6 + 2) / 4


def test_each_component_of_the_reward_is_told_of_an_episode() -> None:
    group = make_group([[0.0, 0.0], [0.0, 1.0]])
    parts = iter([{"a": 1.0}, {"a": 0.5, "mean": 9.0}, {}, {"b": -2.0, "odd": "x"}])
    trajectories = [
        replace(t, turns=tuple(replace(turn, extras={"reward_components": next(parts)}) for turn in t.turns))
        for t in group.trajectories
    ]
    lost = replace(trajectories[0], stop_reason=StopReason.ENV_ERROR)
    group = replace(group, trajectories=(*trajectories, lost))
    found = rollout_metrics([group], [[Credit.uniform(t, 0.0) for t in group.trajectories]])
    assert (found["reward/a"], found["reward/b"], found["reward/odd"]) == (1.5 / 2, -2 / 2, 0)
    assert found["reward/mean"] == 1 / 2  # of the return: no component takes its name


def test_what_an_environment_leaks_shows(tmp_path: Path) -> None:
    before = process_metrics()
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    files = [(tmp_path / f"{i}").open("w") for i in range(5)]
    hoard = mmap.mmap(-1, 200_000_000)  # not of what an earlier test had and the process kept
    hoard[::4096] = b"x" * len(hoard[::4096])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = process_metrics()
        child.communicate(b"\n")
    release.set()
    for thread in threads:
        thread.join()
    for file in files:
        file.close()
    assert found["process/threads"] - before["process/threads"] == 3
    assert found["process/open_files"] - before["process/open_files"] == 6  # and the child's input
    assert found["process/children"] - before["process/children"] == 1
    assert found["process/memory_bytes"] - before["process/memory_bytes"] > 150_000_000


def test_the_effective_sample_size_is_that_of_whole_trajectories_and_no_split_changes_it() -> None:
    rng = np.random.default_rng(0)
    difference_T, trajectory_T = torch.from_numpy(rng.normal(size=9)), torch.tensor([0, 0, 0, 2, 2, 5, 5, 5, 5])
    weights = [float(difference_T[trajectory_T == i].sum().exp()) for i in (0, 2, 5)]
    whole, first, second = (
        make_tally(engine_difference_T=difference_T[at].tolist(), trajectory_T=trajectory_T[at].tolist())
        for at in (slice(None), slice(5, None), slice(5))
    )
    expected = sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights))
    assert effective_samples(whole) == pytest.approx(expected, rel=1e-12)
    assert effective_samples(MinibatchStats.merge([first, second])) == pytest.approx(expected, rel=1e-12)


@each(("log_weights", "share"), [([-900, -900], 1), ([0, -800, -900, 900], 1 / 4), ([], 1)])
def test_the_effective_sample_size_of_weights_beyond_all_numbers(log_weights: list[float], share: float) -> None:
    tally = make_tally(engine_difference_T=log_weights, trajectory_T=[float(i) for i in range(len(log_weights))])
    assert effective_samples(tally) == share
