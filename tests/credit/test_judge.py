from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import Need, TrajectoryGroup, assign_credit, load_credit
from agentrl.errors import ConfigError, CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.judge import Judge
from agentrl_credit.turn_return import TurnReturn
from tests.support.credit import Rows, assert_close, batches, by_token, by_turn, eighths, mean, to_go, without
from tests.support.each import each
from tests.support.tiers import first_quick

SCORED = make_group([[0, 1], [0.5]], turn_scores=[[0.25, -0.5], [1]], state_keys=[["A", "B"], ["A"]])


@each(
    ("fields", "expected"),
    [
        # Rewards .25, .5 and 1.5: G .75, .5 and 1.5, less the mean of the other's.
        ({}, [[-0.75, -1], [1.5 - 0.625]]),
        # Rewards .5, 0 and 2.5.
        ({"score_weight": 2.0}, [[0.5 - 2.5, -2.5], [2.5 - 0.25]]),
        ({"score_weight": 0.0}, [[1 - 0.5, 1 - 0.5], [0.5 - 1]]),
        # A judge of what is to be avoided: rewards -.25, 1.5 and -.5.
        ({"score_weight": -1.0}, [[1.25 + 0.5, 1.5 + 0.5], [-0.5 - 1.375]]),
        # The returns .75 and 1.5, at every turn.
        ({"then": {"scheme": "uniform", "normalize": "none"}}, [[-0.375, -0.375], [0.375]]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: Rows) -> None:
    assert by_turn(Judge(**fields), SCORED) == [expected]


@pytest.mark.parametrize(
    "then", first_quick([{"scheme": "turn_return"}, {"scheme": "turn_return", "gamma": 0.5}, {"scheme": "gigpo"}])
)
@pytest.mark.parametrize("score_weight", first_quick([1.0, -0.5]))
def test_it_passes_the_conformance_check(then: dict[str, Any], score_weight: float) -> None:
    check_credit(
        Judge(then=then, score_weight=score_weight),
        relative=False,
        reads_turn_rewards=True,
        scale_equivariant=True,
        options={"then": [{"scheme": "uniform"}]},
    )


def slow_reference(scheme: Judge, group: TrajectoryGroup) -> Rows:
    """The default scheme on the rewards: G less the mean of G over all turns of the others."""
    returns = []
    for trajectory in group.trajectories:
        scores = [turn.signals["turn_scores"] for turn in trajectory.turns]
        rewards = [turn.reward for turn in trajectory.turns]
        judged = [reward + scheme.score_weight * score for reward, score in zip(rewards, scores, strict=True)]
        returns.append(to_go(judged, 1.0))
    rows = []
    for i, row in enumerate(returns):
        others = [g for j, other in enumerate(returns) for g in other if j != i]
        rows.append([g - mean(others) if others else 0.0 for g in row])
    return rows


@settings(max_examples=40, deadline=None)
@given(groups=batches(turn_scores=eighths), score_weight=st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], score_weight: float) -> None:
    scheme = Judge(score_weight=score_weight, then={"scheme": "turn_return", "lone": "keep"})
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


@each("then", ["turn_return", "uniform", "gigpo", "group_gae"])
def test_the_credit_is_that_of_the_next_scheme_on_scores_plus_rewards(then: str) -> None:
    summed = make_group([[0 + 0.25, 1 - 0.5], [0.5 + 1]], state_keys=[["A", "B"], ["A"]])
    assert by_turn(Judge(then={"scheme": then}), SCORED) == by_turn(load_credit({"scheme": then}), summed)


def test_without_weight_the_judge_plays_no_part() -> None:
    assert by_turn(Judge(score_weight=0), SCORED) == by_turn(TurnReturn(), SCORED)


def test_options_of_the_next_scheme_reach_it() -> None:
    summed = make_group([[0.25, 0.5], [1.5]])
    found = by_turn(Judge(then={"scheme": "turn_return", "gamma": 0.5, "baseline": "turn"}), SCORED)
    assert found == by_turn(TurnReturn(gamma=0.5, baseline="turn"), summed)


def test_judges_can_be_stacked() -> None:
    group = make_group([[0, 1], [2, 0]], turn_scores=[[1, 1], [0, 3]], action_lengths=[[2, 2], [1, 3]])
    then = {"scheme": "uniform", "normalize": "none"}
    twice = by_token(Judge(then={"scheme": "judge", "then": then}), group)
    assert twice == by_token(Judge(then=then, score_weight=2.0), group) != by_token(Judge(then=then), group)


@pytest.mark.parametrize("scheme", ["judge", "redistribute"])
def test_a_scheme_that_reads_no_rewards_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"^credit\.then: 'distill' reads no rewards; choose a scheme that does"):
        load_credit({"scheme": scheme, "then": {"scheme": "distill"}})


@each("then", [{"scheme": "turn_gae"}, {"scheme": "shuffled", "of": {"scheme": "turn_gae"}}])
@each("scheme", ["judge", "redistribute"])
def test_a_critic_which_learns_the_environments_rewards_is_refused(scheme: str, then: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"'{then['scheme']}' reads a critic, which learns the environment's rewards"
    ):
        load_credit({"scheme": scheme, "then": then})


@each("scheme", ["judge", "redistribute"])
def test_forks_which_earned_the_environments_rewards_are_refused(scheme: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^credit\.then: 'tree' reads what forks earned, which are the environment's"
    ):
        load_credit({"scheme": scheme, "then": {"scheme": "tree"}})


def test_a_fallback_belongs_to_the_outer_scheme() -> None:
    with pytest.raises(ConfigError, match=r"credit\.then\.fallback: it belongs to the outer scheme"):
        load_credit({"scheme": "judge", "then": {"scheme": "gigpo", "fallback": "uniform"}})


def test_requirements_are_the_scores_and_those_of_the_next_scheme_but_for_turn_rewards() -> None:
    assert TurnReturn().requirements() == {Need.TURN_REWARDS}
    assert Judge().requirements() == {Need.TURN_SCORES}
    assert Judge(then={"scheme": "gigpo"}).requirements() == {Need.TURN_SCORES, Need.STATE_KEYS}
    by_state = {"scheme": "turn_return", "baseline": "state"}
    assert Judge(then=by_state).requirements() == {Need.TURN_SCORES, Need.STATE_KEYS}
    nested = {"scheme": "shuffled", "of": {"scheme": "action_values"}}
    assert Judge(then=nested).requirements() == {Need.TURN_SCORES, Need.STATE_KEYS, Need.ACTION_KEYS}


def test_a_missing_score_is_named_by_trajectory_and_turn() -> None:
    with pytest.raises(CreditError, match=r"trajectory g/0, turn 1: no turn_scores, which this scheme needs"):
        assign_credit(Judge(), [without(SCORED, 0, 1, "turn_scores")])


def test_a_score_of_zero_is_a_score() -> None:
    group = make_group([[1], [0]], turn_scores=[[0], [0]])
    assert by_turn(Judge(), group) == by_turn(TurnReturn(), group)


@each(
    ("then", "message"),
    [
        ({"scheme": "gigop"}, r"^credit\.then\.scheme: no 'gigop' is installed\. Did you mean 'gigpo'"),
        (
            {"scheme": "gigpo", "step_wieght": 1},
            r"^credit\.then\.step_wieght: 'gigpo' has no such option\. .*'step_weight'",
        ),
        (
            {"scheme": "judge", "then": {"scheme": "gigop"}},
            r"^credit\.then\.then\.scheme: no 'gigop' is installed",
        ),
    ],
)
def test_an_impossible_next_scheme_is_refused_when_the_recipe_is_read(then: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_credit({"scheme": "judge", "then": then})


@each("fields", [{"score_weight": float("nan")}, {"then": "gigpo"}, {"lone": "keep"}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Judge.model_validate(fields)
