import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.rollout import Tasks, held_out_seed, task_seed
from agentrl.types import NumTasks

SEEDS = st.integers(0, 2**32 - 1)


def test_evaluation_tasks_have_a_seed_of_their_own() -> None:
    one, other = (Tasks(seed=seed, evaluation_seed=7) for seed in (1, 2))
    assert one.evaluation(5) == other.evaluation(5) == Tasks(seed=7).evaluation(5)
    assert one.evaluation(5) != Tasks(seed=1).evaluation(5)
    assert one.train(0) == Tasks(seed=1).train(0)
    assert Tasks(seed=1, evaluation_seed=0).evaluation(1) == Tasks(seed=0).evaluation(1)


def test_tasks_without_end_follow_from_their_seeds_and_are_numbered() -> None:
    tasks = Tasks(seed=3)
    trained, evaluated = [tasks.train(index) for index in range(5)], tasks.evaluation(5)
    assert [(t.seed, t.split, t.index) for t in trained] == [(task_seed(3, i), "train", i) for i in range(5)]
    assert [(t.seed, t.split, t.index) for t in evaluated] == [(held_out_seed(3, i), "eval", i) for i in range(5)]
    assert tasks.fewer_tasks_warning(10**6) is None


@given(SEEDS, st.integers(1, 50), st.integers(0, 5))
def test_each_epoch_has_every_training_task_once(seed: int, num: int, epoch: int) -> None:
    tasks = Tasks(seed=seed, num=NumTasks(train=num, eval=1))
    indices = [tasks.train(index).index for index in range(epoch * num, (epoch + 1) * num)]
    assert sorted(map(int, indices)) == list(range(num))  # type: ignore[arg-type]


def test_each_epoch_and_each_run_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int | None, ...]:
        tasks = Tasks(seed=seed, num=NumTasks(train=20, eval=1))
        return tuple(tasks.train(index).index for index in range(epoch * 20, epoch * 20 + 20))

    orders = {order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert tuple(range(20)) not in orders
    assert order(2, 3) == order(2, 3)


def test_the_seed_of_a_group_is_its_own_in_every_epoch() -> None:
    tasks = Tasks(seed=0, num=NumTasks(train=2, eval=1))
    assert [tasks.train(index).seed for index in range(6)] == [task_seed(0, index) for index in range(6)]


@given(st.integers(1, 300), st.integers(1, 300))
def test_evaluation_takes_each_task_at_most_once_and_spreads_over_the_table(num: int, asked: int) -> None:
    tasks = Tasks(seed=0, num=NumTasks(train=1, eval=num))
    indices = [int(task.index) for task in tasks.evaluation(asked)]  # type: ignore[arg-type]
    assert indices == sorted(set(indices))
    assert len(indices) == min(num, asked)
    gaps = [b - a for a, b in zip(indices, [*indices[1:], num], strict=True)]
    assert indices[0] == 0
    assert max(gaps) - min(gaps) <= 1
    assert (tasks.fewer_tasks_warning(asked) is not None) == (num < asked)


def test_what_is_evaluated_is_the_same_whatever_the_seed_of_the_run() -> None:
    found = [[t.index for t in Tasks(seed=s, num=NumTasks(train=1, eval=40)).evaluation(7)] for s in range(3)]
    assert found[0] == found[1] == found[2] == [0, 5, 11, 17, 22, 28, 34]


def test_a_split_without_tasks_is_refused() -> None:
    tasks = Tasks(seed=0, num=NumTasks(train=0, eval=0))
    with pytest.raises(ConfigError, match=r"no training tasks \(num_tasks\('train'\) returned 0\)"):
        tasks.check_train()
    with pytest.raises(ConfigError, match=r"no evaluation tasks \(num_tasks\('eval'\) returned 0\)"):
        tasks.evaluation(1)
