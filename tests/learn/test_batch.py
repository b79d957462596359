"""Invariants 1 and 3 through a tiny real model in float64. `T` trained tokens."""

import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.chat import train_tokenizer
from agentrl.credit import Credit
from agentrl.errors import CreditError
from agentrl.learn.batch import Batch, MicroBatch, make_batch, micro_batches, rows_of
from agentrl.learn.loss import Aggregation, RatioUnit, policy_loss
from agentrl.learn.model import LocalModelConfig, Policy, make_local_model
from agentrl.types import StopReason, Trajectory, Turn

torch.manual_seed(0)
POLICY = Policy(
    make_local_model(
        LocalModelConfig(
            hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, initializer_std=0.2
        ),
        train_tokenizer([], vocab_size=261),
    ).double()
)
VOCABULARY = 261


def turn(
    observation: list[int], action: list[int], *, extends: bool = True, logprobs: list[float] | None = None
) -> Turn:
    return Turn(
        observation_ids=tuple(observation),
        extends=extends,
        action_ids=tuple(action),
        behavior_logprobs=tuple(logprobs or [-5.0 - 0.01 * i for i in range(len(action))]),
        versions=(0,) * (len(action) // 2) + (1,) * (len(action) - len(action) // 2),
        reward=0.0,
    )


def trajectory(number: int, *turns: Turn) -> Trajectory:
    return Trajectory(
        group_id="g",
        trajectory_id=f"g/{number}",
        env_id="e",
        seed=0,
        turns=turns,
        stop_reason=StopReason.TERMINATED,
    )


def drawn(number: int, rng: np.random.Generator, *, fork: bool) -> Trajectory:
    """Draw a trajectory of 4 turns, the third of which begins a new context where it forks."""

    def ids(low: int, high: int) -> list[int]:
        return [int(token) for token in rng.integers(VOCABULARY, size=int(rng.integers(low, high)))]

    turns = []
    for k in range(4):
        action = ids(1, 6)
        logprobs = (-5.5 + 0.05 * rng.standard_normal(len(action))).tolist()
        turns.append(turn(ids(2, 8), action, extends=not (fork and k == 2), logprobs=logprobs))
    return trajectory(number, *turns)


def some(num: int = 5) -> tuple[list[Trajectory], list[Credit]]:
    rng = np.random.default_rng(0)
    trajectories = [drawn(i, rng, fork=i % 2 == 1) for i in range(num)]
    credits = [
        Credit.from_tokens(
            t, rng.standard_normal(t.num_action_tokens), keep_T=rng.random(t.num_action_tokens) < (1.0 if i else 0.6)
        )
        for i, t in enumerate(trajectories)
    ]
    return trajectories, credits


def loss_of(micro: MicroBatch, policy: Policy) -> Tensor:
    logprobs_T, _ = policy(micro.input_ids_BL, micro.row_T, micro.position_T, micro.target_T, 1.0)
    result = policy_loss(
        logprobs_T,
        anchor_logprobs_T=micro.behavior_T.double(),
        advantages_T=micro.advantage_T.double(),
        unit_T=micro.unit_T,
        weight_T=micro.weight_T.double(),
        clip_low=0.1,
        clip_high=0.1,
    )
    return result.loss


def loss_and_gradient(
    batch: Batch, *, max_tokens: int = 10**9, extra_columns: int = 0, skip_idle: bool = False
) -> tuple[float, Tensor]:
    """Return the loss and its gradient, added up over micro-batches; with `extra_columns` of padding on the right."""
    policy = copy.deepcopy(POLICY)
    total = 0.0
    for micro in micro_batches(batch, max_tokens=max_tokens, skip_idle=skip_idle):
        padding = torch.full((len(micro.input_ids_BL), extra_columns), 7)
        loss = loss_of(replace(micro, input_ids_BL=torch.cat([micro.input_ids_BL, padding], 1)), policy)
        loss.backward()
        total += float(loss.detach())
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return total, torch.cat(gradients)


def assert_same(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> None:
    assert other[0] == pytest.approx(one[0], rel=1e-9)
    torch.testing.assert_close(other[1], one[1], rtol=1e-9, atol=1e-9 * float(one[1].abs().max()))


def batch_of(
    trajectories: list[Trajectory],
    credits: list[Credit],
    *,
    unit: RatioUnit = "trajectory",
    aggregation: Aggregation = "trajectory-mean",
) -> Batch:
    return make_batch(trajectories, credits, unit=unit, aggregation=aggregation)


FORKED = trajectory(0, turn([1, 2], [3, 4]), turn([5], [6]), turn([7, 8, 9], [10], extends=False), turn([11], [12, 13]))


def test_a_row_holds_all_tokens_and_the_mask_those_that_were_sampled() -> None:
    rows = rows_of(FORKED)
    assert [row.ids_L.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
    assert [row.positions_T.tolist() for row in rows] == [[2, 3, 5], [3, 5, 6]]


def test_every_sampled_token_is_trained_once_at_the_place_of_its_predecessor() -> None:
    plain = trajectory(1, turn([20, 21, 22], [23], logprobs=[-0.5]))
    credits = [Credit.from_tokens(FORKED, [1, 2, 3, 4, 5, 6]), Credit.from_tokens(plain, [7])]
    batch = batch_of([FORKED, plain], credits, unit="turn", aggregation="trajectory-mean")
    assert [row.tolist() for row in batch.rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23]]
    assert batch.row_T.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert batch.position_T.tolist() == [1, 2, 4, 2, 4, 5, 2]
    assert batch.target_T.tolist() == [3, 4, 6, 10, 12, 13, 23]
    assert batch.trajectory_T.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.turn_T.tolist() == [0, 0, 1, 2, 3, 3, 0]
    assert batch.version_T.tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert batch.behavior_T.tolist() == [-5.0, -5.01, -5.0, -5.0, -5.0, -5.01, -0.5]
    assert batch.advantage_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.unit_T.tolist() == [0, 0, 1, 2, 3, 3, 4]
    np.testing.assert_allclose(batch.weight_T, [1 / 12] * 6 + [1 / 2], rtol=1e-15)  # 1 / (N |y_i|), N = 2


def test_tokens_that_are_not_kept_stay_as_context_and_leave_every_denominator() -> None:
    keep = [True, False, True, True, False, True]
    batch = batch_of([FORKED], [Credit.from_tokens(FORKED, [1, 2, 3, 4, 5, 6], keep_T=keep)])
    assert [row.tolist() for row in batch.rows] == [row.ids_L.tolist() for row in rows_of(FORKED)]
    assert batch.target_T.tolist() == [3, 6, 10, 13]
    assert batch.position_T.tolist() == [1, 4, 2, 5]
    assert batch.advantage_T.tolist() == [1, 3, 4, 6]
    np.testing.assert_allclose(batch.weight_T, [1 / 4] * 4, rtol=1e-15)


def test_credit_that_does_not_fit_is_refused() -> None:
    short = trajectory(1, turn([1], [2]))
    with pytest.raises(CreditError, match="trajectory g/0 has 6 action tokens"):
        batch_of([FORKED], [Credit.uniform(short, 1.0)])


@pytest.mark.parametrize("max_tokens", [1, 40, 60, 100, 10**9])
def test_micro_batches_hold_every_token_once_and_whole_trajectories_within_the_budget(max_tokens: int) -> None:
    batch = batch_of(*some(7))
    micros = list(micro_batches(batch, max_tokens=max_tokens))
    assert sorted(np.concatenate([micro.token_T for micro in micros]).tolist()) == list(range(len(batch.target_T)))
    owners = [set(batch.trajectory_T[micro.token_T].tolist()) for micro in micros]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 7
    for micro, owner in zip(micros, owners, strict=True):
        assert micro.input_ids_BL.numel() <= max_tokens or len(owner) == 1
        chosen = micro.token_T
        np.testing.assert_array_equal(
            micro.input_ids_BL[micro.row_T, micro.position_T].numpy(),
            [batch.rows[r][p] for r, p in zip(batch.row_T[chosen], batch.position_T[chosen], strict=True)],
        )
        for name in ("target_T", "version_T"):
            np.testing.assert_array_equal(getattr(micro, name).numpy(), getattr(batch, name)[chosen])
        for name in ("behavior_T", "advantage_T", "weight_T"):  # float32 on the device
            np.testing.assert_allclose(getattr(micro, name).numpy(), getattr(batch, name)[chosen], rtol=1e-7)
    assert {1: 7, 10**9: 1}.get(max_tokens, len(micros)) == len(micros)


def test_a_micro_batch_ends_where_nothing_more_is_read() -> None:
    (micro,) = micro_batches(batch_of([FORKED], [Credit.uniform(FORKED, 1.0)]), max_tokens=100)
    assert micro.input_ids_BL.tolist() == [
        [1, 2, 3, 4, 5, 0],
        [7, 8, 9, 10, 11, 12],
    ]  # the last sampled one predicts none
    keep = [True, True, True, False, False, False]
    excluded = Credit.from_tokens(FORKED, [1] * 6, keep_T=keep)
    (micro,) = micro_batches(batch_of([FORKED], [excluded]), max_tokens=100)
    assert micro.input_ids_BL.tolist() == [[1, 2, 3, 4, 5]]


def test_a_batch_without_a_trained_token_has_no_micro_batch() -> None:
    assert list(micro_batches(batch_of([FORKED], [Credit.excluded(FORKED)]), max_tokens=100)) == []


UNITS: list[RatioUnit] = ["trajectory", "turn", "version", "token"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("aggregation", ["trajectory-mean", "turn-mean", "token-mean"])
def test_loss_and_gradient_are_the_same_for_every_split_order_and_padding(
    unit: RatioUnit, aggregation: Aggregation
) -> None:
    trajectories, credits = some()
    batch = batch_of(trajectories, credits, unit=unit, aggregation=aggregation)
    whole = loss_and_gradient(batch)
    assert abs(whole[0]) > 1e-3
    assert float(whole[1].norm()) > 1e-3
    for max_tokens in (1, 70, 130):
        assert_same(whole, loss_and_gradient(batch, max_tokens=max_tokens))
    assert_same(whole, loss_and_gradient(batch, max_tokens=70, extra_columns=9))
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        shuffled = batch_of(
            [trajectories[i] for i in order], [credits[i] for i in order], unit=unit, aggregation=aggregation
        )
        assert_same(whole, loss_and_gradient(shuffled, max_tokens=70))


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(5)), max_tokens=st.integers(min_value=1, max_value=300))
def test_any_order_and_any_budget_give_the_same_loss(order: list[int], max_tokens: int) -> None:
    trajectories, credits = some()
    shuffled = batch_of([trajectories[i] for i in order], [credits[i] for i in order])
    whole = loss_and_gradient(batch_of(trajectories, credits))
    assert_same(whole, loss_and_gradient(shuffled, max_tokens=max_tokens))


def test_a_forked_trajectory_loses_what_its_parts_would_lose_in_their_own_contexts() -> None:
    first = trajectory(0, *FORKED.turns[:2])
    second = trajectory(1, replace(FORKED.turns[2], extends=True), FORKED.turns[3])
    advantages = [0.5, -1.0, 2.0, 1.0, -0.5, 0.25]
    apart = [Credit.from_tokens(first, advantages[:3]), Credit.from_tokens(second, advantages[3:])]
    # By tokens nothing depends on which trajectory a token belongs to.
    whole = batch_of([FORKED], [Credit.from_tokens(FORKED, advantages)], unit="token", aggregation="token-mean")
    parts = batch_of([first, second], apart, unit="token", aggregation="token-mean")
    assert_same(loss_and_gradient(parts), loss_and_gradient(whole))


def logprobs_of(batch: Batch) -> dict[tuple[int, int, int], float]:
    """Return the policy's log-probability of each trained token, by row, position and token."""
    found = {}
    for micro in micro_batches(batch, max_tokens=10**9):
        with torch.no_grad():
            logprobs_T, _ = POLICY(micro.input_ids_BL, micro.row_T, micro.position_T, micro.target_T, 1.0)
        for token, logprob in zip(micro.token_T, logprobs_T.tolist(), strict=True):
            found[int(batch.row_T[token]), int(batch.position_T[token]), int(batch.target_T[token])] = logprob
    return found


def test_a_token_depends_on_its_own_context_and_on_nothing_else() -> None:
    def with_turn(t: Trajectory, k: int, **changes: Any) -> Trajectory:
        return replace(t, turns=(*t.turns[:k], replace(t.turns[k], **changes), *t.turns[k + 1 :]))

    trajectories, credits = some(3)
    credits = [Credit.uniform(t, 1.0) for t in trajectories]
    before = logprobs_of(batch_of(trajectories, credits))
    other = [1 + token % 200 for token in trajectories[1].turns[2].observation_ids]
    assert not trajectories[1].turns[2].extends
    changed = [trajectories[0], with_turn(trajectories[1], 2, observation_ids=tuple(other)), trajectories[2]]
    after = logprobs_of(batch_of(changed, credits))
    # Rows: 0 is the first trajectory, 1 and 2 the forked one before and after its fork, 3 the third.
    assert {row for row, *_ in before} == {0, 1, 2, 3}
    assert before.keys() == after.keys()
    for key in before:
        if key[0] == 2:
            assert abs(before[key] - after[key]) > 1e-6
        else:
            assert after[key] == pytest.approx(before[key], rel=1e-12)


def test_tokens_after_the_last_trained_one_and_tokens_of_the_excluded_change_nothing() -> None:
    trajectories, credits = some(4)
    num_last = len(trajectories[2].turns[3].action_ids)
    keep = np.ones(trajectories[2].num_action_tokens, dtype=np.bool_)
    keep[-num_last:] = False
    credits[2] = replace(credits[2], keep_T=keep)
    credits[3] = Credit.excluded(trajectories[3])
    before = loss_and_gradient(batch_of(trajectories, credits))
    last = trajectories[2].turns[3]
    altered = replace(
        last,
        observation_ids=tuple((i + 5) % VOCABULARY for i in last.observation_ids),
        action_ids=tuple((i + 9) % VOCABULARY for i in last.action_ids),
        behavior_logprobs=tuple(logprob - 1 for logprob in last.behavior_logprobs),
    )
    trajectories[2] = replace(trajectories[2], turns=(*trajectories[2].turns[:3], altered))
    rng = np.random.default_rng(9)
    trajectories[3] = drawn(3, rng, fork=False)
    credits[3] = Credit.excluded(trajectories[3])
    after = loss_and_gradient(batch_of(trajectories, credits))
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])


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
    for field in fields(Batch):
        np.testing.assert_equal(getattr(other, field.name), getattr(one, field.name))


@pytest.mark.parametrize("aggregation", ["trajectory-mean", "turn-mean", "token-mean"])
def test_trajectories_without_an_advantage_are_not_computed_and_count_in_the_denominators(
    aggregation: Aggregation,
) -> None:
    trajectories, credits = some(6)
    for index in (1, 2, 4):
        credits[index] = replace(credits[index], advantages_T=np.zeros_like(credits[index].advantages_T))
    batch = batch_of(trajectories, credits, aggregation=aggregation)
    assert_same(loss_and_gradient(batch), loss_and_gradient(batch, skip_idle=True))
    computed = [micro.token_T for micro in micro_batches(batch, max_tokens=30, skip_idle=True)]
    assert set(batch.trajectory_T[np.concatenate(computed)].tolist()) == {0, 3, 5}
    idle = batch_of(trajectories[1:3], credits[1:3], aggregation=aggregation)
    (micro,) = micro_batches(idle, max_tokens=10**9, skip_idle=True)
    assert len(set(idle.trajectory_T[micro.token_T].tolist())) == 1
