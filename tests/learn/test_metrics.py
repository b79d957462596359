"""What a step reports of its trajectories, its minibatches and the process it runs in."""

import mmap
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.credit import Credit
from agentrl.learn.metrics import Tally, effective_samples, process_metrics, rollout_metrics
from agentrl.testing import make_group
from agentrl.types import StopReason


def test_parts_of_a_minibatch_join_to_the_whole() -> None:
    whole, parts = Tally(), [Tally(), Tally()]
    for part, values in zip(parts, ([1.0, 2.0], [3.0]), strict=True):
        for tally in (whole, part):
            tally.add(ratio_U=torch.tensor(values))
            tally.loss += sum(values)
    joined = Tally.joined([*parts, Tally()])  # the last had nothing to do
    assert joined.column("ratio_U").tolist() == whole.column("ratio_U").tolist() == [1.0, 2.0, 3.0]
    assert joined.loss == whole.loss == 6.0


def test_the_share_without_an_advantage_counts_what_is_excluded_and_nothing_that_failed() -> None:
    group = make_group([[0.0]] * 5)
    lost = replace(group.trajectories[4], stop_reason=StopReason.ENV_ERROR)
    group = replace(group, trajectories=(*group.trajectories[:4], lost))
    credits = [Credit.uniform(t, advantage) for t, advantage in zip(group.trajectories, (1, 0, -1, 1, 0), strict=True)]
    credits[3] = Credit.excluded(group.trajectories[3])
    assert rollout_metrics([group], [credits])["credit/zero_advantage"] == pytest.approx(2 / 4)


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
    whole, first, second = Tally(), Tally(), Tally()
    whole.add(engine_difference_T=difference_T, trajectory_T=trajectory_T)
    first.add(engine_difference_T=difference_T[5:], trajectory_T=trajectory_T[5:])
    second.add(engine_difference_T=difference_T[:5], trajectory_T=trajectory_T[:5])
    expected = sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights))
    assert effective_samples(whole) == pytest.approx(expected, rel=1e-12)
    assert effective_samples(Tally.joined([first, second])) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("log_weights", "share"), [([-900, -900], 1), ([0, -800, -900, 900], 1 / 4), ([], 1)])
def test_the_effective_sample_size_of_weights_beyond_all_numbers(log_weights: list[float], share: float) -> None:
    tally = Tally()
    tally.add(engine_difference_T=torch.tensor(log_weights), trajectory_T=torch.arange(len(log_weights)))
    assert effective_samples(tally) == share
