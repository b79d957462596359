import asyncio
import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import ConfigError, StopReason
from agentrl.learn.rewarding import reward_groups
from agentrl.report.records import read_records
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group_rewards import GroupReward, overlong_tokens, shorter
from agentrl.testing import make_group
from agentrl.types import Message
from tests.support.each import each
from tests.support.runs import recipe, train
from tests.support.threads import hang

HERE = "tests.rollout.test_group_rewards"


def rank(rewards: list[float], *, step: float = 1.0) -> list[float]:
    return [step * sorted(rewards).index(reward) for reward in rewards]


def undecided(rewards: list[float]) -> list[float | None]:
    return [1.0, None]


def too_few(num_tokens: list[int]) -> list[float]:
    return [1.0]


def fails(completions: list[str]) -> list[float]:
    raise RuntimeError("no idea")


def leaves(completions: list[str]) -> list[float]:
    raise SystemExit(3)


def hangs(completions: list[str]) -> list[float]:
    hang()
    return []


async def later(rewards: list[float]) -> list[float]:
    await asyncio.sleep(0.01)
    return [2 * reward for reward in rewards]


async def never(rewards: list[float]) -> list[float]:
    await asyncio.sleep(3600)
    return rewards


def never_ends(completions: list[str]) -> Iterator[float]:
    return itertools.repeat(1.0)


def much(completions: list[str]) -> list[float]:
    return [1e300] * len(completions)


def rewrites(messages: list[list[Message]], rewards: list[float], *, names: list[str]) -> list[float]:
    amounts = [0.0 if names else 1.0 for _ in rewards]
    for said in messages:
        for message in said:
            message["content"] = "rewritten"
    rewards.clear()
    names.clear()
    return amounts


def nothing(words: list[str]) -> list[float]:
    return [0.0]


def test_numbers_are_added_to_the_last_turn_with_their_weight_and_their_name() -> None:
    group = make_group([[1.0, 0.0], [0.0, 3.0], [5.0]])
    lost = replace(group.trajectories[2], stop_reason=StopReason.ENV_ERROR)
    group = replace(group, trajectories=(*group.trajectories[:2], lost))
    rewards = [GroupReward(reward=f"{HERE}:rank", weight=0.5, options={"step": 4.0})]
    (found,) = reward_groups([group], rewards, timeout_s=60)
    # Of the two that did not fail, the second has earned more: rank 1, four a step, half of it.
    assert [[turn.reward for turn in t.turns] for t in found.trajectories] == [[1, 0], [0, 5], [5]]
    assert found.trajectories[1].turns[-1].extras["reward_components"] == {"rank": 2.0}
    assert found.trajectories[2] is lost
    assert reward_groups([group], [], timeout_s=60) == [group]


def test_the_length_of_siblings_is_compared_as_the_paper_has_it() -> None:
    # 10 to 30 tokens: 0.5 - (n - 10) / 20; only a success is paid for being short.
    assert shorter([10, 20, 30, 10], [True, True, True, False]) == [0.5, 0.0, -0.5, 0.0]
    assert shorter([30, 10], [False, True]) == [-0.5, 0.5]
    assert shorter([7, 7], [True, False]) == [0, 0]


def test_the_punishment_of_length_counts_tokens() -> None:
    assert overlong_tokens([12, 13, 14, 16, 99], max_length=16, buffer=4) == [0, -0.25, -0.5, -1, -1]
    with pytest.raises(ConfigError, match="buffer: 400 is more than max_length: 100; lower it"):
        overlong_tokens([1], max_length=100, buffer=400)


@each(
    ("given", "words"),
    [
        ({"reward": "short"}, "no 'short' is installed"),
        ({"reward": "os:system"}, "'os:system' takes none of completions"),
        ({"reward": f"{HERE}:nothing"}, "nothing' takes none of completions"),
        ({"reward": "overlong_tokens"}, "asks for 'max_length'; set it in its options"),
        ({"reward": "shorter", "options": {"x": 1}}, "'shorter' has no option 'x'. It has none."),
        (
            {"reward": "overlong_tokens", "options": {"max_length": 400, "buffer": 0}},
            "buffer: Input should be greater than 0, got int 0",
        ),
        (
            {"reward": "overlong_tokens", "options": {"max_length": 100, "buffer": 400}},
            "overlong_tokens: buffer: 400 is more than max_length: 100",
        ),
        ({"reward": "shorter", "weight": float("nan")}, "finite"),
    ],
)
def test_what_is_no_reward_of_groups_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RolloutConfig.model_validate({"group_rewards": [given]})


def by_array(rewards: list[float], scale: np.ndarray) -> list[float]:
    return [reward * scale[0] for reward in rewards]


def test_an_option_may_be_annotated_with_any_class() -> None:
    reward = GroupReward(reward=f"{HERE}:by_array", options={"scale": [2, 3]})
    assert reward.function().keywords == {"scale": [2, 3]}


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="group_rewards: two have one name"):
        RolloutConfig.model_validate({"group_rewards": [{"reward": "shorter"}] * 2})


@each(
    ("name", "words"),
    [
        ("too_few", "return a finite number for each of 2"),
        ("undecided", r"returned list \[1.0, None\]; return a finite number for each of 2"),
        ("fails", r"raised RuntimeError: no idea \(test_group_rewards.py:"),
        ("leaves", r"raised SystemExit: 3 \(test_group_rewards.py:"),
        ("never_ends", "returned repeat .*; return a finite number for each of 2"),
        ("much", r"returned list \[1e.300, 1e.300\]; return a finite number for each of 2 episodes, at most 1e.15"),
    ],
)
def test_what_a_function_gets_wrong_is_told(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        reward_groups([make_group([[0.0], [1.0]])], [GroupReward(reward=f"{HERE}:{name}")], timeout_s=60)


def test_a_function_that_hangs_is_given_up_at_its_deadline() -> None:
    with pytest.raises(ConfigError, match=r"hangs' did not return within rollout.env_timeout_s: 0.5 s"):
        reward_groups([make_group([[0.0]])], [GroupReward(reward=f"{HERE}:hangs")], timeout_s=0.5)


def test_a_coroutine_is_run_and_has_the_deadline_too() -> None:
    group = make_group([[1.0], [3.0]])
    (found,) = reward_groups([group], [GroupReward(reward=f"{HERE}:later")], timeout_s=60)
    assert [t.reward for t in found.trajectories] == [3.0, 9.0]
    with pytest.raises(ConfigError, match=r"never'.* 0.5 s"):
        reward_groups([group], [GroupReward(reward=f"{HERE}:never")], timeout_s=0.5)


def test_a_function_gets_copies() -> None:
    group = make_group([[0.0], [1.0]])
    before = copy.deepcopy(group)
    given = GroupReward(reward=f"{HERE}:rewrites", options={"names": ["a"]})
    found = reward_groups([group, group], [given], timeout_s=60)
    assert group == before
    assert [[t.reward for t in one.trajectories] for one in found] == [[0.0, 1.0]] * 2


def test_a_run_trains_on_them_and_tells_of_them(tmp_path: Path) -> None:
    given = [{"reward": f"{HERE}:by_place", "weight": 0.5}]
    folder, rows = train(recipe(tmp_path, rollout={"group_rewards": given}, train={"steps": 1}))
    assert rows[1]["reward/by_place"] == pytest.approx(0.25)  # of two episodes: 0 and 1, half of it
    assert rows[1]["reward/mean"] >= 0.25 - 1e-9
    assert "eval/reward/by_place" not in rows[1]
    (path,) = folder.rollouts()
    records = list(read_records(path))
    assert [record.turns[-1].extras["reward_components"]["by_place"] for record in records] == [0, 0.5] * 2
    assert len({advantage for record in records for turn in record.turns for advantage in turn.advantages}) >= 2


def by_place(num_tokens: list[int]) -> list[float]:
    return [float(place) for place in range(len(num_tokens))]
