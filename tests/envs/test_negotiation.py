from typing import Any

import numpy as np
import pytest

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl_envs.negotiation import STRATEGIES, Negotiation, deals
from tests.support.each import each


def against(strategy: Any, **options: Any) -> Negotiation:
    """Two issues of three levels: 80 and 20 points for us, 30 and 70 for the other, who asks for 40 of them at the end."""
    env = Negotiation(num_issues=2, num_levels=3, num_rounds=4, strategy=strategy, **options)
    env.reset(seed=0)
    env.weights_A, env.others_A, env.least = np.array([80.0, 20.0]), np.array([30.0, 70.0]), 0.4
    return env


def offer(*levels: int) -> Any:
    return tool_call("offer", levels=list(levels))


def said(env: Negotiation, action: Any) -> tuple[str, float, bool]:
    observation, reward, terminated, _, _ = env.step(action)
    return observation[0]["content"], float(reward), terminated


def test_one_who_gives_way_with_time_takes_what_it_asks_for_now() -> None:
    env = against("steady")  # asks for 1, .8, .6, .4 of 100; (2, 0) leaves it 70, (2, 1) 35, (2, 2) nothing
    # Achievable: of the deals that leave it 40 or more, (2, 0) is worth most to us: 80.
    assert said(env, offer(2, 2)) == ("No. I offer [0, 0], 0 points for you. Round 2 of 4.", 0, False)
    text, reward, _ = said(env, offer(2, 0))  # 70 are less than 80; nearest: (1, 0), which leaves it 85
    assert text == "No. I offer [1, 0], 40 points for you. Round 3 of 4."
    assert reward == pytest.approx(0.2 * 40 / 80)
    text, reward, terminated = said(env, offer(2, 0))
    assert (text, reward, terminated) == ("Agreed: 80 points for you.", 1, True)


def test_one_who_mirrors_comes_as_far_as_it_is_met() -> None:
    env = against("mirror")
    assert said(env, offer(2, 2))[0] == "No. I offer [0, 0], 0 points for you. Round 2 of 4."
    assert said(env, offer(2, 1))[0] == "No. I offer [2, 0], 80 points for you. Round 3 of 4."  # 35 met: it asks for 65
    assert said(env, offer(2, 2))[0] == "No. I offer [2, 0], 80 points for you. Round 4 of 4."
    _, reward, terminated, _, info = env.step(tool_call("accept"))
    assert (reward, terminated, info["success"], info["score"]) == (1, True, True, 1)


def test_a_poor_agreement_is_no_success_and_none_is_worth_nothing() -> None:
    env = against("steady")
    assert said(env, tool_call("accept")) == ("There is no offer yet.", 0, False)
    _, reward, terminated, _, info = env.step(offer(0, 0))
    assert (reward, terminated, info["success"], info["score"]) == (0, True, False, 0)
    env = against("steady", turn_rewards=False)
    for _ in range(3):
        assert said(env, offer(2, 2))[1:] == (0, False)
    assert said(env, offer(2, 2)) == ("No. We do not agree.", 0, True)
    env = against("early")
    assert said(env, tool_call("quit")) == ("No deal.", 0, True)


@each("levels", [[], [1], [1, 1, 1], [-1, 0], [0, 3], [10**30, 0]])
def test_what_is_no_deal_costs_no_round(levels: list[int]) -> None:
    env = against("steady")
    assert said(env, tool_call("offer", levels=levels))[0] == "Give 2 levels from 0 to 2."
    assert env.round == 1


def test_the_achievable_gain_is_what_the_best_sequence_of_offers_reaches() -> None:
    """Tried out: every deal offered up to the end, and for one who mirrors every deal after every other."""
    for strategy in STRATEGIES:
        for seed in range(6):
            env = Negotiation(num_issues=2, num_levels=3, num_rounds=3, strategy=strategy)
            env.reset(seed=seed)
            best = env._achievable()[1]
            reached = []
            for first in deals(2, 3).tolist():
                for second in deals(2, 3).tolist():
                    moment = env.fork()
                    for levels in (first, second, second):
                        _, _, terminated, _, info = moment.step(offer(*levels))
                        if terminated:
                            break
                    reached.append(info["score"])
            assert max(reached) == pytest.approx(1.0)
            assert best > 0


def test_what_matters_most_to_one_matters_least_to_the_other() -> None:
    env = Negotiation(num_issues=5)
    for seed in range(50):
        env.reset(seed=seed)
        assert env.weights_A.sum() == env.others_A.sum() == 100
        assert min(env.weights_A.min(), env.others_A.min()) >= 5
        order = np.argsort(-env.weights_A, kind="stable")
        assert (np.diff(env.others_A[order]) >= 0).all()


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(UserError, match="num_levels: with one issue"):
        Negotiation(num_issues=1, num_levels=2)
    with pytest.raises(UserError, match="strategy: give steady, early, late, mirror or any, got 'kind'"):
        Negotiation(strategy="kind")  # type: ignore[arg-type]
