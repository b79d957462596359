from typing import Any

import numpy as np
import pytest

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl_envs.corridor import Corridor
from tests.support.each import each

RED, BLUE = {"door": "red"}, {"door": "blue"}


def corridor(**options: Any) -> Corridor:
    """Four rooms: a blue door behind the second, a red one behind the third; the keys lie in the first two."""
    env = Corridor(num_rooms=4, num_doors=2, **options)
    env.reset(seed=0)
    env.doors, env.keys, env.unpaid = {2: "blue", 3: "red"}, {"red": 1, "blue": 2}, {"red", "blue"}
    return env


def test_one_key_is_held_and_each_needed_one_pays_once() -> None:
    env = corridor()
    expected: list[tuple[Any, str, float]] = [
        ("Hello.", "Use a tool. Room 1. A red key. Holding nothing.", 0),
        (tool_call("take", key="blue"), "No blue key here. Room 1. A red key. Holding nothing.", 0),
        (tool_call("take", key="red"), "Room 1. Holding red.", 0.1),
        (tool_call("left"), "Room 1. Holding red.", 0),
        (tool_call("right"), "Room 2. A blue key. A blue door. Holding red.", 0),
        (tool_call("right"), "Locked. Room 2. A blue key. A blue door. Holding red.", 0),
        (tool_call("unlock", **RED), "No red door here. Room 2. A blue key. A blue door. Holding red.", 0),
        (tool_call("unlock", **BLUE), "No blue key. Room 2. A blue key. A blue door. Holding red.", 0),
        (tool_call("take", key="blue"), "Room 2. A red key. A blue door. Holding blue.", 0.1),
        (tool_call("unlock", **BLUE), "Room 2. A red key. Holding nothing.", 0.1),
        (tool_call("take", key="red"), "Room 2. Holding red.", 0),
        (tool_call("right"), "Room 3. A red door. Holding red.", 0),
        (tool_call("unlock", **RED), "Room 3. Holding nothing.", 0.1),
    ]
    for action, says, reward in expected:
        observation, got, terminated, _, _ = env.step(action)
        assert (observation[0]["content"], got, terminated) == (says, reward, False)
    _, reward, terminated, _, info = env.step(tool_call("right"))
    assert (reward, terminated, info["success"], env.state_key()) == (1.0, True, True, "4////")


def test_the_last_room_alone_pays_without_turn_rewards() -> None:
    env = corridor(turn_rewards=False)
    rewards = []
    for _ in range(20):
        _, reward, terminated, _, _ = env.step(env.oracle())
        rewards.append(reward)
        if terminated:
            break
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


@each("detour", [0, 1, 3, 50])
def test_keys_lie_left_of_their_doors_and_no_further_back_than_the_detour(detour: int) -> None:
    env, farthest = Corridor(num_rooms=12, num_doors=5, detour=detour), 0
    for seed in range(200):
        env.reset(seed=seed)
        rooms = [0, *env.doors]
        for (room, color), before in zip(env.doors.items(), rooms, strict=False):
            assert max(1, before + 1 - detour) <= env.keys[color] <= room
            farthest = max(farthest, before + 1 - env.keys[color])
    assert farthest == min(detour, 10)


@pytest.mark.slow
@each(
    ("options", "least", "most"),
    [
        ({"num_rooms": 7, "num_doors": 2, "detour": 0}, 10, 10),
        ({}, 17, 29),
        ({"num_rooms": 14, "num_doors": 6}, 25, 45),
    ],
)
def test_the_oracle_takes_as_many_turns_as_the_page_says(options: dict[str, Any], least: int, most: int) -> None:
    env, lengths = Corridor(**options), []
    for seed in range(300):
        env.reset(seed=seed)
        lengths.append(1)
        while not env.step(env.oracle())[2]:
            lengths[-1] += 1
    assert least <= min(lengths) <= max(lengths) <= most


def test_a_wrong_turn_is_another_tool_or_another_color_that_is_seen() -> None:
    env, rng = corridor(), np.random.default_rng(0)
    env.room, env.holding = 2, "red"
    calls = {str(env.oracle(skill=0.0, rng=rng)["tool_calls"][0]["function"]) for _ in range(100)}
    right = tool_call("take", key="blue")["tool_calls"][0]["function"]
    assert str(env.oracle()["tool_calls"][0]["function"]) == str(right)
    assert len(calls) == 2 + 1 + 2  # left, right; take red; unlock either
    assert str(right) not in calls


@each(
    ("options", "words"),
    [
        ({"num_rooms": 1}, "num_rooms: give a whole number from 2 to 50, got 1"),
        ({"num_rooms": 3, "num_doors": 3}, "num_doors: 3 rooms have 2 walls between them, got 3"),
        ({"detour": -1}, "detour: give a whole number from 0 to 50, got -1"),
        ({"turn_reward": 2}, "turn_reward: give a number from 0 to 1, got 2"),
    ],
)
def test_an_impossible_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Corridor(**options)
