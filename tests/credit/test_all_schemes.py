import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl import (
    Credit,
    CreditScheme,
    FinishReason,
    Need,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
    assign_credit,
    load_credit,
)
from agentrl.errors import CreditError
from agentrl.recipe.registry import names
from agentrl.testing.groups import make_group
from tests.support.credit import PER_TOKEN
from tests.support.each import each
from tests.support.rules import Rules
from tests.support.signals import with_signals

SCHEMES = names("agentrl.credit")
NESTED = {"judge": "then", "redistribute": "then", "shuffled": "of"}
"""Schemes around another one, and the field that holds it."""


def scheme_class(name: str) -> type[CreditScheme]:
    return type(load_credit({"scheme": name}))


def with_lone(name: str, lone: str) -> CreditScheme:
    """Build a scheme with its own `lone`, or that of the scheme within it."""
    if name in NESTED:
        return load_credit({"scheme": name, NESTED[name]: {"scheme": "turn_return", "lone": lone}})
    return load_credit({"scheme": name, "lone": lone})


def random_group(rng: random.Random, group_id: str, *, size: int) -> TrajectoryGroup:
    """Return a group with all that any scheme reads; some of it was truncated."""
    rows = [range(rng.randint(1, 15)) for _ in range(size)]

    def each(value: Any) -> list[list[Any]]:
        return [[value() for _ in row] for row in rows]

    def logprob() -> float:
        return -rng.expovariate(1.0)

    lengths = each(lambda: rng.randint(1, 5))

    def each_token(value: Any) -> list[list[Any]]:
        return [[[value() for _ in range(num)] for num in row] for row in lengths]

    group = make_group(
        each(lambda: rng.gauss(0, 1)),
        state_keys=each(lambda: rng.choice("ABCDEFGH")),
        action_keys=each(lambda: rng.choice("xyz")),
        action_lengths=lengths,
        values=each_token(lambda: rng.gauss(0, 1)),
        group_id=group_id,
        behavior_logprobs=each_token(logprob),
        reference_logprobs=each_token(logprob),
        teacher_logprobs=each_token(logprob),
        hindsight_logprobs=each_token(logprob),
        answer_logprobs=each(logprob),
        turn_scores=each(rng.random),
        branch_rewards=each(lambda: tuple((rng.gauss(0, 1),) * rng.randint(1, 3) for _ in range(rng.randint(0, 3)))),
    )
    return replace(
        group,
        trajectories=tuple(
            replace(t, truncated=rng.random() < 0.3, signals={"values": rng.gauss(0, 1)}, gold_answer="42")
            for t in group.trajectories
        ),
    )


def random_batch(seed: int) -> list[TrajectoryGroup]:
    rng = random.Random(seed)
    return [random_group(rng, f"g{g}", size=size) for g, size in enumerate((16, 2, 5))]


def failures(group: TrajectoryGroup) -> list[Trajectory]:
    """Return what an episode may leave behind that failed: nothing, or turns that nobody measured, and senseless rewards."""
    bare = Turn(observation_ids=(1,), action_ids=(2, 3), behavior_logprobs=(-1.0, -1.0), versions=(0, 0), reward=1e9)
    common = replace(group.trajectories[0], truncated=True, signals={}, error="lost")
    return [
        replace(common, trajectory_id="no-turns", turns=(), stop_reason=StopReason.ENV_ERROR),
        replace(common, trajectory_id="bare", turns=(bare, bare), stop_reason=StopReason.ENGINE_ERROR),
        replace(
            common, trajectory_id="nan", turns=(replace(bare, reward=np.nan),), stop_reason=StopReason.ENGINE_ERROR
        ),
    ]


def assert_same(found: Credit, expected: Credit) -> None:
    np.testing.assert_array_equal(found.advantages_T, expected.advantages_T)
    np.testing.assert_array_equal(found.keep_T, expected.keep_T)


def test_the_built_in_schemes_are_installed() -> None:
    assert set(SCHEMES) >= {
        "uniform", "turn_return", "gigpo", "group_gae", "action_values", "ecpo", "turn_gae", "tree", "info_gain",
        "redistribute", "distill", "judge", "shuffled", "crbc", "g2po", "triage",
    }  # fmt: skip


every = Rules[str]()
comparing = Rules[str]()


@every
def failures_among_siblings_change_nothing_and_leave_the_loss(name: str) -> None:
    for through_assign_credit in (True, False):
        check_failures(name, through_assign_credit=through_assign_credit)


def check_failures(name: str, *, through_assign_credit: bool) -> None:
    # A scheme within another one is called without assign_credit, which hides the failed.
    scheme, groups = load_credit({"scheme": name}), random_batch(0)
    mixed = []
    for group in groups:
        (first, *rest), (a, b, c) = group.trajectories, failures(group)
        mixed.append(replace(group, trajectories=(a, first, b, c, *rest)))
    lost = tuple(replace(t, group_id="lost") for t in failures(groups[0]))
    mixed.insert(1, TrajectoryGroup(group_id="lost", trajectories=lost))
    expected = assign_credit(scheme, groups)
    found = assign_credit(scheme, mixed) if through_assign_credit else scheme.assign(mixed)
    assert [len(row) for row in found] == [len(group.trajectories) for group in mixed]
    assert not any(credit.keep_T.any() for credit in found.pop(1))
    for row, rest_of in zip(found, expected, strict=True):
        for index in (0, 2, 3):
            assert not row[index].keep_T.any()
        for credit, same in zip([row[1], *row[4:]], rest_of, strict=True):
            assert_same(credit, same)


COMPARING = [name for name in SCHEMES if "lone" in scheme_class(name).model_fields or name in NESTED]


def test_schemes_that_compare_siblings_are_told_by_their_field_lone() -> None:
    assert set(SCHEMES) - set(COMPARING) == {"turn_gae", "distill"}


@comparing
def a_lone_trajectory_stops_is_kept_at_zero_or_is_dropped(name: str) -> None:
    several, alone = random_batch(1)[0], random_group(random.Random(1), "alone", size=1)
    left = failures(alone)
    alone = replace(alone, trajectories=(left[0], *alone.trajectories, left[1]))
    for scheme in (load_credit({"scheme": name}), with_lone(name, "error")):
        with pytest.raises(
            CreditError, match=r"group alone has one valid trajectory, alone/0, .* lone: keep .* lone: drop"
        ):
            assign_credit(scheme, [several, alone])
    [_, [_, kept, _]] = assign_credit(with_lone(name, "keep"), [several, alone])
    assert kept.keep_T.all()
    assert not kept.advantages_T.any()
    [_, [_, dropped, _]] = assign_credit(with_lone(name, "drop"), [several, alone])
    assert not dropped.keep_T.any()


BATCH_WIDE = {"redistribute"}
"""Schemes that read something over all groups, lone trajectories included."""


@comparing
def a_lone_trajectory_enters_no_statistic(name: str) -> None:
    if name in BATCH_WIDE:
        return
    several, alone = random_batch(2)[0], random_group(random.Random(2), "alone", size=1)
    for lone in ("keep", "drop"):
        [expected] = assign_credit(with_lone(name, lone), [several])
        [found, _] = assign_credit(with_lone(name, lone), [several, alone])
        for credit, same in zip(found, expected, strict=True):
            assert_same(credit, same)


@every
def a_scheme_that_compares_no_siblings_credits_a_lone_trajectory_as_it_would_among_them(name: str) -> None:
    if name in COMPARING:
        return
    scheme, group = load_credit({"scheme": name}), random_batch(3)[0]
    [among] = assign_credit(scheme, [group])
    [[alone]] = assign_credit(scheme, [replace(group, trajectories=group.trajectories[3:4])])
    assert alone.advantages_T.any()
    assert_same(alone, among[3])


@every
def a_random_batch_gets_finite_credit_that_is_not_zero(name: str) -> None:
    for seed in range(3):
        check_finite_credit(name, seed)


def check_finite_credit(name: str, seed: int) -> None:
    groups = random_batch(seed)
    for group, row in zip(groups, assign_credit(load_credit({"scheme": name}), groups), strict=True):
        for trajectory, credit in zip(group.trajectories, row, strict=True):
            assert credit.advantages_T.shape == (trajectory.num_action_tokens,)
            assert np.isfinite(credit.advantages_T).all()
            assert credit.keep_T.all()
        advantages = np.concatenate([credit.advantages_T for credit in row])
        # states and forks that nobody else had may leave turns at zero
        assert np.count_nonzero(advantages) > 0.2 * advantages.size
        # nothing in the batch is far from 1, so credit that is has been divided by something small
        assert np.abs(advantages).max() < 100


@every
def an_action_that_was_cut_off_and_never_carried_out_is_credited(name: str) -> None:
    group = random_batch(4)[0]
    first = group.trajectories[0]
    last = replace(first.turns[-1], action_key=None, next_state_key=None, finish_reason=FinishReason.LENGTH)
    cut_off = replace(first, turns=(*first.turns[:-1], last), truncated=True)
    [row] = assign_credit(
        load_credit({"scheme": name}), [replace(group, trajectories=(cut_off, *group.trajectories[1:]))]
    )
    assert row[0].keep_T.all()
    assert np.isfinite(row[0].advantages_T).all()


NOT_A_NUMBER = {
    "turn_gae": "values",
    "distill": "teacher_logprobs",
    "info_gain": "answer_logprobs",
    "judge": "turn_scores",
    "triage": "turn_scores",
}


@each(("name", "field"), NOT_A_NUMBER.items())
def test_a_signal_that_is_no_number_is_named(name: str, field: str) -> None:
    group = random_batch(5)[0]
    first = group.trajectories[0]
    spoilt = (math.nan,) * len(first.turns[0].action_ids) if field in PER_TOKEN else math.nan
    turns = (with_signals(first.turns[0], **{field: spoilt}), *first.turns[1:])
    with pytest.raises(CreditError, match=rf"trajectory {first.trajectory_id}\b"):
        assign_credit(
            load_credit({"scheme": name}),
            [replace(group, trajectories=(replace(first, turns=turns), *group.trajectories[1:]))],
        )


@every
def no_groups_and_groups_without_trajectories_get_no_credit(name: str) -> None:
    scheme = load_credit({"scheme": name})
    assert assign_credit(scheme, []) == []
    assert scheme.assign([]) == []
    assert scheme.assign([TrajectoryGroup(group_id="g", trajectories=())]) == [[]]


@every
def it_needs_what_there_is(name: str) -> None:
    cls = scheme_class(name)
    requirements = load_credit({"scheme": name}).requirements()
    assert requirements <= set(Need)
    assert cls.needs <= requirements
    assert all(isinstance(need, Need) for need in requirements)


@every
def it_says_what_it_computes_and_where_it_comes_from(name: str) -> None:
    cls = scheme_class(name)
    lines = (cls.__doc__ or "").splitlines()
    assert lines
    assert lines[0].strip()
    assert cls.paper.strip()
    assert cls.granularity in ("trajectory", "turn", "token")


@each("name", SCHEMES)
def test_a_scheme_keeps_to_the_rules(name: str, subtests: pytest.Subtests) -> None:
    every.check(name, subtests)
    if name in COMPARING:
        comparing.check(name, subtests)
