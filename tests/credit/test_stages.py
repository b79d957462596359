import numpy as np
import pytest

from agentrl import Credit
from agentrl.errors import CreditError
from agentrl.testing.groups import make_group
from agentrl_credit.stages import (
    Lone,
    center,
    group_normalize,
    is_flat,
    leave_one_out,
    per_group,
    returns_to_go,
    standard_deviation,
)

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
    np.testing.assert_allclose(standard_deviation([0, 1, 2, 3], ddof=0), np.sqrt(5 / 4), rtol=1e-12)
    np.testing.assert_allclose(standard_deviation([0, 1, 2, 3], ddof=1), np.sqrt(5 / 3), rtol=1e-12)
    assert standard_deviation([7], ddof=1) == 0


def test_group_normalize_adds_eps_to_the_standard_deviation() -> None:
    # mean 1, sd0 1
    np.testing.assert_allclose(group_normalize([0, 2], ddof=0, eps=0.25), [-0.8, 0.8], rtol=1e-12)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(leave_one_out([1, 0.5, 0, 1]), [0.5, -1 / 6, -5 / 6, 0.5], rtol=1e-12)


def test_leave_one_out_by_owner_leaves_out_all_that_the_owner_has() -> None:
    # the others of owner 0 have 5; of owner 1: mean of 1 and 3
    assert leave_one_out([1, 3, 5], owners_N=[0, 0, 1]).tolist() == [-4, -2, 3]
    assert leave_one_out([1, 3], owners_N=[2, 2]).tolist() == [0, 0]


def test_leave_one_out_keeps_small_values_beside_a_huge_one_exact() -> None:
    assert leave_one_out([1e20, 1, 3])[0] == 1e20 - 2
    assert leave_one_out([1e20, 1e20, 3], owners_N=[0, 0, 1]).tolist() == [1e20 - 3, 1e20 - 3, 3 - 1e20]
    # taken off a total, the others of the first would sum to 0, not to 3
    np.testing.assert_array_equal(leave_one_out([1e20, 0, 3, 3], owners_N=[0, 0, 1, 1])[1], -3)


@pytest.mark.parametrize("values", [SAME_BUT_FOR_ROUNDING, [0.1, 0.1, 0.1], [0, 0], [-1e9, -1e9], [], [3]])
def test_equal_values_give_exact_zeros(values: list[float]) -> None:
    assert is_flat(values)
    zeros = [0.0] * len(values)
    assert standard_deviation(values, ddof=0) == 0
    assert center(values).tolist() == zeros
    assert leave_one_out(values).tolist() == zeros
    assert group_normalize(values, ddof=1, eps=1e-300).tolist() == zeros


def test_small_but_real_differences_count() -> None:
    assert not is_flat([1, 1 + 1e-9])
    np.testing.assert_allclose(group_normalize([1, 1 + 1e-9], ddof=0, eps=1e-20), [-1, 1], rtol=1e-6)


def test_a_table_where_a_list_belongs_is_refused() -> None:
    with pytest.raises(CreditError, match=r"got shape \(1, 2\)"):
        center([[1, 2]])
    with pytest.raises(CreditError, match=r"got shapes \(1,\) and \(2,\)"):
        leave_one_out([1, 2], owners_N=[0])


def test_per_group_names_the_group_of_a_lone_trajectory_and_the_way_out() -> None:
    groups = [make_group([[0], [1]], group_id="pair"), make_group([[1]], group_id="single")]
    with pytest.raises(CreditError, match=r"group single has one valid trajectory, single/0, .* set lone: keep"):
        per_group(groups, lambda row: [Credit.uniform(t, 1) for t in row], lone="error")


@pytest.mark.parametrize(("lone", "kept"), [("keep", True), ("drop", False)])
def test_per_group_keeps_or_drops_a_lone_trajectory(lone: Lone, kept: bool) -> None:
    groups = [make_group([[0], [1]], group_id="pair"), make_group([[1]], group_id="single")]
    pair, single = per_group(groups, lambda row: [Credit.uniform(t, t.reward) for t in row], lone=lone)
    assert [credit.advantages_T.tolist() for credit in pair] == [[0], [1]]
    assert single[0].advantages_T.tolist() == [0]
    assert single[0].keep_T.tolist() == [kept]
