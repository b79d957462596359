from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from agentrl import Credit, CreditScheme, StopReason, TrajectoryGroup, assign_credit, load_credit
from agentrl.errors import ConfigError, CreditError
from agentrl.testing.groups import make_group
from tests.support.each import each

GROUP = make_group([[0, 1], [0.5]], action_lengths=[[2, 1], [3]])
FIRST, SECOND = GROUP.trajectories


def failed(group: TrajectoryGroup, index: int, stop: StopReason = StopReason.ENV_ERROR) -> TrajectoryGroup:
    rows = list(group.trajectories)
    rows[index] = replace(rows[index], stop_reason=stop)
    return replace(group, trajectories=tuple(rows))


def scheme_of(assign: Callable[[Sequence[TrajectoryGroup]], Any]) -> CreditScheme:
    class Stranger(CreditScheme):
        def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
            found: list[list[Credit]] = assign(groups)
            return found

    return Stranger()


def by_reward(groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
    return [[Credit.uniform(t, t.reward) for t in group.trajectories] for group in groups]


class Unfinished(CreditScheme):
    """Lacks assign()."""


def test_a_made_up_group_has_the_fields_that_are_given() -> None:
    (trajectory,) = make_group([[0, 1]], action_lengths=[[1, 2]], versions=[[3, 4]], values=None).trajectories
    assert [turn.versions for turn in trajectory.turns] == [(3,), (4, 4)]
    (trajectory,) = make_group(
        [[0]], action_ids=[[(7, 8)]], action_lengths=[[2]], observation_ids=[[(1,)]]
    ).trajectories
    assert (trajectory.turns[0].action_ids, trajectory.turns[0].observation_ids) == ((7, 8), (1,))


def test_credit_is_one_float32_for_each_action_token() -> None:
    assert Credit.uniform(FIRST, 0.5).advantages_T.tolist() == [0.5, 0.5, 0.5]
    assert Credit.from_turns(FIRST, [1, -2]).advantages_T.tolist() == [1, 1, -2]
    tokens = Credit.from_tokens(FIRST, [1, 2, 3], keep_T=[True, False, True])
    assert tokens.advantages_T.tolist() == [1, 2, 3]
    assert tokens.keep_T.tolist() == [True, False, True]
    assert tokens.advantages_T.dtype == np.float32
    assert Credit.excluded(FIRST).keep_T.tolist() == [False, False, False]


def test_a_trajectory_without_turns_has_empty_credit() -> None:
    [empty] = make_group([[]]).trajectories
    assert Credit.from_turns(empty, []).advantages_T.tolist() == []


@each(
    ("build", "message"),
    [
        (lambda: Credit.from_tokens(FIRST, [1, 2]), r"g/0 has 3 action tokens, got advantages_T of shape \(2,\)"),
        (lambda: Credit.from_tokens(FIRST, [1, np.nan, 2]), "g/0: the advantage of action token 1 is nan"),
        (lambda: Credit.from_tokens(FIRST, [1, 2, 1e300]), "g/0: the advantage of action token 2 is inf"),
        (lambda: Credit.from_tokens(FIRST, [1, 2, 3], keep_T=[True]), r"got keep_T of shape \(1,\)"),
        (lambda: Credit.from_tokens(FIRST, [[1], [2, 3]]), "g/0: advantages must be a flat list of numbers"),
        (lambda: Credit.from_turns(FIRST, [1]), r"g/0 has 2 turns, got turn advantages of shape \(1,\)"),
        (lambda: Credit.uniform(FIRST, float("inf")), "g/0: the advantage of action token 0 is inf"),
    ],
)
def test_credit_that_does_not_fit_its_trajectory_is_refused(build: Callable[[], Credit], message: str) -> None:
    with pytest.raises(CreditError, match=message):
        build()


def raw(advantages: Any, keep: Any) -> Credit:
    return Credit(advantages_T=advantages, keep_T=keep)


KEEP = np.ones(3, dtype=np.bool_)


@each(
    ("assign", "message"),
    [
        (lambda _: [], "one list for each of the 1 groups, got list of length 0"),
        (lambda _: None, "one list for each of the 1 groups, got NoneType"),
        (lambda _: [[Credit.uniform(FIRST, 1)]], "group g has 2 trajectories, got list of length 1"),
        (lambda _: [[Credit.uniform(FIRST, 1), None]], "trajectory g/1: expected a Credit, got NoneType"),
        (
            lambda _: [[Credit.from_tokens(make_group([[1] * 2]).trajectories[0], [1, 2])] * 2],
            "g/0 has 3 action tokens",
        ),
        (lambda _: [[raw(np.zeros(3), KEEP)] * 2], "g/0: advantages_T must be a numpy array of float32, got float64"),
        (lambda _: [[raw([0, 0, 0], KEEP)] * 2], "g/0: advantages_T must be a numpy array of float32, got list"),
        (lambda _: [[raw(np.zeros(3, np.float32), np.ones(3))] * 2], "g/0: keep_T must be a numpy array of bool"),
        (
            lambda _: [[Credit.uniform(FIRST, 1), raw(np.array([0, np.nan, 0], np.float32), KEEP)]],
            "trajectory g/1: the advantage of action token 1 is nan",
        ),
    ],
)
def test_what_a_scheme_returns_is_checked_in_its_name(
    assign: Callable[[Sequence[TrajectoryGroup]], Any], message: str
) -> None:
    with pytest.raises(CreditError, match=f"^credit scheme Stranger: .*{message}"):
        assign_credit(scheme_of(assign), [GROUP])


@pytest.mark.parametrize("stop", [StopReason.ENV_ERROR, StopReason.ENGINE_ERROR])
def test_failed_trajectories_are_hidden_from_the_scheme_and_come_back_excluded(stop: StopReason) -> None:
    seen: list[list[str]] = []

    def assign(groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        seen.extend([t.trajectory_id for t in group.trajectories] for group in groups)
        return by_reward(groups)

    lost = failed(failed(make_group([[1], [2]], group_id="lost"), 0, stop), 1, stop)
    part, none = assign_credit(scheme_of(assign), [failed(GROUP, 0, stop), lost])
    assert seen == [["g/1"]]
    assert [credit.keep_T.tolist() for credit in part] == [[False] * 3, [True] * 3]
    assert part[1].advantages_T.tolist() == [0.5] * 3
    assert [credit.keep_T.tolist() for credit in none] == [[False], [False]]


@each("stop", [s for s in StopReason if not s.failed])
def test_episodes_that_met_a_limit_are_credited_like_any_other(stop: StopReason) -> None:
    [[first, _]] = assign_credit(scheme_of(by_reward), [failed(GROUP, 0, stop)])
    assert first.keep_T.all()
    assert first.advantages_T.tolist() == [1] * 3


def test_groups_whose_ids_are_not_unique_or_do_not_agree_are_refused() -> None:
    with pytest.raises(CreditError, match="group g is there twice: its trajectories belong together"):
        assign_credit(scheme_of(by_reward), [GROUP, GROUP])
    twice = replace(GROUP, trajectories=GROUP.trajectories[:1] * 2)
    with pytest.raises(CreditError, match="trajectory g/0 of group g is there twice"):
        assign_credit(scheme_of(by_reward), [twice])
    other = replace(GROUP, group_id="h")
    with pytest.raises(CreditError, match="trajectory g/0 of group h has group_id 'g'"):
        assign_credit(scheme_of(by_reward), [other])


def test_a_reward_that_is_no_number_is_named_before_it_spoils_the_group() -> None:
    group = make_group([[0, 1], [0, float("nan")]])
    with pytest.raises(CreditError, match="trajectory g/1 of group g, turn 1: the reward is nan"):
        assign_credit(scheme_of(by_reward), [group])
    [[first, second]] = assign_credit(scheme_of(by_reward), [failed(group, 1)])
    assert first.keep_T.all()
    assert not second.keep_T.any()
    spoilt = replace(
        GROUP.trajectories[1], turns=(replace(GROUP.trajectories[1].turns[0], reward=cast("float", None)),)
    )
    group = replace(GROUP, trajectories=(GROUP.trajectories[0], spoilt))
    with pytest.raises(CreditError, match="trajectory g/1 of group g, turn 0: the reward is None, not a finite number"):
        assign_credit(scheme_of(by_reward), [group])


def test_a_turn_without_a_token_is_refused_and_a_trajectory_without_a_turn_gets_no_credit() -> None:
    with pytest.raises(CreditError, match="trajectory g/1 of group g, turn 0: no token was sampled"):
        assign_credit(scheme_of(by_reward), [make_group([[1], [1]], action_lengths=[[1], [0]])])
    [[first, second]] = assign_credit(scheme_of(by_reward), [make_group([[1], []])])
    assert first.keep_T.all()
    assert second.keep_T.size == 0


def test_load_credit_builds_the_scheme_by_name_and_by_module() -> None:
    for name in ("turn_return", "agentrl_credit.turn_return:TurnReturn"):
        scheme = load_credit({"scheme": name, "gamma": 0.5})
        assert type(scheme).__name__ == "TurnReturn"
        assert scheme.model_dump()["gamma"] == 0.5


@each(
    ("spec", "message"),
    [
        ({"scheme": "unifrom"}, r"^credit\.scheme: no 'unifrom' is installed\. Did you mean 'uniform'\?"),
        ({"scheme": "uniform", "normalise": "std"}, r"^credit\.normalise: .* Did you mean 'normalize'\?"),
        (
            {"scheme": "uniform", 1: "std"},
            r"^credit\.1: 'uniform' has no such option\. Known: ddof, eps, lone, normalize",
        ),
        ({"scheme": "uniform", "normalize": "sd"}, r"^credit\.normalize: .* \(got 'sd'\)$"),
        ({"scheme": "turn_return", "gamma": 2}, r"^credit\.gamma: .* less than or equal to 1 \(got 2\)$"),
        ("gigpo", r"^credit: str 'gigpo' is no section; give \{'scheme': NAME\}, and its fields$"),
        ({}, r"^credit\.scheme: expected the name of a credit scheme, got None"),
        ({"scheme": "agentrl.types:Turn"}, r"^credit\.scheme: .*not a subclass of agentrl\.credit\.CreditScheme"),
        ({"scheme": f"{__name__}:Unfinished"}, r"^credit\.scheme: .*:Unfinished' does not define assign$"),
        ({"scheme": "agentrl.credit:CreditSchema"}, r"^credit\.scheme: .* Did you mean 'CreditScheme'\?"),
    ],
)
def test_load_credit_names_the_field_and_the_fix(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_credit(spec)


@each("name", ["bilevel_gae", "difference", "entropy_modulated", "hgpo", "hindsight", "mt_grpo", "token_residual"])
def test_a_scheme_that_was_removed_is_named_with_what_comes_nearest(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^credit\.scheme: '{name}' was removed: .* Nearest to it is '(\w+)', or"
    ) as caught:
        load_credit({"scheme": name})
    nearest = str(caught.value).partition("Nearest to it is '")[2].partition("'")[0]
    load_credit({"scheme": nearest})


def test_load_credit_reports_every_impossible_value_under_the_given_field() -> None:
    with pytest.raises(ConfigError) as caught:
        load_credit({"scheme": "uniform", "eps": 0, "ddof": 3}, field="train.credit")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["train.credit.ddof", "train.credit.eps"]


def test_make_group_fills_keys_values_and_ids() -> None:
    group = make_group(
        [[0, 1], [2]], state_keys=[["A", "B"], ["A"]], action_keys=[["x", "y"], ["x"]], action_lengths=[[2, 3], [1]],
        observation_lengths=[[4, 0], [4]], values=[[0.1, 0.2], [0.3]], group_id="task-7",
    )  # fmt: skip
    first, second = group.trajectories
    assert [t.trajectory_id for t in group.trajectories] == ["task-7/0", "task-7/1"]
    assert {t.group_id for t in group.trajectories} == {"task-7"}
    assert [t.reward for t in group.trajectories] == [1, 2]
    assert [(t.state_key, t.next_state_key, t.action_key) for t in first.turns] == [("A", "B", "x"), ("B", None, "y")]
    assert [len(t.action_ids) for t in first.turns] == [2, 3]
    assert [len(t.observation_ids) for t in first.turns] == [4, 0]
    assert [t.signals["values"] for t in first.turns] == [
        (0.1, 0.1),
        (0.2, 0.2, 0.2),
    ]  # one number stands for all tokens
    assert first.turns[0].observation_ids == second.turns[0].observation_ids
    assert all(p < 0 for t in first.turns for p in t.behavior_logprobs)
    assert first.stop_reason is StopReason.TERMINATED


def test_make_group_names_the_argument_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"^state_keys: .* of lengths \[2, 1\] as in rewards, got lengths \[1, 1\]"):
        make_group([[0, 1], [2]], state_keys=[["A"], ["A"]])


def test_make_group_fills_any_other_field_of_a_turn() -> None:
    group = make_group([[0, 1]], action_lengths=[[2, 1]], teacher_logprobs=[[(-1, -2), -3]], turn_scores=[[0.5, None]])
    first, second = group.trajectories[0].turns
    assert [turn.signals["teacher_logprobs"] for turn in (first, second)] == [(-1, -2), (-3,)]
    assert (first.signals["turn_scores"], second.signals.get("turn_scores")) == (0.5, None)
    with pytest.raises(ValueError, match=r"^turn_score: a turn has no such field. Did you mean 'turn_scores'"):
        make_group([[0]], turn_score=[[1]])


def test_what_a_scheme_raises_is_told_in_its_name_with_the_line() -> None:
    scheme = scheme_of(lambda groups: {"a": 1}[groups[0].group_id])
    with pytest.raises(
        CreditError, match=r"^credit scheme Stranger raised KeyError: '.*' \(.*test_credit\.py, line \d+\)$"
    ):
        assign_credit(scheme, [GROUP])
    scheme = scheme_of(lambda groups: np.stack([]))  # a line of numpy's, which is not where to look
    with pytest.raises(CreditError, match=r"raised ValueError: .* \(.*test_credit\.py, line \d+\)$"):
        assign_credit(scheme, [GROUP])
    within = load_credit({"scheme": "shuffled", "of": {"scheme": f"{__name__}:Fails"}})
    with pytest.raises(
        CreditError, match=r"^credit scheme Shuffled raised ValueError: .* \(.*test_credit\.py, line \d+\)$"
    ):
        assign_credit(within, [GROUP])


class Fails(CreditScheme):
    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        np.stack([])
        return []
