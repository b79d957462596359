"""Tasks that rest and come back."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.rollout import Tasks
from agentrl.rollout.tasks import Curriculum, CurriculumConfig
from agentrl.testing import make_group
from agentrl.types import NumTasks, StopReason, TrajectoryGroup
from tests.support.each import each

NUM = 4
TASKS = Tasks(seed=3, num=NumTasks(train=NUM, eval=2))


def visited(task: int, *successes: float | None) -> TrajectoryGroup:
    """A group of a task; None: its episode failed."""
    group = make_group([[0.0]] * len(successes))
    trajectories = tuple(
        replace(
            trajectory,
            task_index=task,
            stop_reason=StopReason.TERMINATED if success is not None else StopReason.ENV_ERROR,
            metrics={} if success is None else {"success": success},
        )
        for trajectory, success in zip(group.trajectories, successes, strict=True)
    )
    return replace(group, trajectories=trajectories)


def epochs(curriculum: Curriculum, success: dict[int, list[float | None]], *, num: int) -> list[set[int]]:
    """Visit tasks, each as it always goes; return those of each epoch."""
    found: list[set[int]] = []
    while True:
        place = curriculum.next()
        if place // NUM >= num:
            return [*found, *[set[int]()] * (num - len(found))]
        found += [set[int]() for _ in range(place // NUM + 1 - len(found))]
        curriculum.advance(place)
        task = TASKS.train(place).index
        assert task is not None
        found[place // NUM].add(task)
        curriculum.record_visit(visited(task, *success[task]))


def curriculum(**fields: Any) -> Curriculum:
    return Curriculum(CurriculumConfig.model_validate(fields), TASKS, num_processes=1)


SUCCESS: dict[int, list[float | None]] = {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [1.0, 0.0], 3: [1.0, 0.0]}


def test_what_is_always_or_never_solved_rests_and_comes_back() -> None:
    found = epochs(curriculum(visits=2, rest=3), SUCCESS, num=9)
    awake, resting = {0, 1, 2, 3}, {2, 3}
    assert found == [awake, awake, resting, resting, resting, awake, awake, resting, resting]


@each(
    ("fields", "kept"),
    [
        ({"low": None}, {1, 2, 3}),
        ({"high": None}, {0, 2, 3}),
        ({"low": 0.5, "high": None}, {0}),
        ({"low": None, "high": 0.5}, {1}),
        ({"low": None, "high": None}, {0, 1, 2, 3}),
    ],
)
def test_the_range_of_success_says_who_rests(fields: dict[str, Any], kept: set[int]) -> None:
    assert epochs(curriculum(visits=1, rest=2, **fields), SUCCESS, num=3)[1:] == [kept, kept]


def test_where_all_rest_the_first_to_come_back_is_next() -> None:
    subject = curriculum(visits=1, rest=2)
    found = epochs(subject, {task: [1.0] for task in range(NUM)}, num=5)
    assert found == [{0, 1, 2, 3}, set(), set(), {0, 1, 2, 3}, set()]
    assert subject.num_resting == NUM


def test_tasks_that_rest_for_ever_are_not_waited_for() -> None:
    subject = curriculum(visits=1, rest=10**9)
    epochs(subject, {task: [1.0] for task in range(NUM)}, num=1)
    assert subject.next() == NUM * (10**9 + 1)


def test_failed_episodes_say_nothing_and_nothing_is_known_before_a_success_is_reported() -> None:
    subject = curriculum(visits=1)
    subject.record_visit(visited(0, None, None))
    subject.record_visit(replace(visited(1, 0.0), trajectories=(replace(visited(1, 0.0).trajectories[0], metrics={}),)))
    assert (subject.state.rates, subject.state.until) == ({}, {})
    subject.record_visit(visited(2, 1.0, None))
    assert set(subject.state.until) == {2}


def test_each_epoch_has_its_own_order_of_those_that_are_left() -> None:
    subject = curriculum(visits=1, rest=100)
    order = []
    for _ in range(NUM + 3 * 2):
        place = subject.next()
        subject.advance(place)
        task = TASKS.train(place).index
        assert task is not None
        order.append(task)
        subject.record_visit(visited(task, *SUCCESS[task]))
    assert Counter(order) == {0: 1, 1: 1, 2: 4, 3: 4}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.curriculum: the environment's tasks have no end"):
        Curriculum(CurriculumConfig(), Tasks(seed=3), num_processes=1)
    with pytest.raises(ConfigError, match=r"rollout.curriculum: 2 processes sample"):
        Curriculum(CurriculumConfig(), TASKS, num_processes=2)
    with pytest.raises(ValidationError, match=r"low: 0.5 is not below high: 0.5"):
        CurriculumConfig(low=0.5, high=0.5)
