"""Invariants 1 and 3 through a tiny real model in float64: however a batch is cut up, laid out and shared out.

`T` trained tokens, `R` rows.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.chat import train_tokenizer
from agentrl.credit import Credit
from agentrl.errors import UserError
from agentrl.learn.batch import Batch
from agentrl.learn.loss import policy_loss
from agentrl.learn.plan import MicroBatch, PassTokens, Planner
from agentrl.learn.tokens import Aggregation, RatioUnit, rows_of
from agentrl.learn.trust import fixed
from agentrl.policy.config import Layout, LocalModelConfig
from agentrl.policy.layout.tree import plan_tree
from agentrl.policy.model import Policy, make_local_model
from agentrl.types import Trajectory, TrajectoryGroup
from tests.support.each import each
from tests.support.models import SIZES, in_float64, made
from tests.support.trajectories import (
    FORKED,
    VOCABULARY,
    batch_of,
    drawn,
    some,
    some_credits,
    some_groups,
    trajectory,
    turn,
)

torch.manual_seed(0)
POLICY = Policy(
    in_float64(
        make_local_model(
            LocalModelConfig(
                hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=32, initializer_std=0.2
            ),
            train_tokenizer([], vocab_size=VOCABULARY),
        )
    )
)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
UNITS: tuple[RatioUnit, ...] = get_args(RatioUnit)
AGGREGATIONS: list[Aggregation] = ["trajectory-mean", "turn-mean", "token-mean"]
GROUPS = st.builds(
    some_groups, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(min_value=0, max_value=999)
)
SPLITS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(LAYOUTS),
        "max_tokens": st.integers(min_value=1, max_value=300),
        "num_processes": st.integers(min_value=1, max_value=3),
    }
)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def members_of(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def shares_of(
    batch: Batch,
    *,
    num_processes: int = 1,
    max_tokens: int = 10**9,
    trajectories: Sequence[int] | None = None,
    **plan: Any,
) -> list[list[MicroBatch]]:
    """The passes of each process."""
    planner = Planner(max_tokens=max_tokens, **plan)
    shares = planner.assign(batch.tokens, num_processes=num_processes, trajectories=trajectories)
    return [list(map(planner.lay_out, share)) for share in shares]


def owners_of(batch: Batch, **plan: Any) -> list[list[set[int]]]:
    """The trajectories in each pass of each process."""
    return [[set(batch.tokens.trajectory_T[m.token_T].tolist()) for m in share] for share in shares_of(batch, **plan)]


@given(groups=GROUPS, split=SPLITS, share=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_a_sample_is_the_same_on_any_number_of_ranks_within_its_budget_and_each_has_its_own(
    groups: list[TrajectoryGroup], split: dict[str, Any], share: float, seed: int
) -> None:
    trajectories = members_of(groups)
    batch = batch_of(trajectories, some_credits(trajectories))
    order = np.random.default_rng(seed).permutation(batch.tokens.num_trajectories).tolist()
    num_ranks, planner = split["num_processes"], Planner(max_tokens=split["max_tokens"], layout=split["layout"])

    def members(passes: list[PassTokens]) -> set[int]:
        return {int(i) for each in passes for i in batch.tokens.trajectory_T[each.token_T]}

    (alone,) = planner.sample(batch.tokens, share=share, trajectories=order)
    sampled = planner.sample(batch.tokens, share=share, trajectories=order, num_processes=num_ranks)
    assigned = planner.assign(batch.tokens, num_processes=num_ranks, trajectories=order)
    chosen = members(alone)
    assert chosen == set(order[: len(chosen)]) == set[int]().union(*map(members, sampled))
    assert len({len(passes) for passes in sampled}) == 1
    for own, of_all in zip(sampled, assigned, strict=True):
        assert members(own) == members(of_all) & chosen
    if (
        len(chosen) > 1 and split["layout"] == "tree"
    ):  # the passes of other layouts are padded to their own longest rows
        whole = planner.assign(batch.tokens, trajectories=order)[0]
        trees = [[plan_tree([row.astype(np.int64) for row in each.rows]) for each in of] for of in (alone, whole)]
        sizes = [sum(tree.num_tokens for tree in of) for of in trees]
        assert len(alone) > 1 or sizes[0] <= share * sizes[1]


def loss_of(batch: Batch, micro: MicroBatch, policy: Policy) -> Tensor:
    logprobs_T, _ = policy(micro.inputs, micro.slot_T, micro.target_T, 1.0)
    columns = batch.columns.select(micro.token_T).map(micro.to_device)
    result = policy_loss(
        logprobs_T,
        anchor_logprobs_T=columns.behavior_T.double(),
        advantages_T=columns.advantage_T.double(),
        unit_T=columns.unit_T,
        weight_T=columns.weight_T.double(),
        trust=partial(fixed, low=0.1, high=0.1),
    )
    return result.loss


def loss_and_gradient(batch: Batch, **plan: Any) -> tuple[float, Tensor]:
    """Return the loss and its gradient, added up over the passes of all processes."""
    policy = copy.deepcopy(POLICY)
    total = 0.0
    for share in shares_of(batch, **plan):
        for micro in share:
            loss = loss_of(batch, micro, policy)
            loss.backward()
            total += float(loss.detach())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return total, torch.cat([gradient.flatten() for gradient in gradients])


def assert_same(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> None:
    assert other[0] == pytest.approx(one[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(other[1], one[1], rtol=1e-9, atol=1e-9 * float(one[1].abs().max()))


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS, split=SPLITS, random=st.randoms(use_true_random=False))
def test_loss_and_gradient_are_the_same_for_every_layout_budget_order_and_number_of_processes(
    groups: list[TrajectoryGroup], split: dict[str, Any], random: Any
) -> None:
    trajectories = members_of(groups)
    credits = some_credits(trajectories)
    order = random.sample(range(len(trajectories)), len(trajectories))
    shuffled = batch_of([trajectories[i] for i in order], [credits[i] for i in order])
    assert_same(loss_and_gradient(batch_of(trajectories, credits)), loss_and_gradient(shuffled, **split))


@each_layout
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradient_are_so_for_every_unit_and_aggregation(
    unit: RatioUnit, aggregation: Aggregation, layout: Layout
) -> None:
    trajectories = members_of(some_groups([2, 3, 1]))
    batch = batch_of(trajectories, some_credits(trajectories), unit=unit, aggregation=aggregation)
    whole = loss_and_gradient(batch)
    assert abs(whole[0]) > 1e-3
    assert float(whole[1].norm()) > 1e-3
    assert_same(whole, loss_and_gradient(batch, layout=layout))
    assert_same(whole, loss_and_gradient(batch, layout=layout, max_tokens=70, num_processes=2))


@settings(max_examples=100, deadline=None)
@given(groups=GROUPS, split=SPLITS)
def test_processes_hold_every_token_once_in_equally_many_passes_of_whole_trajectories_within_the_budget(
    groups: list[TrajectoryGroup], split: dict[str, Any]
) -> None:
    trajectories = members_of(groups)
    batch = batch_of(trajectories, some_credits(trajectories))
    shares = shares_of(batch, **split)
    assert len({len(share) for share in shares}) == 1
    passes = [micro for share in shares for micro in share]
    assert sorted(token for micro in passes for token in micro.token_T) == list(range(len(batch.tokens.target_T)))
    owners = [set(batch.tokens.trajectory_T[micro.token_T].tolist()) for micro in passes]
    assert sum(map(len, owners)) == len(set(batch.tokens.trajectory_T.tolist()))
    for micro, owner in zip(passes, owners, strict=True):
        assert micro.inputs.ids_BL.numel() <= split["max_tokens"] or len(owner) <= 1


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS, split=SPLITS)
def test_a_pass_holds_the_columns_of_its_tokens_and_reads_them_at_their_predecessors(
    groups: list[TrajectoryGroup], split: dict[str, Any]
) -> None:
    trajectories = members_of(groups)
    batch = batch_of(trajectories, some_credits(trajectories), unit="turn")
    for micro in (micro for share in shares_of(batch, **split) for micro in share):
        chosen = micro.token_T
        np.testing.assert_array_equal(
            micro.inputs.ids_BL.flatten()[micro.slot_T].numpy(),
            [
                batch.tokens.rows[r][p]
                for r, p in zip(batch.tokens.row_T[chosen], batch.tokens.position_T[chosen], strict=True)
            ],
        )
        np.testing.assert_array_equal(micro.target_T.numpy(), batch.tokens.target_T[chosen])
        columns = batch.columns.select(micro.token_T).map(micro.to_device)
        np.testing.assert_array_equal(columns.version_T, batch.columns.version_T[chosen])
        for name in ("behavior_T", "advantage_T", "weight_T"):  # float32 on the device
            assert getattr(columns, name).dtype == torch.float32
            np.testing.assert_allclose(getattr(columns, name), getattr(batch.columns, name)[chosen], rtol=1e-7)
        units = np.unique(batch.columns.unit_T[chosen])  # numbered from 0 within the pass
        np.testing.assert_array_equal(units[columns.unit_T], batch.columns.unit_T[chosen])


@each_layout
@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_pass_without_a_trajectory_has_no_loss_and_a_gradient_of_zero_everywhere(
    layout: Layout, num_processes: int
) -> None:
    batch = batch_of([FORKED], [Credit.uniform(FORKED, 1.0)])
    (_,), *others = shares_of(batch, layout=layout, num_processes=num_processes)
    assert len(others) == num_processes - 1
    for (micro,) in others:
        policy = copy.deepcopy(POLICY)
        loss = loss_of(batch, micro, policy)
        loss.backward()
        assert loss.item() == 0
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None, name  # what averages gradients waits for every parameter
            assert not parameter.grad.any(), name


@each_layout
def test_a_budget_of_one_token_gives_every_trajectory_a_pass_and_a_large_one_all_of_them_the_same(
    layout: Layout,
) -> None:
    trajectories = members_of(some_groups([2, 3, 1]))
    batch = batch_of(trajectories, some_credits(trajectories))
    assert sorted(map(tuple, owners_of(batch, layout=layout, max_tokens=1)[0])) == [(i,) for i in range(6)]
    assert owners_of(batch, layout=layout) == [[{0, 1, 2, 3, 4, 5}]]


# Rows of 2 + 3, 2 + 1, 2 + 5 and 2 + 2 tokens are read, of which 2 are shared by all.
ALIKE = [trajectory(i, turn([1, 2], [10 * i + j for j in range(1, n + 2)])) for i, n in enumerate((3, 1, 5, 2))]


@each(
    ("layout", "size"),
    [
        ("tree", 2 + 3 + 1 + 5 + 2),
        ("packed", 3 * 7),  # 7; 5; 4 and 3 behind one another
        ("padded", 4 * 7),
    ],
)
def test_the_budget_counts_shared_tokens_once_and_padding_too(layout: Layout, size: int) -> None:
    batch = batch_of(ALIKE, [Credit.uniform(t, 1.0) for t in ALIKE])
    ((micro,),) = shares_of(batch, layout=layout, max_tokens=size)
    assert micro.inputs.ids_BL.numel() == size
    assert len(shares_of(batch, layout=layout, max_tokens=size - 1)[0]) == 2


@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_the_budget_of_a_recurrent_model_counts_rows_as_if_they_were_padded(layout: Layout) -> None:
    batch = batch_of(ALIKE, [Credit.uniform(t, 1.0) for t in ALIKE])
    ((micro,),) = shares_of(batch, layout=layout, max_tokens=4 * 7, is_recurrent=True)
    assert micro.inputs.ids_BL.numel() < 4 * 7
    assert len(shares_of(batch, layout=layout, max_tokens=4 * 7 - 1, is_recurrent=True)[0]) == 2


def rows_read(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Rows of trajectories all of whose tokens are kept, without the last one of each, which predicts none."""
    return [row.ids_L[:-1].tolist() for t in trajectories for row in rows_of(t.turns)]


def tokens_and_pairs(rows: Sequence[list[int]], layout: Layout) -> tuple[int, int]:
    """How many tokens rows have, and how many (query, key) pairs: each with itself and those before it."""
    prefixes = [tuple(row[:stop]) for row in rows for stop in range(1, len(row) + 1)]
    found = set(prefixes) if layout == "tree" else prefixes
    return len(found), sum(map(len, found))


@settings(max_examples=100, deadline=None)
@given(groups=GROUPS, max_tokens=st.integers(1, 300))
def test_a_group_stays_together_on_a_tree_where_the_budget_allows_it(
    groups: list[TrajectoryGroup], max_tokens: int
) -> None:
    trajectories = members_of(groups)
    batch = batch_of(trajectories, [Credit.uniform(t, 1.0) for t in trajectories])
    (passes,) = owners_of(batch, layout="tree", max_tokens=max_tokens)
    for number, group in enumerate(groups):
        members = {i for i, of in enumerate(batch.tokens.groups) if of == number}
        fits = tokens_and_pairs(rows_read(group.trajectories), "tree")[0] <= max_tokens
        assert not fits or [members & owner for owner in passes if members & owner] == [members]


def alone(number: int, *lengths: int, first: int = 1) -> TrajectoryGroup:
    """A group of one trajectory for each length: so many tokens are read. Nothing is shared but `first`."""
    members = [
        trajectory(i, turn([first, 50 + number], [100 + i] * (length - 1)), group=f"g{number}")
        for i, length in enumerate(lengths)
    ]
    return TrajectoryGroup(group_id=f"g{number}", trajectories=tuple(members))


def shared_out(groups: Sequence[TrajectoryGroup], **plan: Any) -> list[list[set[int]]]:
    trajectories = members_of(groups)
    return owners_of(batch_of(trajectories, [Credit.uniform(t, 1.0) for t in trajectories]), **plan)


@pytest.mark.parametrize("first", [1, 10_000])
def test_groups_whose_first_tokens_are_the_same_are_neighbours(first: int) -> None:
    groups = [alone(number, 20, 20, first=first + number % 2) for number in range(4)]
    # Two groups of 2 + 2 * 18 tokens, of which the first one is shared.
    owners = shared_out(groups, layout="tree", max_tokens=2 * (2 + 2 * 18) - 1)
    assert owners == [[{0, 1, 4, 5}, {2, 3, 6, 7}]]


def apart(number: int, *firsts: int) -> TrajectoryGroup:
    """A group of trajectories of 21 tokens each that share nothing, by their first tokens: 20 are read."""
    members = [trajectory(i, turn([first], [100] * 20), group=f"g{number}") for i, first in enumerate(firsts)]
    return TrajectoryGroup(group_id=f"g{number}", trajectories=tuple(members))


def test_a_group_stands_where_the_least_of_its_rows_does() -> None:
    owners = shared_out([apart(0, 1, 9), apart(1, 5, 6), apart(2, 2, 3)], layout="tree", max_tokens=80)
    assert owners == [[{0, 1, 4, 5}, {2, 3}]]


def test_padded_rows_of_a_pass_are_near_in_length_whatever_their_groups() -> None:
    assert shared_out([alone(0, 3, 30), alone(1, 31, 4)], max_tokens=62) == [[{0, 3}, {1, 2}]]


def load(groups: Sequence[TrajectoryGroup], layout: Layout, pairs_per_token: int) -> float:
    costs = [tokens_and_pairs(rows_read(group.trajectories), layout) for group in groups]
    return sum(pairs + pairs_per_token * tokens for tokens, pairs in costs)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=3), min_size=1, max_size=6),
    layout=st.sampled_from(LAYOUTS),
    num_processes=st.integers(2, 3),
    pairs_per_token=st.sampled_from([0, 10, 1024]),
)
@example(lengths=[[20], [20], [40]], layout="tree", num_processes=2, pairs_per_token=1024)
def test_no_share_costs_more_than_four_thirds_of_what_the_best_split_gives(
    lengths: list[list[int]], layout: Layout, num_processes: int, pairs_per_token: int
) -> None:
    # Groups share nothing. Other than on a tree, trajectories go to processes one by one.
    lengths = lengths if layout == "tree" else [[length] for of in lengths for length in of][:6]
    groups = [alone(number, *of, first=1 + number) for number, of in enumerate(lengths)]
    cost = [load([group], layout, pairs_per_token) for group in groups]
    owners = shared_out(groups, layout=layout, num_processes=num_processes, pairs_per_token=pairs_per_token)
    loads = [load(owned_of(groups, set().union(*share)), layout, pairs_per_token) for share in owners]
    assert sum(loads) >= sum(cost)
    best = min(
        max(sum(c for c, of in zip(cost, split, strict=True) if of == rank) for rank in range(num_processes))
        for split in product(range(num_processes), repeat=len(groups))
    )
    assert max(loads) <= (4 / 3 - 1 / (3 * num_processes)) * best * (1 + 1e-12)


def owned_of(groups: Sequence[TrajectoryGroup], owned: set[int]) -> list[TrajectoryGroup]:
    """What a process has of groups."""
    numbers = count()
    kept = [[member for member in group.trajectories if next(numbers) in owned] for group in groups]
    return [replace(group, trajectories=tuple(of)) for group, of in zip(groups, kept, strict=True) if of]


@each(("num_groups", "num_processes"), [(1, 2), (1, 8), (4, 8), (5, 2), (3, 6)])
def test_groups_are_split_where_processes_would_have_nothing_to_do(num_groups: int, num_processes: int) -> None:
    groups = [alone(number, *[40] * 8, first=1 + number) for number in range(num_groups)]
    owners = shared_out(groups, layout="tree", num_processes=num_processes)
    loads = [load(owned_of(groups, set().union(*share)), "tree", 1024) for share in owners]
    assert max(loads) < 1.35 * load(groups, "tree", 1024) / num_processes  # a quarter more, and what halves share


def test_groups_stay_whole_where_that_is_as_even() -> None:
    groups = [alone(number, *[40] * 8, first=1 + number) for number in range(4)]
    assert sorted(owning_groups(groups, layout="tree", num_processes=2), key=min) in (
        [{0, 1}, {2, 3}],
        [{0, 2}, {1, 3}],
        [{0, 3}, {1, 2}],
    )


def test_groups_stay_whole_where_their_halves_would_share_nothing() -> None:
    assert shared_out([apart(0, 1, 2), apart(1, 3, 4)], layout="tree", num_processes=2) in (
        [[{0, 1}], [{2, 3}]],
        [[{2, 3}], [{0, 1}]],
    )


def owning_groups(groups: Sequence[TrajectoryGroup], **plan: Any) -> list[set[int]]:
    """The groups of each process."""
    number_of = [number for number, group in enumerate(groups) for _ in group.trajectories]
    return [{number_of[i] for owner in share for i in owner} for share in shared_out(groups, **plan)]


@each_layout
@pytest.mark.parametrize(
    ("pairs_per_token", "expected"),
    [
        (0, [{0}, {1, 2, 3}]),  # 741 pairs and 3 * 210
        (
            160,
            [{0}, {1, 2, 3}],
        ),  # the third of the short ones goes where less is: 741 + 38 * 160 and 2 * (210 + 20 * 160)
        (161, [{0, 3}, {1, 2}]),
        (10**6, [{0, 3}, {1, 2}]),  # 38 + 20 tokens and 20 + 20
    ],
)
def test_a_share_is_weighed_by_pairs_of_tokens_and_by_tokens(
    layout: Layout, pairs_per_token: int, expected: list[set[int]]
) -> None:
    groups = [alone(number, length) for number, length in enumerate((38, 20, 20, 20))]
    assert owning_groups(groups, layout=layout, num_processes=2, pairs_per_token=pairs_per_token) == expected


def test_what_a_tree_shares_weighs_once() -> None:
    same = [trajectory(i, turn([1, 50], [100] * 19), group="g0") for i in range(4)]
    groups = [TrajectoryGroup(group_id="g0", trajectories=tuple(same)), alone(1, 12, first=2), alone(2, 25, first=3)]
    # 20, 12 and 25 tokens; as rows the first would be the heaviest.
    assert owning_groups(groups, layout="tree", num_processes=2) == [{2}, {0, 1}]


@each_layout
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_batch_without_a_trained_token_has_no_pass_on_any_process(layout: Layout, num_processes: int) -> None:
    for failed in (FORKED, trajectory(0)):  # the second before its first turn
        batch = batch_of([failed], [Credit.excluded(failed)])
        shares = shares_of(batch, layout=layout, num_processes=num_processes, vocab_size=VOCABULARY)
        assert shares == [[]] * num_processes


def test_a_pass_ends_where_nothing_more_is_read() -> None:
    ((micro,),) = shares_of(batch_of([FORKED], [Credit.uniform(FORKED, 1.0)]))
    assert micro.inputs.ids_BL.tolist() == [
        [1, 2, 3, 4, 5, 0],
        [7, 8, 9, 10, 11, 12],
    ]  # the last sampled one predicts none
    keep = [True, True, True, False, False, False]
    excluded = Credit.from_tokens(FORKED, [1] * 6, keep_T=keep)
    for layout in LAYOUTS:
        ((micro,),) = shares_of(batch_of([FORKED], [excluded]), layout=layout)
        assert micro.inputs.ids_BL.tolist() == [[1, 2, 3, 4, 5]]


@each_layout
def test_a_forked_trajectory_loses_what_its_parts_would_lose_in_their_own_contexts(layout: Layout) -> None:
    first = trajectory(0, *FORKED.turns[:2])
    second = trajectory(1, replace(FORKED.turns[2], extends=True), FORKED.turns[3])
    advantages = [0.5, -1.0, 2.0, 1.0, -0.5, 0.25]
    apart = [Credit.from_tokens(first, advantages[:3]), Credit.from_tokens(second, advantages[3:])]
    # By tokens nothing depends on which trajectory a token belongs to.
    whole = batch_of([FORKED], [Credit.from_tokens(FORKED, advantages)], unit="token", aggregation="token-mean")
    parts = batch_of([first, second], apart, unit="token", aggregation="token-mean")
    assert_same(loss_and_gradient(parts, max_tokens=1), loss_and_gradient(whole, layout=layout))


def test_a_token_that_the_model_does_not_know_is_told() -> None:
    tokens = batch_of([FORKED], [Credit.uniform(FORKED, 1.0)]).tokens
    largest = max(int(row.max()) for row in tokens.rows)
    assert list(Planner(max_tokens=100, vocab_size=largest + 1).micro_batches(tokens))
    with pytest.raises(UserError, match=rf"token {largest} was recorded, and the model knows {largest}: "):
        list(Planner(max_tokens=100, vocab_size=largest).micro_batches(tokens))
    assert Planner.for_policy(POLICY, max_tokens=100).vocab_size == POLICY.model.config.vocab_size


def test_a_planner_is_that_of_its_policy() -> None:
    policy = Policy(made("Lfm2", **SIZES, layer_types=["conv", "full_attention"]), layout="tree")
    expected = Planner(
        max_tokens=100, layout="tree", is_recurrent=True, can_continue=True, vocab_size=SIZES["vocab_size"]
    )
    assert Planner.for_policy(policy, max_tokens=100) == expected


def logprobs_of(batch: Batch, layout: Layout) -> dict[tuple[int, int, int], float]:
    """Return the policy's log-probability of each trained token, by row, position and token."""
    found = {}
    for micro in Planner(max_tokens=10**9, layout=layout).micro_batches(batch.tokens):
        with torch.no_grad():
            logprobs_T, _ = POLICY(micro.inputs, micro.slot_T, micro.target_T, 1.0)
        for token, logprob in zip(micro.token_T, logprobs_T.tolist(), strict=True):
            found[
                int(batch.tokens.row_T[token]), int(batch.tokens.position_T[token]), int(batch.tokens.target_T[token])
            ] = logprob
    return found


@each_layout
def test_a_token_depends_on_its_own_context_and_on_nothing_else(layout: Layout) -> None:
    def with_turn(t: Trajectory, k: int, **changes: Any) -> Trajectory:
        return replace(t, turns=(*t.turns[:k], replace(t.turns[k], **changes), *t.turns[k + 1 :]))

    trajectories, credits = some(3)
    credits = [Credit.uniform(t, 1.0) for t in trajectories]
    before = logprobs_of(batch_of(trajectories, credits), layout)
    other = [1 + token % 200 for token in trajectories[1].turns[2].observation_ids]
    assert not trajectories[1].turns[2].extends
    changed = [trajectories[0], with_turn(trajectories[1], 2, observation_ids=tuple(other)), trajectories[2]]
    after = logprobs_of(batch_of(changed, credits), layout)
    # Rows: 0 is the first trajectory, 1 and 2 the forked one before and after its fork, 3 the third.
    assert {row for row, *_ in before} == {0, 1, 2, 3}
    assert before.keys() == after.keys()
    for key in before:
        if key[0] == 2:
            assert abs(before[key] - after[key]) > 1e-6
        else:
            assert after[key] == pytest.approx(before[key], rel=1e-12)


@each_layout
def test_tokens_after_the_last_trained_one_and_tokens_of_the_excluded_change_nothing(layout: Layout) -> None:
    trajectories, credits = some(4)
    num_last = len(trajectories[2].turns[3].action_ids)
    keep = np.ones(trajectories[2].num_action_tokens, dtype=np.bool_)
    keep[-num_last:] = False
    credits[2] = replace(credits[2], keep_T=keep)
    credits[3] = Credit.excluded(trajectories[3])
    before = loss_and_gradient(batch_of(trajectories, credits), layout=layout)
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
    after = loss_and_gradient(batch_of(trajectories, credits), layout=layout)
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])


@each("num_processes", [1, 2])
@each("aggregation", AGGREGATIONS)
def test_trajectories_that_are_not_computed_count_in_the_denominators(
    aggregation: Aggregation, num_processes: int
) -> None:
    trajectories, credits = some(6)
    for index in (1, 2, 4):
        credits[index] = replace(credits[index], advantages_T=np.zeros_like(credits[index].advantages_T))
    batch = batch_of(trajectories, credits, aggregation=aggregation)
    plan: dict[str, Any] = {"num_processes": num_processes, "trajectories": [0, 3, 5]}
    assert_same(loss_and_gradient(batch), loss_and_gradient(batch, **plan))
    computed = [owner for share in owners_of(batch, max_tokens=30, **plan) for owner in share]
    assert set().union(*computed) == {0, 3, 5}
    assert owners_of(batch, num_processes=num_processes, trajectories=[]) == [[]] * num_processes
