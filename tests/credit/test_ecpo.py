import math
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import ConfigError, Need, TrajectoryGroup, assign_credit, load_credit
from agentrl.errors import CreditError
from agentrl.testing.check_credit import check_credit
from agentrl.testing.groups import make_group
from agentrl_credit.ecpo import ECPO
from tests.support.credit import (
    Rows,
    assert_close,
    batches,
    by_turn,
    discounts,
    norms,
    rewards_of,
    spread,
    to_go,
    without,
)
from tests.support.each import each
from tests.support.tiers import first_quick

# In S, x is followed by 3, 3 and 0, y by 0.
FOUR = make_group([[3], [3], [0], [0]], state_keys=[["S"]] * 4, action_keys=[["x"], ["x"], ["x"], ["y"]])
EXACT = {"gamma": 1, "eps": 1e-12}


@each(
    ("fields", "expected"),
    [
        # The episode term: 3, 3, 0, 0 less 1.5, over sd1 1.732051: .866025.
        ({"step_weight": 0}, [0.866025, 0.866025, -0.866025, -0.866025]),
        # m 1.5, sd1 1.732051. Q(x) = (3 * 2 + 2 * 1.5) / 5 = 1.8, Q(y) = (0 + 2 * 1.5) / 3 = 1: .173205 and -.288675.
        # Between (3 * .5^2 + 1.5^2) / 4 = .75, within (1 + 1 + 4) / 4 = 1.5: a third, times tanh(4 / 4) = .761594: .253865.
        ({}, [0.909996, 0.909996, -0.822055, -0.93931]),
        # Many visits: the third alone.
        ({"tau": 1e-3}, [0.92376, 0.92376, -0.80829, -0.96225]),
        ({"tau": 1e-3, "step_weight": 3}, [1.03923, 1.03923, -0.69282, -1.154701]),
        # sd0 1.5
        ({"ddof": 0}, [1.050773, 1.050773, -0.949227, -1.084622]),
    ],
)
def test_reference_numbers(fields: dict[str, Any], expected: list[float]) -> None:
    [found] = by_turn(ECPO(**EXACT | fields), FOUR)
    assert_close(found, [[a] for a in expected])


def test_chance_after_a_rare_action_is_shrunk() -> None:
    # y once and x three times: Q keeps 1 / 3 of what followed y, 3 / 5 of what followed x, whose returns are .75 off.
    group = make_group([[0], [0], [0], [3]], state_keys=[["S"]] * 4, action_keys=[["x"], ["x"], ["x"], ["y"]])

    def steps(kappa: float) -> list[float]:
        scheme = EXACT | {"kappa": kappa, "tau": 1e-3}
        whole, episode = (by_turn(ECPO(**scheme, step_weight=weight), group)[0] for weight in (1, 0))
        return [a[0] - b[0] for a, b in zip(whole, episode, strict=True)]

    # sd1 1.5; nothing varies within an action
    assert steps(0) == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-5)
    assert steps(2) == pytest.approx([-0.3, -0.3, -0.3, 0.5], rel=1e-5)


@pytest.mark.parametrize(
    "fields", first_quick([{}, {"gamma": 0.5}, {"kappa": 0}, {"ddof": 0}, {"lone": "keep"}, {"lone": "drop"}])
)
def test_it_passes_the_conformance_check(fields: dict[str, Any]) -> None:
    check_credit(ECPO(**fields), outcome_level=False)


def slow_reference(scheme: ECPO, group: TrajectoryGroup) -> Rows:
    """Compute the same with plain loops over the visits to each state."""
    if len(group.trajectories) == 1:
        return [[0.0] * len(group.trajectories[0].turns)]
    totals = [sum(rewards_of(t)) for t in group.trajectories]
    episode = norms([0] * len(totals), totals, scheme)
    returns = list(chain.from_iterable(to_go(rewards_of(t), scheme.gamma) for t in group.trajectories))
    turns = [turn for t in group.trajectories for turn in t.turns]
    visits: dict[Any, list[int]] = {}
    for n, turn in enumerate(turns):
        visits.setdefault(turn.state_key, []).append(n)
    steps = [0.0] * len(turns)
    for here in visits.values():
        at_state = [returns[n] for n in here]
        if max(at_state) - min(at_state) <= 1e-12 * max(map(abs, at_state)):
            continue
        mu = math.fsum(at_state) / len(here)
        after = {
            turns[n].action_key: [returns[m] for m in here if turns[m].action_key == turns[n].action_key] for n in here
        }
        mean = {action: math.fsum(found) / len(found) for action, found in after.items()}
        calibrated = [
            (math.fsum(after[turns[n].action_key]) + scheme.kappa * mu)
            / (len(after[turns[n].action_key]) + scheme.kappa)
            for n in here
        ]
        between = math.fsum((mean[turns[n].action_key] - mu) ** 2 for n in here) / len(here)
        within = math.fsum((returns[n] - mean[turns[n].action_key]) ** 2 for n in here) / len(here)
        gate = math.tanh(len(here) / scheme.tau) * between / (between + within + scheme.eps)
        for n, value in zip(here, calibrated, strict=True):
            steps[n] = gate * (value - mu) / (spread(at_state, scheme.ddof) + scheme.eps)
    rest = iter(steps)
    return [
        [outcome + scheme.step_weight * next(rest) for _ in t.turns]
        for outcome, t in zip(episode, group.trajectories, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    groups=batches(),
    gamma=discounts,
    step_weight=st.sampled_from([0.0, 0.5, 1.0]),
    kappa=st.sampled_from([0.0, 0.5, 2.0]),
    tau=st.sampled_from([0.5, 4.0]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-3, 0.5]),
)
def test_agrees_with_a_slow_reference(groups: list[TrajectoryGroup], **fields: Any) -> None:
    scheme = ECPO(**fields, lone="keep")
    for group, found in zip(groups, by_turn(scheme, *groups), strict=True):
        assert_close(found, slow_reference(scheme, group))


def test_a_state_with_one_action_or_one_end_has_the_episode_term_alone() -> None:
    # S was left by x alone; the visits to T all ended alike, but for rounding.
    group = make_group(
        [[3, 0.1 + 0.2], [0, 0.3], [7, 0.3]],
        state_keys=[["S", "T"]] * 3,
        action_keys=[["x", "x"], ["x", "y"], ["x", "x"]],
    )
    [found], [episode] = by_turn(ECPO(), group), by_turn(ECPO(step_weight=0), group)
    assert found == episode
    assert all(row[0] == row[1] != 0 for row in found)


@pytest.mark.parametrize(("field", "words"), [("state_key", "state key"), ("action_key", "action key")])
def test_a_missing_key_is_named_by_trajectory_and_turn(field: str, words: str) -> None:
    with pytest.raises(CreditError, match=rf"trajectory g/2, turn 0: no {words}, which this scheme needs"):
        assign_credit(ECPO(), [without(FOUR, 2, 0, field)])
    assert ECPO().requirements() == {Need.STATE_KEYS, Need.ACTION_KEYS}


@each("fields", [{"gamma": 2}, {"kappa": -1}, {"tau": 0}, {"step_weight": float("inf")}, {"eps": 0}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ECPO.model_validate(fields)


@each("field", ["lam", "shrinkage", "gate"])
def test_a_recipe_for_the_scheme_that_once_had_the_name_is_told_todays(field: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^credit\.{field}: 'ecpo' has no such option: .* scheme: action_values, gamma: "
    ):
        load_credit({"scheme": "ecpo", field: 0.5})
