from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout import derive_seed, held_out_seed, task_seed

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
