from dataclasses import replace

import numpy as np
import pytest

from agentrl import ConfigError, Credit, assign_credit, load_credit
from agentrl.errors import CheckError
from agentrl.testing import check_credit, make_group
from agentrl_credit.shuffled import Shuffled

TURNS = {"scheme": "turn_return"}
GROUP = make_group(
    [[0.0, 1.0, 5.0], [2.0, 0.0], [0.5, 0.25, 0.125, 3.0]], action_lengths=[[1, 2, 3], [2, 2], [3, 1, 1, 2]]
)


def of_turns(credit: Credit, lengths: list[int]) -> list[float]:
    starts = np.cumsum([0, *lengths[:-1]])
    return [float(value) for value in credit.advantages_T[starts]]


def lengths() -> list[list[int]]:
    return [[len(turn.action_ids) for turn in t.turns] for t in GROUP.trajectories]


def test_turns_trade_advantages_within_their_trajectory() -> None:
    [expected] = assign_credit(Shuffled(of=TURNS).inner(), [GROUP])
    moved = 0
    for seed in range(20):
        [found] = assign_credit(Shuffled(of=TURNS, seed=seed), [GROUP])
        for credit, before, of in zip(found, expected, lengths(), strict=True):
            assert sorted(of_turns(credit, of)) == pytest.approx(sorted(of_turns(before, of)), abs=1e-6)
            moved += of_turns(credit, of) != of_turns(before, of)
    assert moved > 30, "of 60, where chance leaves a sixth of three turns in place, half of two, 1 in 24 of four"


def test_every_place_earns_the_mean_of_all() -> None:
    [expected] = assign_credit(Shuffled(of=TURNS).inner(), [GROUP])
    of = lengths()[0]
    draws = [of_turns(assign_credit(Shuffled(of=TURNS, seed=seed), [GROUP])[0][0], of) for seed in range(600)]
    spread = np.std(of_turns(expected[0], of))
    assert np.mean(draws, axis=0) == pytest.approx([np.mean(of_turns(expected[0], of))] * 3, abs=4 * spread / 600**0.5)


def test_a_scheme_of_trajectories_within_another_is_one_of_trajectories() -> None:
    of = {"scheme": "judge", "then": {"scheme": "uniform"}}
    with pytest.raises(ConfigError, match=r"credit\.among: turns changes nothing of 'judge'"):
        load_credit({"scheme": "shuffled", "of": of, "among": "turns"})
    group = make_group([[1.0, 0.0], [2.0, 1.0], [4.0, 0.0]], turn_scores=[[0, 0]] * 3)
    [before] = assign_credit(load_credit(of), [group])
    drawn = [assign_credit(Shuffled(of=of, seed=seed), [group])[0] for seed in range(20)]
    firsts = {tuple(credit.advantages_T[0] for credit in row) for row in drawn}
    assert len(firsts) > 1
    assert all(sorted(row) == sorted(credit.advantages_T[0] for credit in before) for row in firsts)
    assert load_credit({"scheme": "judge", "then": {"scheme": "turn_return"}}).finest() == "turn"


def test_trajectories_trade_advantages_within_their_group() -> None:
    groups = [make_group([[1.0], [2.0], [4.0], [9.0]], group_id=name) for name in "abcdef"]
    plain = assign_credit(Shuffled().inner(), groups)
    found = assign_credit(Shuffled(), groups)
    for row, before in zip(found, plain, strict=True):
        assert sorted(c.advantages_T[0] for c in row) == pytest.approx(sorted(c.advantages_T[0] for c in before))
    orders = {tuple(np.argsort([credit.advantages_T[0] for credit in row])) for row in found}
    assert len(orders) > 2, "each group has an order of its own"


def test_what_stays_out_of_the_loss_is_not_dealt_out() -> None:
    alone = make_group([[1.0, 2.0]], group_id="alone")
    scheme = Shuffled(of={**TURNS, "lone": "drop"}, among="trajectories")
    [[dropped], row] = assign_credit(scheme, [alone, GROUP])
    assert not dropped.keep_T.any()
    assert all(credit.keep_T.all() for credit in row)


def test_the_order_of_trajectories_is_nothing_to_it() -> None:
    turned = replace(GROUP, trajectories=GROUP.trajectories[::-1])
    for among in ("turns", "trajectories"):
        scheme = Shuffled.model_validate({"of": TURNS, "among": among})
        [row], [again] = assign_credit(scheme, [GROUP]), assign_credit(scheme, [turned])
        for credit, same in zip(row, again[::-1], strict=True):
            np.testing.assert_array_equal(credit.advantages_T, same.advantages_T)


def test_permuting_turns_of_a_scheme_that_credits_whole_trajectories_is_refused() -> None:
    with pytest.raises(ValueError, match="set it to trajectories"):
        Shuffled(among="turns")
    with pytest.raises(ConfigError, match="nonsense"):
        load_credit({"scheme": "shuffled", "of": {"scheme": "nonsense"}})


def test_it_keeps_the_contract_but_that_chance_follows_names() -> None:
    with pytest.raises(CheckError) as error:
        check_credit(Shuffled(of=TURNS), options={"of": [{**TURNS, "gamma": 0.5}], "among": ["trajectories"]})
    problems = str(error.value).splitlines()[1:]
    assert len(problems) == 1, problems
    assert "names of groups and trajectories change the credit" in problems[0]
