"""How the trajectories of a step are drawn into minibatches. `I` trajectories."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learn.plan import Minibatch, draw_minibatches
from tests.support.each import each

STEPS = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=12)
"""Of each trajectory of each group: whether it has a gradient."""


def draw(groups: list[list[bool]], num_minibatches: int, *, min_groups: int = 8, seed: int = 0) -> list[Minibatch]:
    return draw_minibatches(
        [number for number, group in enumerate(groups) for _ in group],
        has_gradient_I=[has_gradient for group in groups for has_gradient in group],
        num_minibatches=num_minibatches,
        min_groups=min_groups,
        rng=np.random.default_rng(seed),
    )


def differ_by_one_at_most(sizes: list[int]) -> bool:
    return max(sizes) - min(sizes) <= 1


@given(groups=STEPS, num_minibatches=st.integers(1, 6), min_groups=st.integers(1, 10), seed=st.integers(0, 99))
def test_each_minibatch_gets_its_share_of_what_has_a_gradient_and_of_all(
    groups: list[list[bool]], num_minibatches: int, min_groups: int, seed: int
) -> None:
    minibatches = draw(groups, num_minibatches, min_groups=min_groups, seed=seed)
    has_gradient_I = [has_gradient for group in groups for has_gradient in group]
    assert len(minibatches) == num_minibatches
    assert sorted(i for m in minibatches for i in (*m.computed, *m.counted)) == list(range(len(has_gradient_I)))
    assert differ_by_one_at_most([len(m.computed) for m in minibatches])
    assert differ_by_one_at_most([len(m.computed) + len(m.counted) for m in minibatches])
    if any(has_gradient_I):
        assert all(has_gradient_I[i] for m in minibatches for i in m.computed)
        assert not any(has_gradient_I[i] for m in minibatches for i in m.counted)
    else:  # one is compared with what the engine said of it
        assert [len(m.computed) for m in minibatches] == [min(1, len(has_gradient_I))] + [0] * (num_minibatches - 1)
    assert minibatches == draw(groups, num_minibatches, min_groups=min_groups, seed=seed)


@given(
    num_groups=st.integers(1, 40),
    size=st.integers(1, 9),
    num_minibatches=st.integers(1, 6),
    min_groups=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_a_minibatch_has_trajectories_of_enough_groups_and_cuts_none_that_it_need_not(
    num_groups: int, size: int, num_minibatches: int, min_groups: int, seed: int
) -> None:
    minibatches = draw([[True] * size] * num_groups, num_minibatches, min_groups=min_groups, seed=seed)
    num_cut = 0
    for minibatch in minibatches:
        of_group = np.bincount([i // size for i in minibatch.computed], minlength=num_groups)
        assert (of_group > 0).sum() >= min(min_groups, num_groups, len(minibatch.computed))
        num_cut += int(((of_group > 0) & (of_group < size)).sum())
    if num_groups >= num_minibatches * min_groups:
        assert num_cut <= 2 * (num_minibatches - 1)  # where a minibatch ends


@each(("num_groups", "shares"), [(4, [2] * 4), (8, [2] * 8), (16, [4] * 8), (32, [8] * 8), (64, [8] * 16)])
def test_groups_of_eight_in_four_minibatches(num_groups: int, shares: list[int]) -> None:
    for minibatch in draw([[True] * 8] * num_groups, 4, min_groups=8):
        counts = np.bincount([i // 8 for i in minibatch.computed])
        assert counts[counts > 0].tolist() == shares


def test_a_group_is_spread_over_the_minibatches_whatever_the_others_have() -> None:
    groups = [[True] * 8, [True, *[False] * 7], [True, *[False] * 7], [False] * 8, [True, True, *[False] * 6]]
    for seed in range(20):
        minibatches = draw(groups, 4, seed=seed)
        assert all(1 <= sum(i < 8 for i in m.computed) <= 3 for m in minibatches)


def test_minibatches_are_drawn_again_by_each_seed() -> None:
    drawn = [draw([[True, True, False, True]] * 4, 3, seed=seed) for seed in range(9)]
    assert all(one != other for number, one in enumerate(drawn) for other in drawn[:number])
