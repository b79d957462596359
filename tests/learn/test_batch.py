"""Trajectories and their rows. `T` trained tokens."""

from dataclasses import fields, replace

import numpy as np
import pytest

from agentrl.credit import Credit
from agentrl.errors import CreditError
from agentrl.learn.batch import make_batch
from agentrl.learn.tokens import TokenBatch, rows_of, with_end, with_ends_of_turns
from agentrl.policy.layout.tree import plan_tree
from agentrl.types import context_of
from tests.support.trajectories import FORKED, batch_of, some, trajectory, turn, with_parents, without_parents


def test_a_row_holds_all_tokens_and_the_mask_those_that_were_sampled() -> None:
    rows = rows_of(FORKED.turns)
    assert [row.ids_L.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
    assert [row.positions_T.tolist() for row in rows] == [[2, 3, 5], [3, 5, 6]]


def test_every_sampled_token_is_trained_once_at_the_place_of_its_predecessor() -> None:
    plain = trajectory(1, turn([20, 21, 22], [23], logprobs=[-0.5]))
    credits = [Credit.from_tokens(FORKED, [1, 2, 3, 4, 5, 6]), Credit.from_tokens(plain, [7])]
    batch = batch_of([FORKED, plain], credits, unit="turn", aggregation="trajectory-mean")
    assert [row.tolist() for row in batch.tokens.rows] == [
        [1, 2, 3, 4, 5, 6],
        [7, 8, 9, 10, 11, 12, 13],
        [20, 21, 22, 23],
    ]
    assert batch.tokens.row_T.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert batch.tokens.position_T.tolist() == [1, 2, 4, 2, 4, 5, 2]
    assert batch.tokens.target_T.tolist() == [3, 4, 6, 10, 12, 13, 23]
    assert batch.tokens.trajectory_T.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.tokens.turn_T.tolist() == [0, 0, 1, 2, 3, 3, 0]
    assert batch.columns.version_T.tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert batch.columns.behavior_T.tolist() == [-5.0, -5.01, -5.0, -5.0, -5.0, -5.01, -0.5]
    assert batch.columns.advantage_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.columns.unit_T.tolist() == [0, 0, 1, 2, 3, 3, 4]
    np.testing.assert_allclose(batch.columns.weight_T, [1 / 12] * 6 + [1 / 2], rtol=1e-15)  # 1 / (N |y_i|), N = 2


def test_tokens_that_are_not_kept_stay_as_context_and_leave_every_denominator() -> None:
    keep = [True, False, True, True, False, True]
    batch = batch_of([FORKED], [Credit.from_tokens(FORKED, [1, 2, 3, 4, 5, 6], keep_T=keep)])
    assert [row.tolist() for row in batch.tokens.rows] == [row.ids_L.tolist() for row in rows_of(FORKED.turns)]
    assert batch.tokens.target_T.tolist() == [3, 6, 10, 13]
    assert batch.tokens.position_T.tolist() == [1, 4, 2, 5]
    assert batch.columns.advantage_T.tolist() == [1, 3, 4, 6]
    np.testing.assert_allclose(batch.columns.weight_T, [1 / 4] * 4, rtol=1e-15)


def test_a_batch_knows_which_trajectories_are_of_one_group() -> None:
    trajectories = [trajectory(0, turn([1], [2]), group=group) for group in ("b", "a", "b")]
    assert batch_of(trajectories, [Credit.uniform(t, 1.0) for t in trajectories]).tokens.groups == [1, 0, 1]


def test_credit_that_does_not_fit_is_refused() -> None:
    short = trajectory(1, turn([1], [2]))
    with pytest.raises(CreditError, match="trajectory g/0 has 6 action tokens"):
        batch_of([FORKED], [Credit.uniform(short, 1.0)])


def test_every_trajectory_has_its_credit() -> None:
    with pytest.raises(ValueError, match="argument"):
        make_batch([FORKED, FORKED], [Credit.uniform(FORKED, 1.0)], unit="token", aggregation="token-mean")


def test_weights_are_those_of_the_constant_length_that_a_recipe_names() -> None:
    weights = [
        make_batch(
            [FORKED], [Credit.uniform(FORKED, 1.0)], unit="token", aggregation="constant", constant_length=length
        ).columns.weight_T
        for length in (10, 20)
    ]
    assert (weights[0] == 2 * weights[1]).all()


def test_rewards_keys_and_messages_are_no_part_of_a_batch() -> None:
    trajectories, credits = some(2)
    told = [
        replace(
            t,
            turns=tuple(replace(k, reward=9.0, state_key="s", observation=({"role": "user"},)) for k in t.turns),
            seed=5,
            metrics={"success": 1.0},
        )
        for t in trajectories
    ]
    one, other = batch_of(trajectories, credits), batch_of(told, credits)
    for kind in ("tokens", "columns"):
        found, expected = getattr(other, kind), getattr(one, kind)
        for field in fields(expected):
            a, b = (getattr(of, field.name) for of in (found, expected))
            assert (a is b is None) or all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_row_with_its_end_is_read_after_its_last_token_as_well() -> None:
    plain = trajectory(1, turn([20, 21, 22], [23]))
    rows = [with_end(rows_of(t.turns)) for t in (FORKED, plain)]
    tokens = TokenBatch.from_rows(rows, group_ids=["a", "b"])
    assert [row.tolist() for row in tokens.rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23]]
    assert tokens.row_T.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert tokens.position_T.tolist() == [1, 2, 4, 2, 4, 5, 6, 2, 3]
    assert tokens.target_T.tolist() == [3, 4, 6, 10, 12, 13, 0, 23, 0]
    assert tokens.trajectory_T.tolist() == [0] * 7 + [1] * 2
    assert tokens.turn_T.tolist() == [0, 0, 1, 2, 3, 3, 4, 0, 1]
    (silent,) = with_end(rows_of([turn([20, 21, 22], [])]))
    assert (silent.positions_T.tolist(), silent.turn_T.tolist()) == ([3], [0])


SEVERAL = with_parents([None, None, 0, 1, 0, 2, 3, 4])
"""Two agents, 0 2 5 and 1 3 6, and a fork from 0, 4 7."""


def test_agents_that_take_turns_have_a_row_each_and_so_has_a_fork_with_the_context_it_continues() -> None:
    rows = rows_of(SEVERAL.turns)
    assert [sorted(set(row.turn_T.tolist())) for row in rows] == [[0, 2, 5], [1, 3, 6], [4, 7]]
    for row, last in zip(rows, (5, 6, 7), strict=True):
        assert tuple(row.ids_L.tolist()) == context_of(SEVERAL.turns, last) + SEVERAL.turns[last].action_ids
    assert plan_tree([row.ids_L for row in rows]).num_tokens == sum(
        len(turn.observation_ids) + len(turn.action_ids) for turn in SEVERAL.turns
    )


def test_a_fork_takes_the_experts_of_the_turns_that_it_continues() -> None:
    told = [replace(turn, experts=bytes([number])) for number, turn in enumerate(SEVERAL.turns)]
    *_, row = rows_of(told)
    starts = [0, len(context_of(told, 0)) + len(told[0].action_ids) - 1]
    starts.append(starts[1] + len(told[4].observation_ids) + len(told[4].action_ids))
    assert row.experts == tuple(zip(starts, [b"\x00", b"\x04", b"\x07"], strict=True))


def test_tokens_come_in_the_order_of_the_turns_whatever_row_they_lie_in() -> None:
    batch = TokenBatch.from_trajectories([FORKED, SEVERAL])
    turns = [*FORKED.turns, *SEVERAL.turns]
    contexts = [context_of(t.turns, number) for t in (FORKED, SEVERAL) for number in range(len(t.turns))]
    expected = [
        (*context, *turn.action_ids[: k + 1])
        for context, turn in zip(contexts, turns, strict=True)
        for k in range(len(turn.action_ids))
    ]
    found = [
        (*batch.rows[row][: position + 1].tolist(), target)
        for row, position, target in zip(batch.row_T, batch.position_T, batch.target_T, strict=True)
    ]
    assert found == expected
    assert batch.turn_T.tolist() == [k for t in (FORKED, SEVERAL) for k, u in enumerate(t.turns) for _ in u.action_ids]


def test_the_end_of_a_trajectory_is_that_of_its_last_turn_in_whatever_row() -> None:
    shorter = replace(SEVERAL, turns=SEVERAL.turns[:6])  # the last turn, 5, is in the first row
    for rows in (with_end(rows_of(shorter.turns)), with_ends_of_turns(rows_of(shorter.turns))):
        assert [
            len(row.positions_T) - len(plain.positions_T)
            for row, plain in zip(rows, rows_of(shorter.turns), strict=True)
        ] in ([1, 0, 0], [2, 2, 1])
    tokens = TokenBatch.from_rows([with_end(rows_of(shorter.turns))], group_ids=["a"])
    assert (tokens.row_T[-1], tokens.target_T[-1], tokens.turn_T[-1]) == (0, 0, 6)
    assert tokens.position_T[-1] == len(context_of(shorter.turns, 5)) + len(shorter.turns[5].action_ids) - 1


def test_parents_change_no_column_of_a_batch() -> None:
    credit = Credit.from_tokens(
        SEVERAL, np.arange(SEVERAL.num_action_tokens), keep_T=np.arange(SEVERAL.num_action_tokens) % 3 > 0
    )
    one, other = (batch_of([t], [credit]) for t in (SEVERAL, without_parents(SEVERAL)))
    assert len(one.tokens.rows) == 3
    assert len(other.tokens.rows) == 8
    assert one.tokens.target_T.tolist() == other.tokens.target_T.tolist()
    for field in fields(one.columns):
        found, expected = getattr(one.columns, field.name), getattr(other.columns, field.name)
        assert (found is expected is None) or found.tolist() == expected.tolist()


def columns_of(tokens: TokenBatch) -> list[list[int]]:
    columns = [tokens.row_T, tokens.position_T, tokens.target_T, tokens.trajectory_T, tokens.turn_T]
    assert {column.dtype for column in columns} == {np.dtype(np.int64)}
    return [column.tolist() for column in columns]


def test_columns_are_integers_where_nothing_was_sampled_too() -> None:
    silent = trajectory(0, turn([20, 21, 22], []))
    for trajectories in ([], [trajectory(0)], [silent]):
        assert columns_of(TokenBatch.from_trajectories(trajectories)) == [[], [], [], [], []]
    asked = TokenBatch.from_rows([with_end(rows_of(silent.turns))], group_ids=["g"])
    assert columns_of(asked) == [[0], [2], [0], [0], [0]]
