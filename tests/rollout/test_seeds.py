from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout import Task, derive_seed, held_out_seed, task_seed

SEEDS = st.integers(min_value=0, max_value=2**63 - 1)
INDICES = st.integers(min_value=0, max_value=10**6)


def test_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    # BLAKE2b with a digest of 8 bytes, read big-endian and halved, of the parts joined by the unit separator;
    # `printf '0\x1ftask\x1f0' | b2sum -l 64` prints the digest.
    assert derive_seed(0, "task", 0) == 0xC2E3FD7736BD0F67 >> 1
    assert task_seed(0, 0) == (0xC2E3FD7736BD0F67 >> 1) % 2**30


def test_parts_are_told_apart_whatever_their_lengths() -> None:
    assert derive_seed("ab", "c") != derive_seed("a", "bc")
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed("a") != derive_seed("a", "")


@given(run=SEEDS, other_run=SEEDS, index=INDICES, other=INDICES)
def test_a_held_out_seed_is_never_one_of_training(run: int, other_run: int, index: int, other: int) -> None:
    assert 0 <= task_seed(run, index) < 2**30 <= held_out_seed(other_run, other) < 2**31


def test_a_run_draws_other_tasks_at_each_index_and_under_each_seed() -> None:
    for draw in (task_seed, held_out_seed):
        seeds = [draw(run, index) for run in range(4) for index in range(250)]
        assert len(set(seeds)) == 1000  # 1000 of 2**30: a clash has a chance of 1 in 2,000, and these are fixed


TASK = Task(group_id="g", rollout_index=1, seed=3, sampling_seed=5)


def test_seeds_of_actions_are_the_same_on_every_machine() -> None:
    # `printf '5\x1fg/1\x1f0\x1f2' | b2sum -l 64`, and `printf '5\x1fg/1\x1f0\x1fcall\x1fHAQACAP//\x1f0'` likewise: the
    # tokens are numbers of 2 bytes, little-endian, in base64.
    assert TASK.turn_seed(2) == 0x09C3A2B3A0C4ABA0 >> 1
    assert TASK.call_seed([1, 2, 65535], 0) == 0x0A6E0258A0FE7D6E >> 1


def test_an_action_of_a_call_has_a_seed_by_its_episode_its_context_and_its_siblings() -> None:
    tasks = (TASK, replace(TASK, attempt=1), replace(TASK, rollout_index=2), replace(TASK, sampling_seed=6))
    contexts: tuple[list[int], ...] = ([1, 2], [2, 1], [1, 2, 0], [70_000], [])
    seeds = [task.call_seed(ids, sibling) for task in tasks for ids in contexts for sibling in range(3)]
    assert len({*seeds, *(task.turn_seed(k) for task in tasks for k in range(3))}) == len(seeds) + 12
