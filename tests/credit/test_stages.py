import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import LoneRule
from agentrl.errors import CreditError
from agentrl.testing.groups import make_group
from agentrl_credit.stages import (
    Array,
    batch_normalize,
    broadcast_turns,
    cell_means,
    center,
    gae,
    group_normalize,
    is_flat,
    label,
    leave_one_out,
    returns_to_go,
    shrink,
    standard_deviation,
)
from agentrl_credit.turns import Comparison, Turns
from tests.support.each import each

SAME_BUT_FOR_ROUNDING = [0.1 + 0.2, 0.3]  # differ by 5.6e-17


def test_returns_to_go_discount_once_a_turn() -> None:
    # 1 + .5 * (0 + .5 * (4 + .5 * 8)) = 3; 0 + .5 * 8 = 4; 4 + 4 = 8; 8
    assert returns_to_go([1, 0, 4, 8], gamma=0.5).tolist() == [3, 4, 8, 8]
    assert returns_to_go([1, 0, 4, 8], gamma=1).tolist() == [13, 12, 12, 8]
    assert returns_to_go([1, 0, 4, 8], gamma=0).tolist() == [1, 0, 4, 8]
    assert returns_to_go([], gamma=1).tolist() == []


def test_returns_to_go_leaves_the_rewards_as_they_were() -> None:
    rewards_K = np.array([1.0, 2.0])
    returns_to_go(rewards_K, gamma=1)
    assert rewards_K.tolist() == [1, 2]


def test_center_subtracts_the_mean() -> None:
    assert center([1, 0.5, 0, 1]).tolist() == [0.375, -0.125, -0.625, 0.375]


def test_standard_deviation_divides_by_the_number_less_ddof() -> None:
    # deviations 1.5, .5, .5, 1.5: squares sum to 5
    np.testing.assert_allclose(standard_deviation([0, 1, 2, 3], ddof=0), [np.sqrt(5 / 4)] * 4, rtol=1e-12)
    np.testing.assert_allclose(standard_deviation([0, 1, 2, 3], ddof=1), [np.sqrt(5 / 3)] * 4, rtol=1e-12)
    assert standard_deviation([7], ddof=1).tolist() == [0]
    assert standard_deviation([7, 9], ddof=2).tolist() == [0, 0]


def test_group_normalize_adds_eps_to_the_standard_deviation() -> None:
    # mean 1, sd0 1
    np.testing.assert_allclose(group_normalize([0, 2], ddof=0, eps=0.25), [-0.8, 0.8], rtol=1e-12)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(leave_one_out([1, 0.5, 0, 1]), [0.5, -1 / 6, -5 / 6, 0.5], rtol=1e-12)


def test_leave_one_out_by_owner_leaves_out_all_that_the_owner_has() -> None:
    # the others of owner 0 have 5; of owner 1: mean of 1 and 3
    assert leave_one_out([1, 3, 5], owners_N=[0, 0, 1]).tolist() == [-4, -2, 3]
    assert leave_one_out([1, 3], owners_N=[2, 2]).tolist() == [0, 0]


def test_leave_one_out_keeps_small_differences_beside_a_large_return() -> None:
    np.testing.assert_allclose(leave_one_out([1e6, 1, 3]), [1e6 - 2, 1 - 500_001.5, 3 - 500_000.5], rtol=1e-12)
    np.testing.assert_allclose(leave_one_out([1e6, 0, 3, 3], owners_N=[0, 0, 1, 1])[1], -3, rtol=1e-9)


@each("values", [SAME_BUT_FOR_ROUNDING, [0.1, 0.1, 0.1], [0, 0], [-1e9, -1e9], [], [3]])
def test_equal_values_give_exact_zeros(values: list[float]) -> None:
    assert is_flat(values).all()
    zeros = [0.0] * len(values)
    assert standard_deviation(values, ddof=0).tolist() == zeros
    assert center(values).tolist() == zeros
    assert leave_one_out(values).tolist() == zeros
    assert group_normalize(values, ddof=1, eps=1e-300).tolist() == zeros


def test_small_but_real_differences_count() -> None:
    assert not is_flat([1, 1 + 1e-9]).any()
    np.testing.assert_allclose(group_normalize([1, 1 + 1e-9], ddof=0, eps=1e-20), [-1, 1], rtol=1e-6)


def test_what_is_equal_is_judged_by_size_and_in_each_cell() -> None:
    assert is_flat([1e6, 1e6 + 1e-9]).all()
    assert not is_flat([1e-6, 1e-6 + 1e-12]).any()
    values, cells = [0.1, 0.2 - 0.1, 0.3 - 0.2, 5, 6], [0, 0, 0, 1, 1]
    assert (center(values, cells)[:3] == 0).all()
    assert (leave_one_out(values, cells)[:3] == 0).all()


def test_a_table_where_a_list_belongs_is_refused() -> None:
    with pytest.raises(CreditError, match=r"got shape \(1, 2\)"):
        center([[1, 2]])
    with pytest.raises(CreditError, match=r"one integer label for each of 2 values, got int64 of \(1,\)"):
        leave_one_out([1, 2], owners_N=[0])
    with pytest.raises(CreditError, match=r"one integer label for each of 2 values, got float64"):
        center([1, 2], [0.5, 0.5])
    with pytest.raises(CreditError, match="2 values and 1 rewards"):
        gae([1], [1, 2], gamma=1, lam=1)


def test_gae_is_the_discounted_sum_of_temporal_differences() -> None:
    # delta_1 = 1 - .8 = .2; delta_0 = .99 * .8 - .5 = .292; A_0 = .292 + .99 * .9 * .2
    np.testing.assert_allclose(gae([0, 1], [0.5, 0.8], gamma=0.99, lam=0.9), [0.4702, 0.2], rtol=1e-12)
    np.testing.assert_allclose(gae([0, 1], [0.5, 0.8], gamma=1, lam=1), [0.5, 0.2], rtol=1e-12)
    # with lam 0 the last step sees 1 + .5 * 2 - .8
    np.testing.assert_allclose(gae([0, 1], [0.5, 0.8], gamma=0.5, lam=0, final_value=2), [-0.1, 1.2], rtol=1e-12)
    assert gae([], [], gamma=1, lam=1).tolist() == []


def test_labels_number_equal_keys_alike() -> None:
    assert label(["b", "a", "b", ("a", 1)]).tolist() == [0, 1, 0, 2]
    assert label([]).tolist() == []


def test_broadcast_turns_repeats_by_length() -> None:
    assert broadcast_turns([0.5, 2], [1, 3]).tolist() == [0.5, 2, 2, 2]
    assert broadcast_turns([], []).tolist() == []


def test_cell_means_ask_about_a_cell_without_entering_it() -> None:
    means = cell_means([1, 3, 100, 100], [0, 0, 0, 1], counted_N=[True, True, False, False])
    assert means.mean_N.tolist() == [2, 2, 2, 0]
    assert means.count_N.tolist() == [2, 2, 2, 0]


def test_the_mean_of_no_others_is_zero() -> None:
    means = cell_means([5, 7, 9], [0, 0, 1], owners_N=[2, 2, 2])
    assert means.mean_N.tolist() == [0, 0, 0]
    assert means.count_N.tolist() == [0, 0, 0]


def test_shrink_weighs_the_prior_as_kappa_values() -> None:
    means = cell_means([1, 3, 8], [0, 0, 1])
    np.testing.assert_allclose(shrink(means, [5, 5, 5], kappa=2), [3.5, 3.5, 6], rtol=1e-12)
    np.testing.assert_allclose(shrink(means, [5, 5, 5], kappa=0), [2, 2, 8], rtol=1e-12)
    unseen = cell_means([1], counted_N=[False])
    assert shrink(unseen, [5], kappa=0).tolist() == shrink(unseen, [5], kappa=2).tolist() == [5]


def test_batch_normalize_does_not_move_the_mean() -> None:
    np.testing.assert_allclose(batch_normalize([1, 3], ddof=0, eps=1), [0.5, 1.5], rtol=1e-12)


@each("values", [[1.0, 1.0], [0.1 + 0.2, 0.3], [2.0], []])
def test_a_batch_without_a_spread_is_not_divided(values: list[float]) -> None:
    assert batch_normalize(values, ddof=1, eps=1e-6).tolist() == values


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-8, 8).map(lambda n: n / 4), st.integers(0, 4), st.integers(0, 3)), max_size=40
    ),
    ddof=st.sampled_from([0, 1]),
)
def test_cells_agree_with_plain_loops(rows: list[tuple[float, int, int]], ddof: int) -> None:
    values, cells, owners = ([row[i] for row in rows] for i in range(3))
    for n, (value, cell, owner) in enumerate(rows):
        inside = [v for v, c, _ in rows if c == cell]
        others = [v for v, c, o in rows if c == cell and o != owner]
        mean = statistics.fmean(inside)
        spread = (statistics.stdev(inside) if ddof else statistics.pstdev(inside)) if len(inside) > ddof else 0.0
        expected = value - statistics.fmean(others) if others else 0.0
        assert center(values, cells)[n] == pytest.approx(value - mean, abs=1e-12)
        assert standard_deviation(values, cells, ddof=ddof)[n] == pytest.approx(spread, abs=1e-12)
        assert leave_one_out(values, cells, owners_N=owners)[n] == pytest.approx(expected, abs=1e-12)
        assert cell_means(values, cells, owners_N=owners).count_N[n] == len(others)


class Returns(Comparison):
    def advantages(self, turns: Turns) -> Array:
        return turns.returns_to_go(gamma=1)


def test_a_lone_trajectory_is_named_with_the_way_out() -> None:
    groups = [make_group([[0], [1]], group_id="pair"), make_group([[1]], group_id="single")]
    with pytest.raises(CreditError, match=r"group single has one valid trajectory, single/0, .* set lone: keep"):
        Returns().assign(groups)


@pytest.mark.parametrize(("lone", "kept"), [("keep", True), ("drop", False)])
def test_a_lone_trajectory_is_kept_or_dropped(lone: LoneRule, kept: bool) -> None:
    groups = [make_group([[0], [1]], group_id="pair"), make_group([[1]], group_id="single")]
    pair, single = Returns(lone=lone).assign(groups)
    assert [credit.advantages_T.tolist() for credit in pair] == [[0], [1]]
    assert single[0].advantages_T.tolist() == [0]
    assert single[0].keep_T.tolist() == [kept]


def test_turns_are_laid_out_as_columns() -> None:
    first = make_group([[1, 2], [3]], state_keys=[["A", "B"], ["A"]], group_id="first")
    second = make_group([[4], [5]], state_keys=[["A"], ["A"]], group_id="second")
    turns = Turns.of([first.trajectories, second.trajectories])
    assert turns.returns_M.tolist() == [3, 3, 4, 5]
    assert turns.group_M.tolist() == [0, 0, 1, 1]
    assert turns.rewards_N.tolist() == [1, 2, 3, 4, 5]
    assert turns.group_N.tolist() == [0, 0, 0, 1, 1]
    assert turns.owner_N.tolist() == [0, 0, 1, 2, 3]
    assert turns.index_N.tolist() == [0, 1, 0, 0, 0]
    assert turns.cells(turns.keys("state_key")).tolist() == [0, 1, 0, 2, 2]
    assert [piece.tolist() for piece in turns.split(turns.rewards_N)] == [[1, 2], [3], [4], [5]]
