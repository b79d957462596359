"""Which scheme suits what rollouts show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from agentrl import Credit, TrajectoryGroup
from agentrl.api.target import load
from agentrl.cli import main
from agentrl.credit import load_credit
from agentrl.report.advise import COMPARED, Advice, RunProfile, Task, advise, read_map, show
from agentrl.report.folder import RunFolder
from agentrl.report.records import records
from agentrl.testing import make_group
from tests.support.tabular import BASE, SCHEMES, Row

SHOWN = RunProfile(turns=10, group_size=8, repeated=1, explained=0.1, by_turn=0.5)


def played(*, noise: float, keys: bool = True) -> list[TrajectoryGroup]:
    """Rows of twelve decisions, four of which matter."""
    cell = replace(BASE, noise=noise)
    groups = [group for seed in range(8) for group in Row(cell, seed).play()[0]]
    if keys:
        return groups
    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, turns=tuple(replace(turn, state_key=None) for turn in t.turns)) for t in group.trajectories
            ),
        )
        for group in groups
    ]


def test_what_rollouts_show_is_measured() -> None:
    clear, noisy = (show(played(noise=noise)) for noise in (0.0, 2.0))
    assert clear is not None
    assert noisy is not None
    assert (clear.turns, clear.group_size, clear.by_turn) == (12, 8, 0)
    assert clear.repeated > 0.8
    assert clear.explained > 3 * noisy.explained
    without = show(played(noise=0.0, keys=False))
    assert without is not None
    assert (without.repeated, without.explained) == (0, 0)
    assert show([]) is None


def test_the_share_that_goes_with_the_action_is_that_of_the_variances() -> None:
    rng, groups = np.random.default_rng(0), []
    for number in range(1000):
        group = make_group([[0.0]] * 16, group_id=f"g{number}")
        members = []
        for index, trajectory in enumerate(group.trajectories):
            action = index % 4  # worth -1.34 to 1.34: a variance of 1, beside a noise of 3
            reward = (action - 1.5) / 1.118 + 3**0.5 * rng.normal()
            turn = replace(trajectory.turns[0], reward=reward, state_key="s", action_key=str(action))
            members.append(replace(trajectory, turns=(turn,)))
        groups.append(replace(group, trajectories=tuple(members)))
    shown = show(groups)
    assert shown is not None
    assert shown.explained == pytest.approx(1 / 4, abs=0.03)


def test_the_nearest_task_decides() -> None:
    def task(name: str, *, turns: float, **gains: tuple[float, float]) -> Task:
        return Task(name=name, seeds=9, profile=SHOWN.model_copy(update={"turns": turns}), gains=gains)

    tasks = [
        task("short", turns=2, group_gae=(0.01, 0.01), turn_return=(0.0, 0.01)),
        task("long", turns=12, action_values=(0.2, 0.01), group_gae=(0.1, 0.01), turn_return=(0.05, 0.01)),
    ]
    assert advise(SHOWN, tasks).section == COMPARED["action_values"]
    assert "(long)" in advise(SHOWN, tasks).why
    assert advise(SHOWN.model_copy(update={"turns": 2.5}), tasks).section == COMPARED["uniform"]
    assert advise(SHOWN.model_copy(update={"turns": 60}), tasks).why.startswith("no task")
    without_keys = advise(SHOWN.model_copy(update={"repeated": 0.05}), tasks)
    assert without_keys.section == COMPARED["turn_return"]
    assert "state_key()" in without_keys.why
    # An environment that pays at the end alone may be unable to serve it; a group of one has nothing to be compared with.
    assert advise(SHOWN.model_copy(update={"repeated": 0.05, "by_turn": 0}), tasks).section == COMPARED["uniform"]
    assert advise(SHOWN.model_copy(update={"group_size": 1}), tasks).why.startswith("groups have one usable episode")
    pairs = [one.model_copy(update={"profile": one.profile.model_copy(update={"group_size": 2})}) for one in tasks]
    assert (
        advise(SHOWN.model_copy(update={"group_size": 1.9}), pairs).section == COMPARED["action_values"]
    )  # of two, some fail


def test_the_recipe_has_the_options_with_which_the_scheme_was_compared() -> None:
    gains = {"action_values": (0.3, 0.03), "turn_return": (0.0, 0.01)}
    tasks = [Task(name="one", seeds=9, profile=SHOWN, gains=gains)]
    assert advise(SHOWN, tasks).line == "credit: {scheme: action_values, gamma: 1.0, lam: 0.5}"
    for name in {name for task in read_map() for name in task.gains} | {"uniform"}:
        section = yaml.safe_load(Advice(COMPARED[name], "").line)["credit"]
        assert section == COMPARED[name] == SCHEMES[name]
        # every discount and lambda is written out: the scheme's defaults may be others
        assert set(section) >= {"gamma", "lam"} & set(type(load_credit(section)).model_fields)


def test_the_recipe_of_the_environment_stands_in_where_no_scheme_was_ahead() -> None:
    shipped = {"scheme": "turn_return", "gamma": 0.5}
    level = [Task(name="one", seeds=9, profile=SHOWN, gains={"gigpo": (0.01, 0.01)})]
    found = advise(SHOWN, level, shipped=shipped)
    assert found.section == shipped
    assert found.why.startswith(
        "the recipe that comes along for this environment has it; on the task most alike (one) no"
    )
    ahead = [Task(name="one", seeds=9, profile=SHOWN, gains={"gigpo": (0.2, 0.01)})]
    found = advise(SHOWN, ahead, shipped=shipped)
    assert found.section == COMPARED["gigpo"]
    assert found.why.endswith("for this environment has credit: {scheme: turn_return, gamma: 0.5}.")
    assert advise(SHOWN, ahead, shipped=COMPARED["gigpo"]).why.endswith("over 9 seeds each.")


def test_tasks_that_rollouts_cannot_tell_apart_decide_together() -> None:
    tasks = [
        Task(name="one", seeds=9, profile=SHOWN, gains={"action_values": (0.3, 0.03), "turn_return": (0.0, 0.01)}),
        Task(
            name="like it",
            seeds=8,
            profile=SHOWN.model_copy(update={"explained": 0.12}),
            gains={"action_values": (-0.2, 0.04), "turn_return": (0.2, 0.01), "gigpo": (0.9, 0.01)},
        ),
        Task(name="far", seeds=9, profile=SHOWN.model_copy(update={"turns": 20}), gains={"action_values": (0.9, 0.01)}),
    ]
    section, why = advise(SHOWN, tasks)
    assert section == COMPARED["turn_return"]
    assert "(one, like it) it was ahead of uniform by 0.100 ± 0.007" in why
    assert "over 8 seeds" in why


def test_the_map_that_comes_along_knows_tasks_and_installed_schemes() -> None:
    tasks = read_map()
    assert len({task.name for task in tasks}) == len(tasks) >= 1
    assert all(set(task.gains) < set(COMPARED) and task.seeds >= 100 for task in tasks)
    assert all(task.name in advise(task.profile, tasks).why for task in tasks)


def test_a_run_of_an_environment_that_has_a_recipe_gets_its_credit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path / "run", load("calculator")[0].model_dump(mode="json"))
    unlike = make_group([[1.0], [0.0]] * 100)  # any task on which schemes were compared
    credits = [Credit.uniform(trajectory, 1.0) for trajectory in unlike.trajectories]
    run.add_rollouts(1, records([unlike], [credits], step=1, piece=str))
    main(["credit", "advise", str(run.path)])
    out = capsys.readouterr().out
    assert "\ncredit: {scheme: turn_return, baseline: turn, leave_one_out: false, gamma: 0.5, normalize: std}\n" in out
    assert "The recipe that comes along for this environment has it; no task on which schemes were compared" in out
