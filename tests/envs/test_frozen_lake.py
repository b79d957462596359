from collections import Counter
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl_envs.frozen_lake import DIRECTIONS, FrozenLake, lake
from tests.support.each import each

ROWS = tuple(MAPS["4x4"])  # SFFF FHFH FFFH HFFG


def on(rows: tuple[str, ...], **options: Any) -> FrozenLake:
    env = FrozenLake(size=len(rows), **options)
    env.reset(seed=0)
    env.rows = rows
    return env


def move(to: str) -> Any:
    return tool_call("move", to=to)


@each("slip", [0.0, 0.3, 2 / 3])
def test_moves_go_where_gymnasiums_go(slip: float) -> None:
    model = FrozenLakeEnv(desc=list(ROWS), is_slippery=slip > 0, success_rate=1 - slip)
    env = on(ROWS, slip=slip)
    for tile in (0, 6, 14):
        for k, direction in enumerate(DIRECTIONS):
            expected: Counter[int] = Counter()
            for chance, at, *_ in model.P[tile][k]:
                expected[at] += chance
            found: Counter[int] = Counter()
            for _ in range(600):
                env.at, env._is_over = tile, False
                env.step(move(direction))
                found[env.at] += 1
            assert found.keys() == expected.keys()
            # A share of 600 has a deviation of at most .5 / sqrt(600) = .02.
            assert all(found[at] / 600 == pytest.approx(expected[at], abs=0.08) for at in found)


@each("slip", [0.0, 0.2, 2 / 3])
def test_the_oracle_is_optimal(slip: float) -> None:
    """Its directions are those of plain value iteration over Gymnasium's own model."""
    for seed in range(5):
        rows = generate_random_map(5, 0.75, seed=seed)
        model = FrozenLakeEnv(desc=rows, is_slippery=slip > 0, success_rate=1 - slip)
        outcomes = [
            [o for k in range(3) for o in [model.P[s][a][k % len(model.P[s][a])]]] for s in range(25) for a in range(4)
        ]
        chances, at, earned, over = (
            np.array([[o[k] for o in of] for of in outcomes]).reshape(25, 4, 3) for k in range(4)
        )
        chances = chances / chances.sum(axis=2, keepdims=True)
        values = np.zeros(25)
        for _ in range(3000):
            worth = (chances * (earned + 0.99 * values[at.astype(int)] * (1 - over))).sum(axis=2)
            values = worth.max(axis=1)
        best = lake(tuple(rows), slip).best
        for tile in range(25):
            if "".join(rows)[tile] in "SF" and values[tile] > 0:
                assert best[tile] == [a for a in range(4) if worth[tile][a] > values[tile] - 1e-8]


def test_progress_is_paid_and_taken_back_and_a_hole_ends_the_task() -> None:
    env = on(ROWS)  # six steps to the goal
    expected: list[tuple[Any, str, float, bool]] = [
        ("Hello.", "Use move.\n@...\n.O.O\n...O\nO..G", 0, False),
        (move("left"), "@...\n.O.O\n...O\nO..G", 0, False),
        (move("down"), "....\n@O.O\n...O\nO..G", 0.5 / 6, False),
        (move("up"), "@...\n.O.O\n...O\nO..G", -0.5 / 6, False),
        (move("right"), ".@..\n.O.O\n...O\nO..G", 0.5 / 6, False),
        (move("down"), "A hole!", 0, True),
    ]
    for action, says, reward, is_over in expected:
        observation, got, terminated, _, info = env.step(action)
        assert (observation[0]["content"], terminated) == (says, is_over)
        assert got == pytest.approx(reward)
    assert (info["success"], env.state_key()) == (False, "5/SFFFFHFHFFFHHFFG")


def test_around_says_where_the_goal_is_and_what_is_near() -> None:
    env = on(ROWS, view="around")
    assert env.step(move("down"))[0][0]["content"] == "Goal 2 down 3 right. left edge, down ice, right hole, up ice."


def test_the_map_follows_from_the_seed_and_the_slipping_from_the_rollout_too() -> None:
    def moves(index: int) -> tuple[str, list[int]]:
        env = FrozenLake(slip=0.5, frozen=1.0)
        first = env.reset(seed=3, options={"rollout_index": index})[0][0]["content"]
        tiles = []
        for k in range(20):
            env.step(move(DIRECTIONS[k % 4]))
            tiles.append(env.at)
        return first, tiles

    assert moves(0) == moves(0)
    assert moves(0)[0] == moves(1)[0]
    assert moves(0)[1] != moves(1)[1]


def test_an_unknown_view_is_named() -> None:
    with pytest.raises(UserError, match=r"frozen: give a number from 0\.5 to 1, got 0"):
        FrozenLake(frozen=0)
    with pytest.raises(UserError, match="view: give 'map' or 'around', got 'sky'"):
        FrozenLake(view="sky")  # type: ignore[arg-type]
